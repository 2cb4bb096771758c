"""How far a round is, told by the process that plays it to the one that shows it: a note in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vitfleet.progress import Advance, Progress

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class ProgressNote:
    """A task that is under way, and how much of it is done."""

    label: str
    total: int
    done: int


class ProgressFile:
    """Writes down how far a task is, for another process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS_FILE

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Keep a note until the task ends."""
        done = 0

        def advance(units: int) -> None:
            nonlocal done
            done += units
            self._write(ProgressNote(label, total, done))

        advance(0)
        try:
            yield advance
        finally:
            self.path.unlink(missing_ok=True)

    def _write(self, note: ProgressNote) -> None:
        # Seen whole or not at all; whether it outlives a crash does not matter.
        temporary = self.path.with_name(f".{PROGRESS_FILE}.tmp")
        temporary.write_text(json.dumps(asdict(note)))
        temporary.replace(self.path)


def read_progress(folder: Path) -> ProgressNote | None:
    """Return what is under way; ``None`` if nothing is."""
    try:
        return ProgressNote(**json.loads((folder / PROGRESS_FILE).read_text()))
    except FileNotFoundError:
        return None


class Mirror:
    """Shows what another process notes."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._shown: ProgressNote | None = None
        self._open = ExitStack()
        self._advance: Advance = lambda units: None

    def show(self, note: ProgressNote | None) -> None:
        """Show what is under way now."""
        shown = self._shown
        if note is None or shown is None or (note.label, note.total) != (shown.label, shown.total):
            self._open.close()
            shown = None
        if note is not None:
            if shown is None:
                self._advance = self._open.enter_context(self.progress.task(note.label, note.total))
            self._advance(note.done - (shown.done if shown else 0))
        self._shown = note
