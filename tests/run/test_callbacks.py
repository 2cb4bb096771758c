"""Callbacks: when they are called, how they stop a run, and that a resume restores them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import Command, InterruptAfter, MakeConfig
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError
from vitfleet.run.callbacks import (
    Best,
    BestModel,
    BestModelParams,
    Callback,
    EarlyStopping,
    EarlyStoppingParams,
    StopRun,
    check_monitored,
    monitored_value,
)
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import RunResult, run_rounds
from vitfleet.run.records import Accuracy, ClientRecord, RoundRecord, TaskRecord, read_records
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState


def run(config: Config, folder: Path, *callbacks: Callback) -> RunResult:
    return run_rounds(open_run(config, folder), callbacks=callbacks)


def record_of(round: int, accuracy: float | None, loss: float = 1.0) -> RoundRecord:
    measured = None if accuracy is None else Accuracy(accuracy, loss, 1, accuracy / 2)
    return RoundRecord(round, 0.1, loss, measured, [], 0, 0)


class Calls(Callback):
    """Lists the calls it gets, and stops the run after a round."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[str] = []
        self.stop_after = stop_after

    def restore(self, run_folder: Path, records: Iterable[RoundRecord]) -> None:
        self.calls += [f"restore {record.round}" for record in records]

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        self.calls.append(f"start {state.round}")

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        assert state.round == record.round
        self.calls.append(f"round {record.round}")
        return StopRun(f"enough after {record.round}") if record.round == self.stop_after else None

    def summary_entries(self) -> Mapping[str, Any]:
        return {"calls": len(self.calls)}

    def on_run_end(self, state: RunState, summary: Mapping[str, Any]) -> None:
        self.calls.append(f"end {state.round} {summary['calls']}")


def test_callbacks_are_called_in_order(tiny_config: MakeConfig, tmp_path: Path) -> None:
    calls = Calls()
    run(tiny_config(), tmp_path, calls)
    assert calls.calls == ["start 0", "round 1", "round 2", "round 3", "end 3 4"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["calls"] == 4
    assert "stopped" not in summary


def test_a_resumed_run_restores_callbacks_from_the_rounds_before(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tiny_config(), tmp_path, InterruptAfter(2))
    calls = Calls()
    run(tiny_config(), tmp_path, calls)
    assert calls.calls == ["restore 1", "start 1", "round 2", "round 3", "end 3 4"]


@pytest.mark.parametrize("every", [1, 5])
def test_a_stopped_run_is_finished(every: int, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(f"machine.checkpoint_every={every}")
    result = run(config, tmp_path, Calls(stop_after=2), Calls(stop_after=2))
    assert result.state.round == 2
    assert result.summary["stopped"] == {"round": 2, "reason": "enough after 2"}
    assert result.summary["rounds"] == len(list(read_records(tmp_path))) == 2
    context = open_run(config, tmp_path)
    assert load_state(context).is_finished(config.rounds)
    calls = Calls()
    again = run_rounds(context, callbacks=[calls])
    assert calls.calls == ["restore 1", "restore 2", "start 2", "end 2 3"]
    assert again.summary["stopped"] == result.summary["stopped"]
    assert again.summary["execution"] == result.summary["execution"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["vitfleet"])["rounds"] == 2


def test_the_first_rounds_of_a_stopped_run_are_those_of_a_full_one(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config(), tmp_path / "full")
    run(tiny_config(), tmp_path / "stopped", Calls(stop_after=2))
    full, stopped = ((tmp_path / name / "records.jsonl").read_text().splitlines() for name in ("full", "stopped"))
    assert full[:2] == stopped


# Early stopping


def stops_after(values: list[float | None], **params: Any) -> int | None:
    """Return the round after which early stopping stops a run with these accuracies."""
    callback = EarlyStopping(EarlyStoppingParams(**params))
    state = RunState(None)  # type: ignore[arg-type]
    for round, value in enumerate(values, start=1):
        if callback.on_round_end(state, record_of(round, value, loss=value or 1.0)) is not None:
            return round
    return None


def test_early_stopping_waits_for_its_patience() -> None:
    values: list[float | None] = [0.1, 0.3, 0.2, 0.3, 0.25, 0.4]
    assert stops_after(values, patience=2) == 4  # equal is no improvement
    assert stops_after(values, patience=3) == 5
    assert stops_after(values, patience=4) is None


def test_early_stopping_counts_measurements_not_rounds() -> None:
    assert stops_after([0.3, None, None, 0.2, None, 0.1], patience=2) == 6


def test_early_stopping_needs_an_improvement_of_min_delta() -> None:
    values: list[float | None] = [0.10, 0.14, 0.18, 0.22]
    assert stops_after(values, patience=1, min_delta=0.05) == 2
    assert stops_after(values, patience=2, min_delta=0.05) is None  # 0.18 is 0.08 better than 0.10


def test_early_stopping_of_a_loss_stops_when_it_no_longer_falls() -> None:
    assert stops_after([3.0, 2.0, 2.5, 1.0], monitor="loss", mode="min", patience=1) == 3


def test_early_stopping_names_the_best_round() -> None:
    callback = EarlyStopping(EarlyStoppingParams(patience=1))
    state = RunState(None)  # type: ignore[arg-type]
    assert callback.on_round_end(state, record_of(1, 0.5)) is None
    stop = callback.on_round_end(state, record_of(2, 0.4))
    assert stop == StopRun("accuracy.global has not improved for 1 measurements; the best was 0.5 in round 1")


def test_early_stopping_restored_decides_as_if_never_interrupted() -> None:
    values = [0.1, 0.3, 0.2, 0.25, 0.28, 0.1]
    records = [record_of(round, value) for round, value in enumerate(values, start=1)]
    state = RunState(None)  # type: ignore[arg-type]
    for split in range(len(records)):
        callback = EarlyStopping(EarlyStoppingParams(patience=4))
        callback.restore(Path(), records[:split])
        assert [callback.on_round_end(state, record) is not None for record in records[split:]] == (
            [False] * (5 - split) + [True]
        )


CALLBACKS = "callbacks={early_stopping={monitor='loss', patience=2, min_delta=9.0, mode='min'}, best_model={}}"


def test_callbacks_of_the_configuration_survive_an_interruption(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("rounds=9", CALLBACKS, "machine.checkpoint_every=2")
    undisturbed = run(config, tmp_path / "undisturbed")
    assert undisturbed.summary["stopped"]["round"] == 3
    for interrupted in (1, 2, 3):
        folder = tmp_path / str(interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder, InterruptAfter(interrupted))
        resumed = run(config, folder)
        assert resumed.summary["stopped"] == undisturbed.summary["stopped"]
        assert resumed.summary["best_model"] == undisturbed.summary["best_model"]
        for name in ("records.jsonl", "best.safetensors", "model.safetensors"):
            assert (folder / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


# The best model


def test_best_model_is_the_model_of_the_best_round(tiny_config: MakeConfig, tmp_path: Path) -> None:
    params = BestModelParams(monitor="loss", mode="min")
    states: list[RunState] = []

    class Keep(Callback):
        def on_round_end(self, state: RunState, record: RoundRecord) -> None:
            states.append(state)

    result = run(tiny_config("rounds=4", "train.lr=0.3"), tmp_path, Keep(), BestModel(params))
    losses = [record.loss or 0.0 for record in read_records(tmp_path)]
    best = losses.index(min(losses)) + 1
    assert best < 4, "a rate that is too large: the last round is not the best"
    assert result.summary["best_model"] == {"round": best, "monitor": "loss", "value": min(losses)}
    tensors = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(tensors[name], states[best - 1].server.tensors[name]) for name in tensors)
    with (
        safe_open(tmp_path / "best.safetensors", "pt") as file,
        safe_open(tmp_path / "model.safetensors", "pt") as last,
    ):
        about, about_last = (json.loads(one.metadata()["vitfleet"]) for one in (file, last))
        assert set(file.keys()) == set(last.keys())
    assert about == {**about_last, "rounds": best}


def test_best_model_of_a_discarded_round_is_replaced(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config("rounds=3"), tmp_path, BestModel(BestModelParams(monitor="loss")))
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        round = json.loads(file.metadata()["vitfleet"])["rounds"]
    kept = BestModel(BestModelParams(monitor="loss"))
    losses = {1: 5.0}
    kept.restore(tmp_path, (record_of(number, None, loss=losses.get(number, 1.0)) for number in range(1, round + 1)))
    assert kept.summary_entries()["best_model"]["round"] == 1
    replaced = BestModel(BestModelParams(monitor="loss"))
    replaced.restore(tmp_path, (record_of(number, None, loss=5.0) for number in range(1, round)))
    assert replaced.summary_entries() == {}


def test_best_model_needs_a_global_model(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("method.name=standalone", "callbacks={best_model={}}")
    with pytest.raises(ConfigError, match=r"callbacks\.best_model.*standalone has no global model"):
        run(config, tmp_path)


# What is monitored


def test_monitored_value_reads_numbers_by_their_dotted_name() -> None:
    record = RoundRecord(1, 0.1, 2.0, Accuracy(0.5, 1.5, 1, 0.25), [ClientRecord(0, 1, 1)], 7, 8)
    names = ("accuracy.global", "accuracy.local", "accuracy.loss", "loss", "total_up_bytes")
    assert [monitored_value(record, name) for name in names] == [0.5, 0.25, 1.5, 2.0, 7.0]
    assert monitored_value(record, "task.average_accuracy") is None
    learned = RoundRecord(1, 0.1, None, None, [], 0, 0, TaskRecord(1, [[0.9]], None, 0.9))
    assert monitored_value(learned, "task.average_accuracy") == 0.9
    assert monitored_value(learned, "accuracy.global") is None


@pytest.mark.parametrize("name", ["acuracy.global", "accuracy.top5", "clients", "accuracy", "loss.train", ""])
def test_what_no_record_has_is_not_monitored(name: str, tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.x\.monitor = .* accuracy\.global, accuracy\.local"):
        check_monitored("callbacks.x.monitor", name, tiny_config())


def test_a_metric_without_the_value_names_those_that_it_has() -> None:
    record = RoundRecord(1, 0.1, 2.0, None, [], 7, 8, metrics={"drift": {"mean": 0.5, "max": None, "by": [1.0]}})
    assert monitored_value(record, "metrics.drift.mean") == 0.5
    assert monitored_value(record, "metrics.drift.max") is None
    assert monitored_value(record, "metrics.other.mean") is None, "not measured in this round"
    with pytest.raises(UserError, match="has the numbers mean, max"):
        monitored_value(record, "metrics.drift.by")


def test_best_updates_on_improvement_only() -> None:
    best = Best("min", min_delta=0.5)
    assert best.update(3.0, 1)
    assert not best.update(2.5, 2)
    assert best.update(2.4, 3)
    assert (best.value, best.round) == (2.4, 3)


# The command


def test_the_command_stops_early_and_says_so(
    vitfleet: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    options = [part for override in (*tiny_overrides, "rounds=9", CALLBACKS) for part in ("-o", override)]
    done = vitfleet(tmp_path, "run", "digits", *options, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "stopped early" in done.stdout
    assert "eager" in done.stdout
    again = vitfleet(tmp_path, "resume", "run")
    assert again.returncode == 0, again.stderr
    assert "this run is finished: it was stopped after round 3 (loss has not improved" in again.stdout
