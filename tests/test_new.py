"""`vitfleet new method`: the written files work as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Command


@pytest.mark.usefixtures("without_figure_files")
def test_new_method_runs_and_its_test_passes(vitfleet: Command, tmp_path: Path) -> None:
    written = vitfleet(tmp_path, "new", "method", "fed-mine")
    assert written.returncode == 0, written.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"fed_mine.py", "test_fed_mine.py", "fed-mine.toml"}
    sizes = ("-o", "rounds=1", "-o", "data.limit=200", "-o", "train.epochs=1")
    done = vitfleet(tmp_path, "run", "fed-mine.toml", *sizes, "--out", "run")
    assert done.returncode == 0, done.stderr
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fed_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("name", ["Fed Mine", "9lives", "class", ""])
def test_new_method_rejects_a_name_that_cannot_work(vitfleet: Command, tmp_path: Path, name: str) -> None:
    written = vitfleet(tmp_path, "new", "method", name)
    assert written.returncode == 2
    assert "such as fedmine" in written.stderr
    assert not list(tmp_path.iterdir())


def test_new_method_overwrites_nothing(vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "fedmine.toml").write_text("mine")
    written = vitfleet(tmp_path, "new", "method", "fedmine")
    assert written.returncode == 2
    assert "exists already" in written.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["fedmine.toml"]
