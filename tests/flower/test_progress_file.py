"""Progress that one process writes to a file and another one shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vitfleet.flower.server.progress_file import ProgressFile, ProgressMirror, TaskProgress, read_progress
from vitfleet.progress import Advance


class RecordedProgress:
    """Records all calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        self.calls.append((label, total))
        yield self.calls.append
        self.calls.append("ended")


def test_progress_file_exists_while_its_task_runs(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path)
    assert read_progress(tmp_path) is None
    with progress.task("round 1: clients", 3) as advance:
        assert read_progress(tmp_path) == TaskProgress("round 1: clients", 3, 0)
        advance(2)
        assert read_progress(tmp_path) == TaskProgress("round 1: clients", 3, 2)
    assert read_progress(tmp_path) is None
    with pytest.raises(ZeroDivisionError), progress.task("round 2: clients", 3):
        1 / 0  # noqa: B018
    assert read_progress(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_progress_mirror_shows_each_task_once_and_advances_by_the_difference() -> None:
    recorded = RecordedProgress()
    mirror = ProgressMirror(recorded)
    for progress in (
        None,
        TaskProgress("a", 4, 0),
        TaskProgress("a", 4, 3),
        TaskProgress("a", 4, 3),
        TaskProgress("b", 1, 0),
        None,
        None,
    ):
        mirror.show(progress)
    assert recorded.calls == [("a", 4), 0, 3, 0, "ended", ("b", 1), 0, "ended"]
