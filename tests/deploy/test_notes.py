"""What one process notes of its progress, and another shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vitfleet.deploy.notes import Mirror, Note, Notes, read_note
from vitfleet.progress import Advance


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        self.heard.append((label, total))
        yield self.heard.append
        self.heard.append("ended")


def test_a_note_lasts_as_long_as_its_task(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    assert read_note(tmp_path) is None
    with notes.task("round 1: clients", 3) as advance:
        assert read_note(tmp_path) == Note("round 1: clients", 3, 0)
        advance(2)
        assert read_note(tmp_path) == Note("round 1: clients", 3, 2)
    assert read_note(tmp_path) is None
    with pytest.raises(ZeroDivisionError), notes.task("round 2: clients", 3):
        1 / 0  # noqa: B018
    assert read_note(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_shows_each_task_once_and_only_what_is_new() -> None:
    listener = Listener()
    mirror = Mirror(listener)
    for note in (None, Note("a", 4, 0), Note("a", 4, 3), Note("a", 4, 3), Note("b", 1, 0), None, None):
        mirror.show(note)
    assert listener.heard == [("a", 4), 0, 3, 0, "ended", ("b", 1), 0, "ended"]
