"""Metrics of whole tiny runs: values against an independent evaluation, held-out clients, plug-ins, resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, recall_score

from conftest import TINY, InterruptAfter, MakeConfig
from vitfleet.config import load_config
from vitfleet.config.load import read_config
from vitfleet.config.registry import METRICS
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError
from vitfleet.message import Tensors
from vitfleet.run.callbacks import Callback, StopRun
from vitfleet.run.clients import held_out_clients, training_clients
from vitfleet.run.context import RunContext
from vitfleet.run.evaluate.metric_context import with_metrics
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.round_plan import choose_clients
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState


def run(config: Config, folder: Path, *callbacks: Callback) -> tuple[RunContext, RunState, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    context = open_run(config, folder)
    result = run_rounds(context, callbacks=callbacks)
    return context, result.state, result.summary


def predict(context: RunContext, weights: Tensors) -> NDArray[np.int64]:
    """Return predictions for the common test set, computed in one batch with the module itself."""
    images = context.data.test
    with torch.no_grad():
        predicted: NDArray[np.int64] = context.net(weights, context.trainer.preprocess(images.images)).argmax(1).numpy()
    return predicted


def measured(folder: Path) -> list[Mapping[str, Mapping[str, Any]]]:
    return [record.metrics for record in read_records(folder)]


@pytest.mark.parametrize("method", ["fedavg", "fedper", "standalone"])
def test_local_accuracy_matches_each_clients_own_model(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(f"method.name={method}", "metrics.local_accuracy.every=1", "rounds=2")
    context, state, summary = run(config, tmp_path)
    labels = context.data.test.labels.numpy()
    accuracies = []
    for client in range(6):
        client_state = context.fleet.client_state(client)
        assert (client_state is not None) == (method != "fedavg" and client in state.last_seen)
        weights = context.method.model_weights(state.server, context.base.tensors, client_state)
        index = context.partition.test.for_client(client)
        if len(index):
            accuracies.append(np.mean(predict(context, weights)[index] == labels[index]))
    assert len(set(accuracies)) > 1
    values = measured(tmp_path)[-1]["local_accuracy"]
    assert values["mean"] == pytest.approx(np.mean(accuracies))
    assert values["std"] == pytest.approx(np.std(accuracies))
    assert values["worst_10_percent"] == pytest.approx(min(accuracies))
    assert [values[f"p{level}"] for level in (0, 10, 25, 50, 75, 90, 100)] == pytest.approx(
        np.quantile(accuracies, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]).tolist()
    )
    assert values["clients"] == len(accuracies)
    assert summary["metrics"] == measured(tmp_path)[-1]
    assert [set(metrics) for metrics in measured(tmp_path)] == [{"local_accuracy"}] * 2


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_per_class_and_confusion_match_scikit_learn(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(f"method.name={method}", "metrics={per_class={}, confusion={}}", "train.epochs=3")
    context, state, _ = run(config, tmp_path)
    labels = context.data.test.labels.numpy()
    # Without a global model it is the model of a client that has never trained.
    predicted = predict(context, context.method.model_weights(state.server, context.base.tensors, None))
    first, _, last = measured(tmp_path)
    assert first == {}
    assert last["confusion"]["matrix"] == confusion_matrix(labels, predicted, labels=range(10)).tolist()
    recall = recall_score(labels, predicted, labels=range(10), average=None, zero_division=0)
    assert last["per_class"]["accuracy"] == pytest.approx(recall.tolist())
    assert last["per_class"]["mean"] == pytest.approx(recall.mean())
    assert last["per_class"]["worst"] == pytest.approx(recall.min())
    record = list(read_records(tmp_path))[-1]
    assert record.accuracy is not None
    if method == "fedavg":
        assert np.trace(last["confusion"]["matrix"]) / len(labels) == pytest.approx(record.accuracy.global_)


def test_metrics_are_measured_every_n_rounds_and_after_the_last(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("rounds=5", "metrics={local_accuracy={every=2}, per_class={}}")
    run(config, tmp_path)
    assert [sorted(metrics) for metrics in measured(tmp_path)] == [
        [], ["local_accuracy"], [], ["local_accuracy"], ["local_accuracy", "per_class"],
    ]  # fmt: skip


def test_a_share_of_clients_is_the_same_in_every_round_and_for_every_method(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    for method in ("fedavg", "standalone"):
        config = tiny_config("metrics.local_accuracy={every=1, share=0.5}", "rounds=2", f"method.name={method}")
        (tmp_path / method).mkdir()
        context = open_run(config, tmp_path / method)
        evaluate = context.fleet.evaluate

        def spy(request: Any, evaluate: Any = evaluate) -> Any:
            asked.append(list(request.last_round))
            return evaluate(request)

        monkeypatch.setattr(context.fleet, "evaluate", spy)
        run_rounds(context)
    assert len(asked) == 4
    assert all(clients == asked[0] for clients in asked)
    assert len(asked[0]) == 3


class StopAfter(Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        return StopRun("enough") if record.round == self.round else None


def test_metrics_of_the_end_are_measured_where_a_callback_stops_the_run(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config("metrics={local_accuracy={every=1}, per_class={}}")
    _, _, summary = run(config, tmp_path / "stopped", StopAfter(2))
    run(replace_rounds(config, 2), tmp_path / "short")
    stopped, short = (measured(tmp_path / name) for name in ("stopped", "short"))
    assert len(stopped) == 2
    assert set(stopped[-1]) == {"local_accuracy", "per_class"}
    assert stopped == short
    assert summary["metrics"] == stopped[-1]


def test_early_stopping_can_monitor_a_metric(tiny_config: MakeConfig, tmp_path: Path) -> None:
    monitor = "callbacks.early_stopping={monitor='metrics.local_accuracy.p50', patience=1, min_delta=1.0}"
    _, state, summary = run(tiny_config("metrics.local_accuracy.every=1", monitor), tmp_path)
    assert state.round == 2
    assert "metrics.local_accuracy.p50 has not improved" in summary["stopped"]["reason"]


def replace_rounds(config: Config, rounds: int) -> Config:
    return config.model_copy(update={"rounds": rounds})


SCHEDULES = {
    "synchronous": (),
    "over-selection": ("fleet.schedule={kind='over-selection', share=0.3}", "fleet.devices={agx=2,nano=4}"),
    "buffered": ("fleet.schedule={kind='buffered', concurrency=1}", "fleet.devices={agx=2,nano=4}"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_held_out_clients_never_train(schedule: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(
        "rounds=8", "fleet.held_out=0.3", "metrics.held_out_clients={}", *SCHEDULES[schedule], "method.name=fedper"
    )
    _, state, _ = run(config, tmp_path)
    held_out = set(held_out_clients(config))
    trained = {client.client for record in read_records(tmp_path) for client in record.clients}
    assert len(held_out) == 2
    assert trained == set(training_clients(config)) == set(range(6)) - held_out
    assert set(state.last_seen) <= trained
    assert measured(tmp_path)[-1]["held_out_clients"]["clients"] == 2


def test_held_out_clients_are_evaluated_with_the_global_model(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("fleet.held_out=0.5", "metrics.held_out_clients={}", "train.epochs=3")
    context, state, _ = run(config, tmp_path)
    labels, predicted = context.data.test.labels.numpy(), predict(context, state.server.tensors)
    index = [context.partition.test.for_client(client) for client in held_out_clients(config)]
    accuracies = [np.mean(predicted[own] == labels[own]) for own in index if len(own)]
    assert measured(tmp_path)[-1]["held_out_clients"]["mean"] == pytest.approx(np.mean(accuracies))


def test_held_out_clients_depend_on_the_seed_alone(tiny_config: MakeConfig) -> None:
    chosen = {
        seed: tuple(held_out_clients(tiny_config("fleet.clients=40", "fleet.held_out=0.25", f"seed={seed}")))
        for seed in range(5)
    }
    assert all(len(set(clients)) == 10 for clients in chosen.values())
    assert len(set(chosen.values())) == 5
    config = tiny_config("fleet.clients=40", "fleet.held_out=0.25", "seed=3", "method.name=standalone", "rounds=9")
    assert tuple(held_out_clients(config)) == chosen[3]
    assert held_out_clients(tiny_config("fleet.held_out=0.01")) != []
    assert held_out_clients(tiny_config()) == []


def test_without_held_out_clients_the_choice_of_clients_is_what_it_was(tiny_config: MakeConfig) -> None:
    config = tiny_config("fleet.clients=30", "fleet.per_round=4", "seed=7")
    assert [choose_clients(config, round) for round in (1, 2)] == [[6, 20, 22, 26], [1, 6, 9, 12]]


def test_a_run_of_tasks_leaves_held_out_clients_out_of_its_metrics(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(
        "data.tasks.count=2", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=1",
        "rounds=2",
        "fleet.held_out=0.3", "metrics={held_out_clients={every=1}, local_accuracy={every=1}}",
    )  # fmt: skip
    run(config, tmp_path)
    for record in read_records(tmp_path):
        assert record.task is not None
        rows = record.task.matrix
        assert all(set(rows[client]) == {None} for client in held_out_clients(config))
        accuracies = [
            [value for value in rows[client][: record.round] if value is not None]
            for client in training_clients(config)
        ]
        if record.round == 1:
            expected = np.mean([values[0] for values in accuracies if values])
            assert record.metrics["local_accuracy"]["mean"] == pytest.approx(expected)
        assert record.metrics["held_out_clients"]["clients"] == 2


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["metrics.held_out_clients={}"], r"fleet\.held_out = 0\.0: metrics\.held_out_clients needs a share"),
        (
            ["fleet.held_out=0.6"],
            r"fleet\.held_out = 0\.6: leaves 2 of fleet\.clients = 6 to train, and a round needs 3",
        ),
        (["fleet.held_out=1"], r"fleet\.held_out = 1: must be less than 1"),
        (["metrics.local_accuracy.every=0"], r"metrics\.local_accuracy\.every = 0: must be a number of rounds"),
        (["metrics.local_accuracy.every=never"], r"every = 'never': must be a number of rounds, at least 1, or end"),
        (["metrics.local_accuracy.share=0"], r"metrics\.local_accuracy\.share = 0: must be greater than 0"),
        (["metrics.acuracy={}"], r"metrics\.acuracy: no such key; .*local_accuracy"),
    ],
)
def test_wrong_keys_of_metrics_are_explained(overrides: list[str], text: str, tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=text):
        tiny_config(*overrides)


def test_buffered_schedule_needs_enough_training_clients(tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"fleet\.held_out = 0\.3: leaves 4 of fleet\.clients = 6 to train.*needs 5"):
        tiny_config(
            "fleet.held_out=0.3", "fleet.schedule={kind='buffered', concurrency=2}", "fleet.devices={agx=2,nano=4}"
        )


PLUGIN = '''
import numpy as np
from pydantic import Field

from vitfleet.config.base import MetricParams
from vitfleet.config.registry import register_metric
from vitfleet.randomness import Address, Purpose


class SpreadParams(MetricParams):
    """How far clients' models are from the global one."""

    scale: float = Field(1.0, gt=0, description="factor")


@register_metric("model_spread", SpreadParams)
def model_spread(params, context):
    draw = Address(context.seed, Purpose.METRIC_CLIENTS, context.round).generator().random()
    models = [context.client_weights(client) for client in context.training_clients]
    distances = np.array([
        sum(float((tensor - context.global_weights[name]).norm()) for name, tensor in model.items()) for model in models
    ])
    losses = [client.numbers["loss"] for client in context.record.clients]
    return {"distance": params.scale * distances.mean(), "by_client": distances, "draw": draw, "loss": np.mean(losses)}
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "spread.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_a_users_metric_is_measured_recorded_and_resumed(interrupted: int, plugin: Path, tmp_path: Path) -> None:
    overrides = [*TINY, "method.name=fedper", "metrics.model_spread={every=1, scale=2.0}", "metrics.local_accuracy={}"]
    config = load_config("digits", overrides, plugins=[plugin])
    run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", InterruptAfter(interrupted))
    saved = tmp_path / "config.json"
    saved.write_text(config.model_dump_json())
    run(read_config(saved), tmp_path / "stopped")
    whole, stopped = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "stopped"))
    assert whole == stopped
    values = measured(tmp_path / "whole")[-1]["model_spread"]
    assert values["distance"] == pytest.approx(2 * np.mean(values["by_client"]))
    assert values["distance"] > 0
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["metrics"]["model_spread"] == values


def test_a_metric_that_returns_no_mapping_is_named(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context, state, _ = run(tiny_config("rounds=1", "metrics.per_class={}"), tmp_path)
    record = replace(next(read_records(tmp_path)), metrics={})
    assert set(with_metrics(context, state, record, True).metrics) == {"per_class"}
    entry = METRICS["per_class"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METRICS._entries, "per_class", replace(entry, target=lambda params, context: 3))
        with pytest.raises(UserError, match="metric 'per_class': must return a mapping of values by name, not int"):
            with_metrics(context, state, record, True)


def test_config_error_of_held_out_clients_names_its_key(tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config("metrics.held_out_clients={}")
    assert caught.value.key == "fleet.held_out"
