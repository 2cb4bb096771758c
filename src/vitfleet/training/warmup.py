"""Compiling a step or capturing it in a graph takes seconds that are not training: they are shown and timed."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from vitfleet.progress import NO_PROGRESS, Progress


class WarmupTimer:
    """Shows warm-ups as progress tasks, and adds up the time they take.

    Attributes
    ----------
    progress
        Where warm-ups are shown.
    """

    def __init__(self) -> None:
        self.progress: Progress = NO_PROGRESS
        self._seconds = 0.0
        self._timed_keys: set[Hashable] = set()

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Show and time a warm-up."""
        started = time.perf_counter()
        with self.progress.task(label, 1):
            yield
        self._seconds += time.perf_counter() - started

    def time_first(self, label: str, key: Hashable) -> AbstractContextManager[None]:
        """Show and time the first warm-up of a key; do nothing for later ones."""
        if key in self._timed_keys:
            return nullcontext()
        self._timed_keys.add(key)
        return self.time(label)

    def pop_seconds(self) -> float:
        """Return the seconds of all warm-ups since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
