"""Class-incremental learning: one model of the server after each task, and heads of tasks in closed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LocalClients, defended, export_images
from torch import Tensor

import vitfleet
from conftest import InterruptAfter
from digests import digest
from vitfleet.config import load_config
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.message import with_prefix
from vitfleet.methods.closed_form.closed_form import SUMS
from vitfleet.methods.closed_form.solvers import solve, temperature
from vitfleet.methods.closed_form.sums import Sums
from vitfleet.models.variants.wide_head import unsolved_head
from vitfleet.report.columns import COLUMNS
from vitfleet.report.html.page import write_report
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.evaluate.incremental import scores_of
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import ClientRecord, RoundRecord, read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

TASKS = 3
KEYS: dict[str, Any] = {
    "rounds": 2 * TASKS,
    "data.limit": 240,
    "data.tasks.count": TASKS,
    "data.tasks.classes": 3,
    "data.tasks.order": "common",
    "data.tasks.partitioned": True,
    "data.tasks.scenario": "class",
    "data.tasks.rounds_per_task": 2,
    "data.partition.kind": "dirichlet",
    "data.partition.beta": 0.3,
    "fleet.clients": 3,
    "fleet.per_round": 2,
    "fleet.devices": {},
    "train.epochs": 1,
    "machine.device": "cpu",
    "machine.precision": "fp32",
    "machine.workers": 1,
}
START = {"head.start": "closed-form"}
SHARED = {"method.heads": "shared"}
#: Every kind of method whose server has a model, with keys that it needs.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fed-head": {},
    "fed-lora": {},
    "er": SHARED,
    "der++": SHARED,
    "ewc": SHARED,
    "mas": SHARED,
    "gem": SHARED,
    "bcn": SHARED,
    "lvt": SHARED,
    "fedvit": {**SHARED, "train.epochs": 2},
    "fedknow": SHARED,
    "joint": SHARED,
}

IN_CI = {"fedavg", "er", "lvt"}


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


def config_of(method: str, *tables: dict[str, Any]) -> Config:
    overrides = {key: value for table in (KEYS, *tables) for key, value in table.items()}
    return load_config("start-fedavg", {"method.name": method, **overrides})  # the shipped weights


def finished(folder: Path, method: str, *tables: dict[str, Any]) -> tuple[RunContext, RunState, list[RoundRecord]]:
    context = open_run(config_of(method, *tables), folder)
    state = run_rounds(context).state
    return context, state, list(read_records(folder))


# What is measured


def test_the_servers_model_is_measured_image_by_image_among_the_classes_so_far(tmp_path: Path) -> None:
    context = open_run(config_of("fedavg", START), tmp_path)
    state = load_state(context)
    tasks = context.config.data.tasks
    assert tasks is not None
    class_to_task = context.method.context.class_to_task
    order = context.partition.task_order[0].tolist()  # type: ignore[union-attr]
    accuracies, rows, told_rows = [], [], []
    for round in range(1, 2 * TASKS + 1):
        state, record = run_round(context, state, round)
        if round % 2:
            assert record.task is None
            continue
        assert record.task is not None
        weights = context.method.model_weights(state.server, context.base.tensors, None)
        learned = order[: round // 2]
        right, told_right, tested = ({task: 0 for task in learned} for _ in range(3))
        for image, label in zip(context.data.test.images, context.data.test.labels.tolist(), strict=True):
            task = class_to_task[label]
            if task not in learned:
                continue
            logits = context.net(weights, context.trainer.preprocess(image[None]))[0]
            seen = [other for other, of in enumerate(class_to_task) if of in learned]
            own = [other for other, of in enumerate(class_to_task) if of == task]
            right[task] += max(seen, key=lambda other: float(logits[other])) == label
            told_right[task] += max(own, key=lambda other: float(logits[other])) == label
            tested[task] += 1
        rows.append([right[task] / tested[task] for task in learned])
        told_rows.append([told_right[task] / tested[task] for task in learned])
        accuracies.append(sum(right.values()) / sum(tested.values()))
        assert record.task.matrix == [rows[-1]]
        assert record.task.average_accuracy == accuracies[-1]
        assert record.task.incremental_accuracy == pytest.approx(sum(accuracies) / len(accuracies))
        assert record.task.with_task is not None
        assert record.task.with_task.accuracies == told_rows[-1]
    last = record.task
    assert last is not None
    drops = [max(row[task] for row in rows[task:-1]) - rows[-1][task] for task in range(TASKS - 1)]
    assert last.forgetting == pytest.approx(sum(drops) / len(drops))
    gains = [rows[-1][task] - rows[task][task] for task in range(TASKS - 1)]
    assert last.backward_transfer == pytest.approx(sum(gains) / len(gains))


def test_records_summary_table_and_page_have_the_numbers(tmp_path: Path) -> None:
    run = vitfleet.train(config_of("er", SHARED, START), out=tmp_path / "run")
    last = [record.task for record in read_records(run.path) if record.task][-1]
    assert RoundRecord.parse(list(read_records(run.path))[-1].line()).task == last
    continual = json.loads((run.path / "summary.json").read_text())["continual"]
    assert continual["average_accuracy"] == last.average_accuracy
    assert continual["incremental_accuracy"] == last.incremental_accuracy
    assert continual["matrix"][-1] == pytest.approx(last.matrix[0])
    assert continual["matrix"][0][1:] == [None] * (TASKS - 1)
    assert last.with_task is not None
    assert continual["with_task"]["average_accuracy"] == last.with_task.average_accuracy
    assert continual["with_task"]["average_accuracy"] >= continual["average_accuracy"]
    for name in ("average", "incremental", "forgetting", "told"):
        assert COLUMNS[name].mean_std([run.summary]) is not None
    table = vitfleet.result_table([run.path]).to_markdown()
    assert "average incremental accuracy" in table
    page = write_report([run.path]).read_text()
    assert "The server's model" in page
    assert "average incremental accuracy" in page
    assert "accuracy with known task" in page


def test_with_a_known_task_there_is_one_accuracy(tmp_path: Path) -> None:
    _, state, _ = finished(tmp_path, "fedavg", {"data.tasks.scenario": "task"})
    last = state.task_records[-1]
    assert last.with_task is None
    assert scores_of(last).incremental_accuracy is not None


# Methods


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in METHODS]
)
def test_every_method_with_a_model_on_the_server_learns_common_tasks(method: str, tmp_path: Path) -> None:
    """Each with heads of its tasks in closed form, and clients without images of a task."""
    _, state, records = finished(tmp_path, method, METHODS[method], START, {"data.partition.beta": 0.05})
    assert not [client.failure for record in records for client in record.asked_clients if client.failure]
    assert any(client.numbers["samples"] == 0 for record in records for client in record.clients)
    assert [record.round for record in records if record.head] == [1, 3, 5]
    assert [len(record.matrix[0]) for record in state.task_records] == [1, 2, 3]
    assert state.task_records[0].average_accuracy is not None


@pytest.mark.parametrize("method", ["fedper", "er", "fedweit", "dytox", "standalone"])
def test_a_method_without_a_model_on_the_server_is_refused(method: str, tmp_path: Path) -> None:
    extra = {"data.tasks.scenario": "task"} if method == "fedweit" else {}
    with pytest.raises(ConfigError, match=r"data\.tasks\.partitioned.*no model to evaluate"):
        open_run(config_of(method, extra), tmp_path)


@pytest.mark.parametrize("method", ["er", pytest.param("ewc", marks=pytest.mark.long)])
def test_stacked_clients_learn_common_tasks_like_single_ones(method: str, tmp_path: Path) -> None:
    keys = {"train.optimizer": "sgd", "train.lr": 0.02, **({"method.penalty_weight": 10.0} if method == "ewc" else {})}
    servers = []
    for size in (1, 3):
        stack = {"machine.stack_size": size}
        _, state, _ = finished(tmp_path / str(size), method, SHARED, START, keys, stack)
        servers.append(state.server.tensors)
    for name, tensor in servers[0].items():
        torch.testing.assert_close(servers[1][name], tensor, rtol=1e-3, atol=1e-3)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = config_of("er", SHARED, START, {"head.features": "both", "head.blocks": 2})
    whole = vitfleet.train(config, out=tmp_path / "whole")
    for after in (2, 3):  # at the end of a task, and within one
        with pytest.raises(KeyboardInterrupt):
            vitfleet.train(config, out=tmp_path / str(after), callbacks=[InterruptAfter(after)])
        resumed = vitfleet.load_run(tmp_path / str(after)).resume()
        assert digest(resumed.path) == digest(whole.path)


@pytest.mark.parametrize("method", ["er", "analytic"])
def test_flowers_clients_end_with_the_same_bits(method: str, tmp_path: Path) -> None:
    config = defended(config_of(method, *([SHARED, START] if method == "er" else [])))
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(config, tmp_path / "simulation"))
    remote = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    flower = run_rounds(open_run(remote, tmp_path / "flower", make_fleet=fleet_factory(clients.grid())))
    assert flower.state.server.tensors.keys() == simulation.state.server.tensors.keys()
    for name, tensor in simulation.state.server.tensors.items():
        assert torch.equal(flower.state.server.tensors[name], tensor)
    assert flower.summary["continual"] == simulation.summary["continual"]
    mine, theirs = (list(read_records(tmp_path / name)) for name in ("flower", "simulation"))
    for left, right in zip(mine, theirs, strict=True):
        assert left.total_up_bytes == right.total_up_bytes
        assert left.task == right.task


# Heads of tasks


def heads(context: RunContext, state: RunState) -> dict[str, Tensor]:
    weights = context.method.model_weights(state.server, context.base.tensors, None)
    return {name: weights[name] for name in context.method.parts.head}


@pytest.mark.parametrize("wide", [{}, {"head.features": "both", "head.blocks": 2}], ids=["class token", "wide"])
def test_a_task_begins_with_the_rows_that_the_sums_of_all_tasks_so_far_give(
    wide: dict[str, Any], tmp_path: Path
) -> None:
    """The rate is too small to change a weight, so the body stays; by hand from the images themselves."""
    frozen = {"train.lr": 1e-30, "train.optimizer": "sgd", "train.weight_decay": 0.0, "head.dtype": "fp64"}
    context = open_run(config_of("fed-head", START, wide, frozen), tmp_path)
    state, initial = load_state(context), heads(context, load_state(context))
    class_to_task = torch.tensor(context.method.context.class_to_task)
    order = context.partition.task_order[0].tolist()  # type: ignore[union-attr]
    images, labels = context.data.train.images, context.data.train.labels
    weight_name, bias_name = context.net.linear_head
    assert context.head is not None
    body = context.net.initial_weights()
    body = {**body, **unsolved_head(context.net, body)}
    features = context.net.representation(body, context.trainer.preprocess(images), None)
    test = context.net.representation(body, context.trainer.preprocess(context.data.test.images), None)
    expected = torch.full((len(test), 10), torch.nan, dtype=torch.float64)
    for position, task in enumerate(order):
        for round in (2 * position + 1, 2 * position + 2):
            state, record = run_round(context, state, round)
            assert (record.head is not None) == (round % 2 == 1)
        so_far = torch.isin(class_to_task[labels], torch.tensor(order[: position + 1]))
        sums = Sums.of(features[so_far], labels[so_far], 10)
        solution = solve(sums, context.head.solver.params)
        logits = solution.head.divided_by(temperature(solution, sums)).logits(test)
        new = class_to_task == task
        expected[:, new] = logits[:, new]
        head = heads(context, state)
        own = context.net(
            {**context.net.initial_weights(), **head}, context.trainer.preprocess(context.data.test.images)
        )
        known = torch.isin(class_to_task, torch.tensor(order[: position + 1]))
        torch.testing.assert_close(own[:, known].double(), expected[:, known], rtol=2e-2, atol=2e-2)
        for name in (weight_name, bias_name):
            torch.testing.assert_close(head[name][~known], initial[name][~known], rtol=0, atol=1e-20)
    kept = Sums.of_tensors(with_prefix(state.head_sums.tensors, SUMS))
    of_tasks = torch.isin(class_to_task[labels], torch.tensor(order))
    assert float(kept.samples) == int(of_tasks.sum())


def samples_of(client: ClientRecord) -> int:
    samples = client.numbers["samples"]
    assert isinstance(samples, int)
    return samples


def test_joint_training_keeps_no_sums_for_its_clients_have_all_images(tmp_path: Path) -> None:
    _, state, records = finished(tmp_path, "joint", SHARED, START)
    assert not state.head_sums.tensors
    heads_of_tasks = [record.head for record in records if record.head is not None]
    asked = [sum(samples_of(client) for client in head.clients) for head in heads_of_tasks]
    assert asked[0] < asked[1] < asked[2]


def test_the_costs_of_a_tasks_head_are_in_its_first_round(tmp_path: Path) -> None:
    _, state, records = finished(tmp_path, "fedavg", START, {"fleet.devices": {"nano": 3}})
    assert state.total_up_bytes == sum(client.up_bytes for record in records for client in record.asked_clients)
    assert state.total_down_bytes == sum(client.down_bytes for record in records for client in record.asked_clients)
    for record in records[::2]:
        assert record.head is not None
        assert all(client.gflops is not None for client in record.head.clients)
        began = min(client.began for client in record.clients if client.began is not None)
        assert began >= max(client.ended for client in record.head.clients if client.ended is not None)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"head.solve_last": True}, "must be left out with data.tasks"),
        ({"head.solve_every": 2}, "must be left out with data.tasks"),
    ],
)
def test_heads_are_not_solved_again_on_tasks(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of("fedavg", START, tables)
