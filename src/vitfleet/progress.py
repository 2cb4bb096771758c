"""How long work says how far it is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

Advance: TypeAlias = Callable[[int], None]


class Progress(Protocol):
    """Somebody who shows progress: the terminal, or nobody."""

    def task(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Open a task of ``total`` units; the value is called with the units done since."""
        ...


class NoProgress:
    """Shows nothing."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Accept the task and drop what it says."""
        yield lambda units: None


NO_PROGRESS: Progress = NoProgress()
