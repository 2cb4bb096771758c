"""How often and how long the server polls Flower's SuperLink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flwr.supercore.inflatable.inflatable_utils import pull_objects

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 1.0  # between two polls; the interval doubles while nothing arrives


@dataclass(frozen=True)
class Clock:
    """Source of time, so that a test can replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@contextmanager
def object_polling(max_seconds: float) -> Iterator[None]:
    """Make Flower poll often, and at most for ``max_seconds``, for the pieces of a reply that is being uploaded.

    Flower announces a reply before its first piece arrives. By default it polls for each piece after 1, 2, 4, 8, 10,
    10, … seconds, for up to two hours. On a slow connection a round would then take seconds longer than necessary, and
    no deadline would apply to a client that stops during an upload. Flower offers no setting except these defaults.
    """
    defaults = pull_objects.__kwdefaults__ or {}
    original = dict(defaults)
    defaults.update(
        initial_backoff=MIN_INTERVAL_S,
        backoff_cap=MAX_INTERVAL_S,
        max_time=max(0.0, max_seconds),
        max_tries_per_object=None,
    )
    try:
        yield
    finally:
        defaults.update(original)
