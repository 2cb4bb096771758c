"""A run goes on with the configuration that it began with; what may change is a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Command


@pytest.fixture
def run_folder(vitfleet: Command, tmp_path: Path, tiny_overrides: tuple[str, ...]) -> Path:
    keys = [part for override in tiny_overrides for part in ("-o", override)]
    result = vitfleet(tmp_path, "run", "digits", *keys, "-o", "rounds=1", "--out", "first")
    assert result.returncode == 0, result.stderr
    return tmp_path / "first"


def edit(folder: Path, **changes: dict[str, Any]) -> None:
    """Change keys of tables in the file, as with an editor."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for table, keys in changes.items():
        config[table] = {**config[table], **keys}
    path.write_text(json.dumps(config, indent=2))


def test_an_edited_configuration_is_refused_with_the_tables_that_changed(run_folder: Path, vitfleet: Command) -> None:
    edit(run_folder, method={"name": "fedprox", "mu": 0.5}, train={"lr": 0.5})
    before = (run_folder / "records.jsonl").read_bytes()
    for more in ([], ["--rounds", "2"]):
        result = vitfleet(run_folder.parent, "resume", "first", *more)
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert "first/config.json" in result.stderr
        assert "method, train" in result.stderr
        assert "vitfleet run first/config.json" in result.stderr, "the remedy: a run of its own"
    assert (run_folder / "records.jsonl").read_bytes() == before


def test_rounds_and_the_machine_may_change(run_folder: Path, vitfleet: Command) -> None:
    edit(run_folder, machine={"workers": 1, "stack_size": 1})
    result = vitfleet(run_folder.parent, "resume", "first", "--rounds", "2")
    assert result.returncode == 0, result.stderr
    assert json.loads((run_folder / "summary.json").read_text())["rounds"] == 2
