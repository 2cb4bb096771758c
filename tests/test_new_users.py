"""What new users stumbled over on the command line: each ends in one sentence with what is wrong and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import TINY, Command
from made_photos import draw_photos


def keys(*more: str) -> list[str]:
    return [part for override in (*TINY, "rounds=1", *more) for part in ("-o", override)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, vitfleet: Command) -> Path:
    """Return the folder of a run in the folder that commands run in."""
    folder = tmp_path_factory.mktemp("first")
    result = vitfleet(folder, "run", "digits", *keys(), "--out", "first")
    assert result.returncode == 0, result.stderr
    return folder


def sentence(vitfleet: Command, folder: Path, *arguments: str) -> str:
    """Return the one line that a command refused with."""
    result = vitfleet(folder, *arguments)
    assert result.returncode == 2, result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("accuracyy", "callbacks.early_stopping.monitor = 'accuracyy'"),
        ("metrics.per_class.mean", "-o metrics.per_class.every=1"),  # it is off
        ("metrics.per_klass.mean", "metrics.per_klass"),
        ("task.average_accuracy", "data.tasks"),  # a run without tasks
    ],
)
def test_what_is_monitored_is_checked_before_training(
    monitor: str, expected: str, vitfleet: Command, tmp_path: Path
) -> None:
    command = ["run", "digits", *keys(f"callbacks.early_stopping.monitor={monitor}"), "--out", "stopped"]
    assert expected in sentence(vitfleet, tmp_path, *command)
    assert not (tmp_path / "stopped").exists()


def test_cost_takes_a_method_as_compare_does(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "cost", "digits", "--method", "fedbfpt local_layers=3", "--method", "fedavg", "--json")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)["methods"]) == {"fedbfpt local_layers=3", "fedavg"}


def test_a_key_given_as_an_option_is_answered_with_the_override(vitfleet: Command, tmp_path: Path) -> None:
    assert "-o rounds=5" in sentence(vitfleet, tmp_path, "run", "digits", "--rounds", "5")
    assert "-o train.lr=" in sentence(vitfleet, tmp_path, "run", "digits", "--lr", "1e-3")
    assert "-o train.epochs=" in sentence(vitfleet, tmp_path, "compare", "digits", "--epochs=2")


def test_a_command_that_is_not_there_names_a_similar_one_once(vitfleet: Command, tmp_path: Path) -> None:
    line = sentence(vitfleet, tmp_path, "list")
    assert line.count("'client'") <= 1
    assert "vitfleet --help" in line


def test_one_class_only_is_said(vitfleet: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw_photos(tmp_path / "photos", ("cat",), per_class=20)
    result = vitfleet(tmp_path, "run", "digits", *keys("data.path=photos", "data.limit=null"), "--out", "one")
    assert result.returncode == 0, result.stderr
    assert "photos: all images are of one class, cat: there is nothing to learn" in caplog.text


def test_keys_by_prefix_and_methods_alone(vitfleet: Command, tmp_path: Path) -> None:
    by_prefix = vitfleet(tmp_path, "keys", "data.tasks").stdout.strip().splitlines()
    assert len(by_prefix) > 5
    assert all(line.startswith("data.tasks") for line in by_prefix)
    methods = vitfleet(tmp_path, "keys", "--methods").stdout.strip().splitlines()
    assert 20 < len(methods) < 60
    assert methods[0].startswith("standalone")
    assert "data.taks" in sentence(vitfleet, tmp_path, "keys", "data.taks")


def test_a_metric_is_a_column_of_the_table(vitfleet: Command, tmp_path: Path) -> None:
    assert vitfleet(tmp_path, "run", "digits", *keys("metrics.per_class={}"), "--out", "m").returncode == 0
    result = vitfleet(tmp_path, "table", "m", "--columns", "accuracy,metrics.per_class.worst", "--to", "csv")
    assert result.returncode == 0, result.stderr
    assert "per class worst" in result.stdout.splitlines()[0]
    listed = vitfleet(tmp_path, "table", "m", "--columns", "help").stdout
    assert "metrics.per_class.worst" in listed


def test_an_export_without_its_packages_leaves_no_folder(
    first: Path, vitfleet: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    hidden = {"onnx", "onnxruntime", "onnxscript", "peft"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in hidden else find_spec(name, *more)
    )
    for name in hidden:
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert "pip install" in sentence(vitfleet, first, "export", "first", "--to", "onnx", "--out", "model")
    assert not (first / "model").exists()
    run = ["run", "digits", *keys("method.name=fed-lora"), "--out", str(tmp_path / "lora")]
    assert vitfleet(tmp_path, *run).returncode == 0
    assert "peft" in sentence(vitfleet, tmp_path, "export", "lora", "--to", "timm", "--out", "adapter")
    assert not (tmp_path / "adapter").exists()


def test_tasks_have_a_partition_of_their_own(vitfleet: Command, tmp_path: Path) -> None:
    line = sentence(vitfleet, tmp_path, "run", "fedvit-digits", "-o", "data.partition.beta=0.1", "--out", "tasks")
    assert "data.partition" in line
    assert "data.tasks" in line
