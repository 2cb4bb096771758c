"""Experiment trackers: what they receive, resumed runs, missing packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import MakeConfig
from vitfleet.errors import ConfigError
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import run_id
from vitfleet.run.output.trackers import Trackers, scalars_of
from vitfleet.run.records import Accuracy, ClientRecord, RoundRecord
from vitfleet.run.setup import open_run


def test_scalars_of_a_record() -> None:
    clients = [ClientRecord(0, 5, 4, gflops=1.5), ClientRecord(1, 5, 0, failure="too late")]
    record = RoundRecord(3, 0.1, None, Accuracy(0.5, 1.25, 1, None), clients, 40, 50, virtual_seconds=7.0)
    assert scalars_of(record) == {
        "train/lr": 0.1,
        "train/gflops": 1.5,
        "bytes/up_total": 40,
        "bytes/down_total": 50,
        "clients/failed": 1,
        "virtual_seconds": 7.0,
        "accuracy/global": 0.5,
        "test/loss": 1.25,
    }


class Calls:
    """Replaces a package: records every call and returns itself."""

    info = SimpleNamespace(run_id="r1")

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Calls:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, Calls]:
    """Replace W&B and MLflow by packages that only record calls."""
    wandb, mlflow = Calls(), Calls()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return wandb, mlflow


def test_all_trackers_get_the_same_scalars(
    tiny_config: MakeConfig, tmp_path: Path, trackers: tuple[Calls, Calls]
) -> None:
    wandb, mlflow = trackers
    config = tiny_config("rounds=2", "trackers={tensorboard={}, wandb={}, mlflow={}}")
    run_rounds(open_run(config, tmp_path))

    assert [name for name, _, _ in wandb.calls] == ["init", "log", "log", "finish"]
    begun = wandb.calls[0][2]
    assert (begun["id"], begun["name"]) == (run_id(tmp_path), tmp_path.name)
    assert begun["resume"] == "allow"
    assert begun["config"]["rounds"] == 2
    assert [name for name, _, _ in mlflow.calls if name.startswith("log_m")] == ["log_metrics"] * 2
    assert mlflow.calls[-1][0] == "end_run"
    assert [kwargs["step"] for name, _, kwargs in wandb.calls if name == "log"] == [1, 2]
    logged = [args[0] for name, args, _ in wandb.calls if name == "log"]
    assert logged == [args[0] for name, args, _ in mlflow.calls if name == "log_metrics"]
    assert "accuracy/global" in logged[0]
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_continues_the_trackers_runs(
    tiny_config: MakeConfig, tmp_path: Path, trackers: tuple[Calls, Calls]
) -> None:
    wandb, mlflow = trackers
    for next_round in (1, 2):
        Trackers(tiny_config("trackers={wandb={}, mlflow={}}"), tmp_path, next_round).close()
    first, second = (kwargs["id"] for name, _, kwargs in wandb.calls if name == "init")
    assert first == second
    starts = [kwargs for name, _, kwargs in mlflow.calls if name == "start_run"]
    assert starts == [{"run_name": tmp_path.name}, {"run_id": "r1"}]


def test_a_tracker_that_does_not_start_is_a_configuration_error(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise RuntimeError("no login")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"trackers = 'wandb': does not start \(no login\); fix"):
        Trackers(tiny_config("trackers={wandb={}}"), tmp_path, 1)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_a_configuration_error(
    name: str, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{name}\]'"):
        Trackers(tiny_config(f"trackers={{{name}={{}}}}"), tmp_path, 1)


def test_a_run_without_tensorboard_is_otherwise_the_same(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run_rounds(open_run(tiny_config("rounds=1"), tmp_path))
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "tensorboard").exists()
