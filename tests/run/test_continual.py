"""Continual learning: metrics of a matrix by hand, what a run of tasks records, and resuming within a task."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conftest import InterruptAfter, long_but
from vitfleet.config import load_config
from vitfleet.config.schema import Config
from vitfleet.data.tasks import TaskStreams
from vitfleet.errors import UserError
from vitfleet.fleet.base import ClientTask
from vitfleet.methods.continual.stored_samples import read_memory
from vitfleet.run.comparison.manifest import ComparedRun, create_comparison
from vitfleet.run.comparison.results import partitions_differ
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.evaluate.continual import Rows, as_array, as_matrix, compute_metrics, evaluate_clients
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

TINY = (
    "data.limit=800",
    "data.tasks.rounds_per_task=2",
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=4",
    "train.epochs=2",
    "method.head_epochs=1",
    "fleet.clients=4",
    "fleet.per_round=3",
    "machine.device=cpu",
)
#: Every key of FedViT, of heads and of evaluation at another value than its default.
OTHER_KEYS = (
    "method.k=2",
    "method.rerank=2",
    "method.margin=0.5",
    "method.integrate=all",
    "method.task_ranking=angle",
    "method.tune_first_round=false",
    "method.tune_integrated=true",
    "method.heads=shared",
    "eval.body=aggregated",
)
WITHOUT_HEAD_EPOCHS = tuple(key for key in TINY if not key.startswith("method."))


def tiny(*overrides: str) -> Config:
    return load_config("fedvit-digits", [*TINY, *overrides])


# Metrics


def row(*values: float) -> NDArray[np.float64]:
    return np.array([values])


def test_compute_metrics_of_a_matrix_by_hand() -> None:
    nan = np.nan
    # Rows: after task 1, 2, 3. Columns: accuracy on task 1, 2, 3, including the next one, which is not learned yet.
    matrix = np.array([[[0.9, 0.4, nan], [0.7, 0.8, 0.6], [0.8, 0.5, 1.0]]])
    initial = row(0.5, 0.5, 0.5)
    accuracy, forgetting, backward, forward = compute_metrics(matrix, initial)
    assert accuracy == pytest.approx((0.8 + 0.5 + 1.0) / 3)
    # The best accuracies were 0.9 and 0.8; they are 0.8 and 0.5 now.
    assert forgetting == pytest.approx((0.1 + 0.3) / 2)
    assert backward == pytest.approx((0.8 - 0.9 + 0.5 - 0.8) / 2)
    assert forward == pytest.approx((0.4 - 0.5 + 0.6 - 0.5) / 2)
    accuracy, forgetting, *_ = compute_metrics(matrix[:, :2], initial)
    assert accuracy == pytest.approx(0.75)
    assert forgetting == pytest.approx(0.2)
    accuracy, *others = compute_metrics(matrix[:, :1], initial)
    assert accuracy == pytest.approx(0.9)
    assert others == [None, None, None]


def test_forgetting_is_relative_to_the_best_accuracy_since_learning_and_may_be_negative() -> None:
    better = np.array([[[0.5, 1.0], [0.6, 0.7]]])
    assert compute_metrics(better, row(0, 0))[1] == pytest.approx(-0.1)
    # The best is in the middle; an accuracy before the task was learned does not count.
    middle = np.array([[[0.5, 0.99, 0], [0.8, 0.6, 0], [0.7, 0.6, 0.9]]])
    assert compute_metrics(middle, row(0, 0, 0))[1] == pytest.approx((0.1 + 0.0) / 2)


def test_compute_metrics_ignores_what_was_not_measured() -> None:
    nan = np.nan
    matrix = np.array([[[0.9, nan], [0.5, 0.7]], [[nan, nan], [nan, 0.4]]])
    accuracy, forgetting, backward, forward = compute_metrics(matrix, np.full((2, 2), 0.5))
    assert accuracy == pytest.approx((0.6 + 0.4) / 2)
    assert forgetting == pytest.approx(0.4)
    assert backward == pytest.approx(-0.4)
    assert forward is None


def test_as_matrix_pads_rows_with_nan() -> None:
    after_one: Rows = [[0.1, None], [0.2, 0.3]]
    after_two: Rows = [[0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]
    matrix = as_matrix([after_one, after_two], 3)
    assert matrix.shape == (2, 2, 3)
    np.testing.assert_array_equal(matrix[0], [[0.1, np.nan, np.nan], [0.4, 0.5, 0.6]])
    np.testing.assert_array_equal(as_array(after_one, 2)[1], [0.2, 0.3])


# Runs


def streams_of(context: RunContext) -> TaskStreams:
    assert isinstance(context.partition, TaskStreams)
    return context.partition


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    context: RunContext
    state: RunState


@pytest.fixture(scope="module")
def fedvit(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Return a finished FedViT run over five tasks."""
    context = open_run(tiny(), tmp_path_factory.mktemp("fedvit"))
    return Finished(context, run_rounds(context).state)


def test_the_last_round_of_each_task_has_a_task_record(fedvit: Finished) -> None:
    records = list(read_records(fedvit.context.folder))
    assert [record.round for record in records if record.task] == [2, 4, 6, 8, 10]
    task_records = [record.task for record in records if record.task]
    assert tuple(task_records) == fedvit.state.task_records
    assert [task.task for task in task_records] == [1, 2, 3, 4, 5]
    assert [[len(row) for row in task.matrix] for task in task_records] == [[m] * 4 for m in (2, 3, 4, 5, 5)]
    assert [task.initial is None for task in task_records] == [False, True, True, True, True]
    assert task_records[0].forgetting is None
    assert all(task.forgetting is not None and task.forward_transfer is not None for task in task_records[1:])


def test_the_continual_summary_has_the_numbers_of_the_records(fedvit: Finished) -> None:
    summary = json.loads((fedvit.context.folder / "summary.json").read_text())["continual"]
    last = fedvit.state.task_records[-1]
    assert last.average_accuracy is not None
    assert summary["average_accuracy"] == pytest.approx(last.average_accuracy)
    assert summary["forgetting"] == summary["by_task"]["forgetting"][-1]
    column = [row[1] for row in last.matrix if row[1] is not None]
    assert summary["matrix"][4][1] == pytest.approx(sum(column) / len(column))
    assert summary["matrix"][0][2:] == [None, None, None]
    metrics = json.loads((fedvit.context.folder / "summary.json").read_text())["client_metrics"]
    assert metrics["integrated"] > 0
    assert metrics["unsolved"] == 0


def test_the_last_row_is_each_clients_model_on_its_own_test_images(fedvit: Finished) -> None:
    """Count image by image, among the classes of the image's task."""
    assert fedvit.context.evaluator.class_to_task is not None
    for client in range(4):
        state = fedvit.context.fleet.client_state(client)
        assert state is not None
        weights = {name: state.tensors[name] for name in fedvit.context.net.parts.shapes}
        for task_index in (0, 3):
            index = fedvit.context.evaluator.client_indices.for_client(client, task_index)
            correct = 0
            for image in index.tolist():
                pixels, label = (
                    fedvit.context.data.test.images[image : image + 1],
                    int(fedvit.context.data.test.labels[image]),
                )
                logits = fedvit.context.net(weights, fedvit.context.trainer.preprocess(pixels))[0]
                rivals = torch.nonzero(
                    fedvit.context.evaluator.class_to_task == fedvit.context.evaluator.class_to_task[label]
                ).flatten()
                correct += int(rivals[logits[rivals].argmax()]) == label
            assert fedvit.state.task_records[-1].matrix[client][task_index] == pytest.approx(correct / len(index))


def test_evaluate_clients_of_evaluator_and_of_fleet_agree(fedvit: Finished) -> None:
    model = fedvit.context.method.model_weights(
        fedvit.state.server, fedvit.context.base.tensors, fedvit.context.fleet.client_state(1)
    )
    separately = [
        fedvit.context.evaluator.evaluate_clients(model, [ClientTask(1, task_index)])[0] for task_index in range(3)
    ]
    assert (
        fedvit.context.evaluator.evaluate_clients(model, [ClientTask(1, task_index) for task_index in range(3)])
        == separately
    )
    rows, failures = evaluate_clients(fedvit.context, fedvit.state.server, 3, fedvit.state.last_seen)
    assert rows[1] == [evaluation.correct / evaluation.tested for evaluation in separately]
    assert failures == {}


def test_a_clients_memory_has_one_part_per_task_it_trained_on(fedvit: Finished) -> None:
    asked: dict[int, set[int]] = {}
    for record in read_records(fedvit.context.folder):
        for entry in record.clients:
            asked.setdefault(entry.client, set()).add((record.round - 1) // 2)
    for client, num_tasks in asked.items():
        state = fedvit.context.fleet.client_state(client)
        assert state is not None
        known = read_memory(state.tensors)
        assert set(known) == num_tasks
        for task_index, stored in known.items():
            task = streams_of(fedvit.context).task_order[client, task_index]
            assert fedvit.context.evaluator.class_to_task is not None
            assert set(fedvit.context.evaluator.class_to_task[stored.labels.long()].tolist()) == {task}


METHODS = (
    "fedavg",
    "apfl",
    "fedper",
    "gem",
    "a-gem",
    "ewc",
    "mas",
    "fedweit",
    "fedknow",
    "er",
    "der++",
    "dytox",
    "bcn",
    "lvt",
    "joint",
    "standalone",
)


@pytest.mark.parametrize(
    "method", long_but([*METHODS, "transfl", "eftvit"], "fedavg", "apfl", "fedper", "gem", "ewc", "joint", "eftvit")
)
def test_every_method_learns_the_same_task_streams(method: str, fedvit: Finished, tmp_path: Path) -> None:
    extra = {"transfl": ("method.k=1",), "eftvit": ("method.local_layers=1",)}.get(method, ())
    config = load_config("fedvit-digits", [*WITHOUT_HEAD_EPOCHS, f"method.name={method}", "data.tasks.count=2", *extra])
    context = open_run(config, tmp_path)
    summary = run_rounds(context).summary
    assert summary["rounds"] == 4
    assert 0 <= summary["continual"]["average_accuracy"] <= 1
    assert len(summary["continual"]["matrix"]) == 2
    assert summary["accuracy"]["global"] is None
    # A client's images of a task depend on the seed alone, not on the method or the number of tasks.
    for client in range(4):
        mine, theirs = streams_of(context), streams_of(fedvit.context)
        task_index = theirs.task_order[client].tolist().index(int(mine.task_order[client, 0]))
        assert np.array_equal(mine.train.for_client(client), theirs.train.for_client(client, task_index))


def test_class_incremental_runs_predict_among_all_classes(tmp_path: Path) -> None:
    config = tiny("data.tasks.scenario=class", "data.tasks.count=2")
    context = open_run(config, tmp_path)
    assert context.trainer.class_to_task is None
    assert context.evaluator.class_to_task is None
    initial, _ = context.evaluator.evaluate(context.net.initial_weights())
    assert float(initial.mean()) < 0.3, "an untrained model guesses among ten classes, not two"
    assert run_rounds(context).summary["continual"]["average_accuracy"] > 0


def test_the_learning_rate_schedule_restarts_with_each_task(tmp_path: Path) -> None:
    config = tiny("train.schedule=cosine", "data.tasks.count=2", "data.tasks.rounds_per_task=3")
    run_rounds(open_run(config, tmp_path))
    rates = [record.lr for record in read_records(tmp_path)]
    assert rates[:3] == rates[3:]
    assert rates[0] > rates[1] > rates[2]


STACKED = {"paper": (), "other keys": OTHER_KEYS, "angle": ("method.task_ranking=angle",)}


@pytest.mark.usefixtures("checked_angles")
@pytest.mark.parametrize("keys", long_but(STACKED, "other keys"))
def test_stacked_clients_train_like_single_ones(keys: str, tmp_path: Path) -> None:
    """Memories of unequal sizes, parts that some clients lack, ranking and rotation: with a client dimension."""
    more = *STACKED[keys], "method.k=1", "train.optimizer=sgd", "train.lr=0.05"
    alone, together = (open_run(tiny(*more, f"machine.stack_size={size}"), tmp_path / str(size)) for size in (1, 3))
    state, other = load_state(alone), load_state(together)
    for round in range(1, 9):
        state, record = run_round(alone, state, round)
        other, other_record = run_round(together, other, round)
        counts = [[entry.numbers.get("integrated") for entry in entries.clients] for entries in (record, other_record)]
        assert counts[0] == counts[1]
        for entry in (*record.clients, *other_record.clients):
            assert not any(entry.numbers.get(f"{prefix}unsolved") for prefix in ("", "tuning_"))
    assert any(counts[0])
    for name, tensor in state.server.tensors.items():
        torch.testing.assert_close(other.server.tensors[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", long_but(["ewc", "mas"], "ewc"))
def test_stacked_penalties_and_importances_are_those_of_single_clients(method: str, tmp_path: Path) -> None:
    """Clients with and without a penalty in one round, images of unequal number, augmented and masked."""
    keys = (
        f"method.name={method}",
        f"method.penalty_weight={dict(ewc=10, mas=0.2)[method]}",
        "train.optimizer=sgd",
        "train.lr=0.05",
        "train.mask_ratio=0.25",
        "data.augment.flip=true",
    )
    alone, together = (
        open_run(
            load_config("fedvit-digits", [*WITHOUT_HEAD_EPOCHS, *keys, f"machine.stack_size={size}"]), tmp_path / size
        )
        for size in ("1", "3")
    )
    state, other = load_state(alone), load_state(together)
    for round in range(1, 7):
        state, record = run_round(alone, state, round)
        other, other_record = run_round(together, other, round)
        assert not [entry.failure for entry in (*record.clients, *other_record.clients) if entry.failure]
    assert any(entry.numbers["penalized"] for entry in record.clients)
    for name, tensor in state.server.tensors.items():
        torch.testing.assert_close(other.server.tensors[name], tensor, rtol=1e-3, atol=1e-4)
    for client in range(4):
        mine, theirs = alone.fleet.client_state(client), together.fleet.client_state(client)
        assert mine is not None
        assert theirs is not None
        for name, tensor in mine.tensors.items():
            assert float((theirs.tensors[name] - tensor).norm()) <= 1e-3 * float(tensor.norm()) + 1e-4, name


@pytest.mark.parametrize("method", long_but(["ewc", "mas"], "mas"))
def test_a_penalty_that_diverges_is_reported_with_client_round_and_step(method: str, tmp_path: Path) -> None:
    keys = f"method.name={method}", "method.penalty_weight=1e30", "train.optimizer=sgd", "data.tasks.count=2"
    run_rounds(open_run(load_config("fedvit-digits", [*WITHOUT_HEAD_EPOCHS, *keys]), tmp_path))
    records = list(read_records(tmp_path))
    assert not [entry.failure for record in records[:2] for entry in record.clients if entry.failure]
    failures = {
        (record.round, entry.client): entry.failure
        for record in records[2:]
        for entry in record.clients
        if entry.failure
    }
    assert failures
    for (round, client), failure in failures.items():
        message = rf"training diverged: non-finite loss \((nan|inf)\) at client {client}, round {round}, step (\d+)"
        match = re.fullmatch(message, failure)
        assert match, failure
        assert int(match[2]) <= 4
    assert all(record.loss is None or np.isfinite(record.loss) for record in records)


@pytest.mark.parametrize("method", long_but(["fedknow", "er", "der++", "dytox", "bcn", "joint"], "fedknow", "dytox"))
def test_clients_of_other_methods_train_stacked_as_alone(method: str, tmp_path: Path) -> None:
    """Buffers of unequal sizes, clients that missed a task, unions of tasks: with a client dimension."""
    keys = *WITHOUT_HEAD_EPOCHS, f"method.name={method}", "train.optimizer=sgd", "train.lr=0.05"
    configs = {size: load_config("fedvit-digits", [*keys, f"machine.stack_size={size}"]) for size in (1, 3)}
    alone, together = (open_run(config, tmp_path / str(size)) for size, config in configs.items())
    state, other = load_state(alone), load_state(together)
    for round in range(1, 7):
        state, _ = run_round(alone, state, round)
        other, record = run_round(together, other, round)
        assert not [entry.failure for entry in record.clients if entry.failure]
    for name, tensor in state.server.tensors.items():
        torch.testing.assert_close(other.server.tensors[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["fedper", "fedrep", "gem", "a-gem", "ewc", "mas", "fedweit", "fedvit", "fedknow", "er", "der++", "bcn", "joint"],
)
def test_client_costs_of_methods_that_train_all_parameters(name: str, tmp_path: Path) -> None:
    config = load_config("fedvit-digits", [*WITHOUT_HEAD_EPOCHS, f"method.name={name}"])
    costs = open_run(config, tmp_path).client_costs({})
    assert costs["trainable_params"] == costs["params"]
    assert costs["train_gflops"] > costs["forward_gflops"] > 0


def test_rounds_are_tasks_times_rounds_per_task() -> None:
    assert tiny().rounds == 10
    assert tiny("rounds=10").rounds == 10
    with pytest.raises(UserError, match=r"rounds = 7: must be 10, data\.tasks\.count × data\.tasks\.rounds_per_task"):
        tiny("rounds=7")
    with pytest.raises(UserError, match=r"method\.name = 'fedvit': learns task after task; add a table data\.tasks"):
        load_config("digits", ["method.name=fedvit", "train.epochs=6"])


def test_members_of_a_comparison_have_the_same_task_streams(tmp_path: Path) -> None:
    configs = [
        load_config("fedvit-digits", [*WITHOUT_HEAD_EPOCHS, f"method.name={name}"]) for name in ("gem", "fedavg")
    ]
    members = [ComparedRun(config.method.name, config) for config in configs]
    path = create_comparison(members, tmp_path / "both", "vitfleet compare")
    for member in members:
        open_run(member.config, member.folder(path))
    assert not partitions_differ(path)


RESUMED = {
    "fedvit": TINY,
    "fedvit, other keys": (*TINY, *OTHER_KEYS),
    "a-gem": (*WITHOUT_HEAD_EPOCHS, "method.name=a-gem"),
    "gem, shared heads": (*WITHOUT_HEAD_EPOCHS, "method.name=gem", "method.heads=shared"),
    "ewc": (*WITHOUT_HEAD_EPOCHS, "method.name=ewc"),
    "mas, shared heads": (*WITHOUT_HEAD_EPOCHS, "method.name=mas", "method.heads=shared"),
    **{name: (*WITHOUT_HEAD_EPOCHS, f"method.name={name}") for name in ("er", "der++", "dytox", "lvt", "joint")},
    "dytox, shared tokens": (*WITHOUT_HEAD_EPOCHS, "method.name=dytox", "method.tokens=shared"),
    "fedknow": (*WITHOUT_HEAD_EPOCHS, "method.name=fedknow", "data.tasks.count=4", "train.epochs=1"),
    "bcn": (*WITHOUT_HEAD_EPOCHS, "method.name=bcn", "data.tasks.count=4", "train.epochs=1"),
    "apfl": (*WITHOUT_HEAD_EPOCHS, "method.name=apfl"),
    "fedweit": (*WITHOUT_HEAD_EPOCHS, "method.name=fedweit", "data.tasks.count=4", "train.epochs=1"),
}


@pytest.mark.parametrize("case", long_but(RESUMED, "fedvit", "der++", "fedweit"))
def test_a_run_interrupted_within_a_task_resumes_bit_for_bit(case: str, fedvit: Finished, tmp_path: Path) -> None:
    config = load_config("fedvit-digits", RESUMED[case])
    if case == "fedvit":
        undisturbed = fedvit.context.folder
    else:
        undisturbed = tmp_path / "undisturbed"
        run_rounds(open_run(config, undisturbed))
    interrupted = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, interrupted), callbacks=[InterruptAfter(6)])
    resumed = open_run(config, interrupted)
    state = load_state(resumed)
    assert (state.round, len(state.task_records)) == (5, 2)
    run_rounds(resumed, state)
    names = [
        "records.jsonl",
        *(str(path.relative_to(undisturbed)) for path in undisturbed.glob("checkpoint/*.safetensors")),
    ]
    assert len(names) > 4, "memories and heads are among them"
    for name in names:
        assert (interrupted / name).read_bytes() == (undisturbed / name).read_bytes(), name
    resumed_summary, summary = (
        json.loads((folder / "summary.json").read_text())["continual"] for folder in (interrupted, undisturbed)
    )
    assert resumed_summary == summary
