"""What one process notes of its progress, and another shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vitfleet.flower.progress_file import Mirror, ProgressFile, ProgressNote, read_progress
from vitfleet.progress import Advance


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.last_seen: list[object] = []

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        self.last_seen.append((label, total))
        yield self.last_seen.append
        self.last_seen.append("ended")


def test_a_note_lasts_as_long_as_its_task(tmp_path: Path) -> None:
    notes = ProgressFile(tmp_path)
    assert read_progress(tmp_path) is None
    with notes.task("round 1: clients", 3) as advance:
        assert read_progress(tmp_path) == ProgressNote("round 1: clients", 3, 0)
        advance(2)
        assert read_progress(tmp_path) == ProgressNote("round 1: clients", 3, 2)
    assert read_progress(tmp_path) is None
    with pytest.raises(ZeroDivisionError), notes.task("round 2: clients", 3):
        1 / 0  # noqa: B018
    assert read_progress(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_shows_each_task_once_and_only_what_is_new() -> None:
    listener = Listener()
    mirror = Mirror(listener)
    for note in (
        None,
        ProgressNote("a", 4, 0),
        ProgressNote("a", 4, 3),
        ProgressNote("a", 4, 3),
        ProgressNote("b", 1, 0),
        None,
        None,
    ):
        mirror.show(note)
    assert listener.last_seen == [("a", 4), 0, 3, 0, "ended", ("b", 1), 0, "ended"]
