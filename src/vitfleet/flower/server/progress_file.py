"""Files in a run's folder with which Flower's server process reports to ``vitfleet server``: progress, and an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vitfleet.progress import Advance, Progress

PROGRESS_FILE = "progress.json"
ERROR_FILE = "error.txt"  # an error that the user must fix


@dataclass(frozen=True)
class TaskProgress:
    """The current task, and how many of its units are done."""

    label: str
    total: int
    done: int


class ProgressFile:
    """Writes the progress of a task to a file, for another process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS_FILE

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Keep the file up to date until the task ends, then delete it."""
        done = 0

        def advance(units: int) -> None:
            nonlocal done
            done += units
            self._write(TaskProgress(label, total, done))

        advance(0)
        try:
            yield advance
        finally:
            self.path.unlink(missing_ok=True)

    def _write(self, progress: TaskProgress) -> None:
        # Atomic for a reader. It need not survive a crash, so it is not synced to disk.
        temporary = self.path.with_name(f".{PROGRESS_FILE}.tmp")
        temporary.write_text(json.dumps(asdict(progress)))
        temporary.replace(self.path)


def read_progress(folder: Path) -> TaskProgress | None:
    """Return the current task's progress; ``None`` if there is no task."""
    try:
        return TaskProgress(**json.loads((folder / PROGRESS_FILE).read_text()))
    except FileNotFoundError:
        return None


class ProgressMirror:
    """Shows the progress that another process has written to its file."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._shown: TaskProgress | None = None
        self._open = ExitStack()
        self._advance: Advance = lambda units: None

    def show(self, current: TaskProgress | None) -> None:
        """Show the current task; ``None`` ends the one that is shown."""
        shown = self._shown
        if current is None or shown is None or (current.label, current.total) != (shown.label, shown.total):
            self._open.close()
            shown = None
        if current is not None:
            if shown is None:
                self._advance = self._open.enter_context(self.progress.task(current.label, current.total))
            self._advance(current.done - (shown.done if shown else 0))
        self._shown = current
