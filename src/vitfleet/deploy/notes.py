"""How far a round is, told by the process that plays it to the one that shows it: a note in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vitfleet.progress import Advance, Progress

NOTE = "progress.json"


@dataclass(frozen=True)
class Note:
    """A task that is under way, and how much of it is done."""

    label: str
    total: int
    done: int


class Notes:
    """Writes down how far a task is, for another process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOTE

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Keep a note until the task ends."""
        done = 0

        def advance(units: int) -> None:
            nonlocal done
            done += units
            self._write(Note(label, total, done))

        advance(0)
        try:
            yield advance
        finally:
            self.path.unlink(missing_ok=True)

    def _write(self, note: Note) -> None:
        # Seen whole or not at all; whether it outlives a crash does not matter.
        temporary = self.path.with_name(f".{NOTE}.tmp")
        temporary.write_text(json.dumps(asdict(note)))
        temporary.replace(self.path)


def read_note(folder: Path) -> Note | None:
    """Return what is under way; ``None`` if nothing is."""
    try:
        return Note(**json.loads((folder / NOTE).read_text()))
    except FileNotFoundError:
        return None


class Mirror:
    """Shows what another process notes."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._shown: Note | None = None
        self._open = ExitStack()
        self._advance: Advance = lambda units: None

    def show(self, note: Note | None) -> None:
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
