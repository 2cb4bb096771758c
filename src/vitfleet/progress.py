"""Progress of long tasks, independent of how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

Advance: TypeAlias = Callable[[int], None]


class Progress(Protocol):
    """Shows the progress of tasks, for example on the terminal."""

    def task(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Open a task of ``total`` units. The context's value is called with the number of units done since."""
        ...


class NoProgress:
    """Shows nothing."""

    def task(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Ignore the task."""
        return nullcontext(lambda units: None)


NO_PROGRESS: Progress = NoProgress()
