"""Making a step ready (compiling it, capturing it in a graph) takes seconds that training does not: they are shown."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from vitfleet.progress import NO_PROGRESS, Progress


class WarmupTimer:
    """Which kinds of step are ready, and how long making them so took.

    Attributes
    ----------
    progress
        Who is told while it lasts.
    """

    def __init__(self) -> None:
        self.progress: Progress = NO_PROGRESS
        self._seconds = 0.0
        self._ready: set[Hashable] = set()

    @contextmanager
    def making(self, what: str) -> Iterator[None]:
        """Show that something is made ready, and time it."""
        started = time.perf_counter()
        with self.progress.task(what, 1):
            yield
        self._seconds += time.perf_counter() - started

    def once(self, what: str, kind: Hashable) -> AbstractContextManager[None]:
        """Show and time the first step of a kind; nothing of the later ones."""
        if kind in self._ready:
            return nullcontext()
        self._ready.add(kind)
        return self.making(what)

    def pop_seconds(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
