"""FedWEIT: the composed weight and the whole loss by hand, sparse weights, bytes, the model of each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, close
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import NO_IMAGES, MakeConfig, MakeContext, MakeShard, MakeTrainer
from vitfleet.config import load_config
from vitfleet.data.images import Shard
from vitfleet.errors import UserError
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.message import Message, State, Tensors, with_prefix
from vitfleet.methods import ClientJob, ClientUpdate
from vitfleet.methods.base import RejectedUpdateError
from vitfleet.methods.decomposed_tasks import ClientTasks, TaskWeights, read_knowledge
from vitfleet.methods.decomposition import Decomposition
from vitfleet.methods.fedweit import FedWeit, FedWeitParams
from vitfleet.methods.sparse_weights import SparseVector, check_sparse, densify, sparsify
from vitfleet.models.net import Net
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.cohort_driver import run_participant
from vitfleet.training.cohort_inputs import RngContext
from vitfleet.training.trainer import Trainer
from vitfleet.wire import tensors_size

TINY = (
    "method.name=fedweit",
    "data.tasks.rounds_per_task=2",
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=4",
    "train.epochs=1",
    "fleet.clients=4",
    "fleet.per_round=3",
    "machine.device=cpu",
)
CLASS_TASKS = torch.tensor([0, 0, 1, 1, 1])
SETTINGS = FedWeitParams(sparsity_weight=0.01, drift_weight=0.5)


@pytest.fixture
def method(make_context: MakeContext) -> FedWeit:
    """Return FedWEIT in a run of five tasks of two rounds."""
    return FedWeit(SETTINGS, replace(make_context(epochs=2, **PLAIN_SGD), num_tasks=5))


def update_of(
    method: FedWeit,
    trainer: Trainer,
    shard: Shard,
    message: Message,
    base: Tensors,
    state: State | None = None,
    round: int = 1,
) -> ClientUpdate:
    """Run a client's round."""
    job = ClientJob(round, 0, message, base, state, shard, method.task_of(round))
    return run_participant(method.client_update(job), trainer, shard, RngContext(0, round, 0))


def tasks_of(method: FedWeit, update: ClientUpdate) -> ClientTasks:
    assert update.client_state is not None
    return ClientTasks.of_state(update.client_state, method.anatomy.whole)


def random_sparse(method: FedWeit, seed: int, kept: int = 300) -> SparseVector:
    random = torch.Generator().manual_seed(seed)
    length = sum(shape.numel() for shape in method.shapes.values())
    indices = torch.randperm(length, generator=random)[:kept].sort().values
    return SparseVector(torch.randn(kept, generator=random), indices.int())


def sigmoid(value: Tensor) -> Tensor:
    return 1 / (1 + (-value).exp())


def test_defaults_are_those_of_the_paper() -> None:
    params = FedWeitParams()
    assert (params.sparsity_weight, params.drift_weight) == (1e-3, 100)


def test_the_matrices_of_the_blocks_are_decomposed(method: FedWeit, tiny_net: Net) -> None:
    layers = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"
    assert list(method.decomposed) == [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers]


def test_the_composed_weight_is_the_formula() -> None:
    random = torch.Generator().manual_seed(0)
    base, adaptive = torch.randn(3, 4, generator=random), torch.randn(3, 4, generator=random)
    mask, attention = torch.randn(3, generator=random), torch.randn(2, generator=random)
    others = torch.randn(2, 3, 4, generator=random)
    trained = {"w": base, "mask.w": mask, "adaptive.w": adaptive, "attention.w": attention}
    (composed,) = Decomposition(("w",), 2)(trained, {"knowledge.w": others}).values()
    for unit in range(3):
        for column in range(4):
            expected = float(base[unit, column]) * float(sigmoid(mask[unit])) + float(adaptive[unit, column])
            expected += sum(float(attention[c]) * float(others[c, unit, column]) for c in range(2))
            assert float(composed[unit, column]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    (without,) = Decomposition(("w",), 0)(trained, {}).values()
    torch.testing.assert_close(without, sigmoid(mask)[:, None] * base + adaptive)
    weights = TaskWeights({"w": mask}, {"w": adaptive}, {"w": torch.einsum("c,cij->ij", attention, others)})
    torch.testing.assert_close(weights.compose({"w": base})["w"], composed)


def test_a_round_with_earlier_tasks_and_other_clients_is_that_of_autograd_by_hand(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Every term of the loss, by every tensor that trains, over all steps of two rounds of the third task."""
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_tasks=CLASS_TASKS)
    initial, shard = tiny_net.initial_weights(), make_shard(0, 10)
    base, body = tiny_net.anatomy.head.take(initial), tiny_net.anatomy.body.take(initial)
    vectors = [random_sparse(method, seed) for seed in (1, 2, 3)]
    knowledge: dict[str, Tensor] = {}
    for row, vector in enumerate(vectors):
        knowledge |= vector.tensors(f"knowledge.{row:04d}.")
    state, history = None, []
    for round in (1, 3):  # one round in each of the first two tasks
        update = update_of(method, trainer, shard, Message(body), base, state, round)
        state = update.client_state
        history.append(tasks_of(method, update))
        body = {name: tensor + 0.01 for name, tensor in tiny_net.anatomy.body.take(update.message.tensors).items()}
    first = update_of(method, trainer, shard, Message({**body, **knowledge}), base, state, 5)
    second = update_of(method, trainer, shard, Message(body), base, first.client_state, 6)

    names = list(method.decomposed)
    targets, masks = [], []
    for tasks in history:
        assert tasks.latest is not None
        latest = tasks.latest
        masks.append(latest.mask)
        targets.append({n: sigmoid(latest.mask[n])[:, None] * tasks.model[n] + latest.adaptive[n] for n in names})
    assert history[1].latest is not None
    past = [history[1].past[0].weights.adaptive, history[1].latest.adaptive]
    model = {**history[1].model, **body}
    others = densify(vectors, method.shapes)
    now: dict[str, Tensor] = {
        **model,
        **{f"m {n}": torch.zeros(model[n].shape[0]) for n in names},
        **{f"A {n}": model[n] / 3 for n in names},
        **{f"α {n}": torch.zeros(3) for n in names},
        **{f"A{i} {n}": past[i][n] for i in range(2) for n in names},
    }
    for round, update in ((5, first), (6, second)):
        hand = Hand(tiny_net, CLASS_TASKS, shard, round)
        now = {**now, **body}
        for batch in hand.batches(2):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in now.items()}
            theta = {name: leaves[name] for name in model}
            loss = torch.zeros(())
            for n in names:
                added = torch.stack([leaves[f"α {n}"][c] * others[n][c] for c in range(3)]).sum(dim=0)
                theta[n] = leaves[n] * sigmoid(leaves[f"m {n}"])[:, None] + leaves[f"A {n}"] + added
                loss = loss + 0.01 * (leaves[f"A {n}"].abs().sum() + sigmoid(leaves[f"m {n}"]).abs().sum())
                for i in range(2):
                    loss = loss + 0.01 * leaves[f"A{i} {n}"].abs().sum()
                    restored = leaves[n] * sigmoid(masks[i][n])[:, None] + leaves[f"A{i} {n}"]
                    loss = loss + 0.5 / 2 * (restored - targets[i][n]).square().sum()
            loss = loss + hand.losses(theta, batch).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            now = {name: now[name] - 0.1 * gradient for name, gradient in zip(now, gradients, strict=True)}
        found = tasks_of(method, update)
        assert found.latest is not None
        close(found.model, {name: now[name] for name in model})
        close(found.latest.mask, {n: now[f"m {n}"] for n in names})
        close(found.latest.adaptive, {n: now[f"A {n}"] for n in names})
        close({n: tensor[:3] for n, tensor in found.attention.items()}, {n: now[f"α {n}"] for n in names})
        assert all(not tensor[3:].any() for tensor in found.attention.values()), "padding is never trained"
        for i in range(2):
            close(found.past[i].weights.adaptive, {n: now[f"A{i} {n}"] for n in names})
            close(found.past[i].target, targets[i])
        transfer = {n: torch.einsum("c,cij->ij", now[f"α {n}"], others[n][:3]) for n in names}
        close(found.latest.transfer, transfer)
        assert any(tensor.abs().max() > 1e-4 for tensor in transfer.values())
        expected = {n: sigmoid(now[f"m {n}"])[:, None] * now[n] + now[f"A {n}"] + transfer[n] for n in names}
        close(update.model_weights, {**{name: now[name] for name in model}, **expected})
        assert update.message.numbers["past_tasks"] == 2
        assert update.message.numbers["adaptive_received"] == 3


@given(st.integers(0, 10**6), st.integers(0, 9))
def test_sparse_weights_are_the_values_above_the_threshold(seed: int, count: int) -> None:
    random = torch.Generator().manual_seed(seed)
    shapes = {"a": torch.Size([3, 4]), "b": torch.Size([2, 2, 2])}
    models = [{name: torch.randn(shape, generator=random) for name, shape in shapes.items()} for _ in range(count)]
    dense = densify([sparsify(model, 0.5) for model in models], shapes)
    assert (not dense) == (count == 0)
    for name, rows in dense.items():
        assert rows.shape[0] % 4 == 0
        assert rows.shape[0] - count < 4
        assert not rows[count:].any()
        for row, model in zip(rows, models, strict=False):
            assert torch.equal(row, torch.where(model[name].abs() > 0.5, model[name], 0))


def test_a_value_at_the_threshold_is_not_sent() -> None:
    vector = sparsify({"w": torch.tensor([[0.5, -0.5], [0.75, -0.625]])}, 0.5)
    assert vector.values.tolist() == [0.75, -0.625]
    assert vector.indices.tolist() == [2, 3]
    assert tensors_size(Message(vector.tensors())) == 2 * 8


def test_a_client_sends_its_base_weights_and_the_sparse_adaptive_weights(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    initial = tiny_net.initial_weights()
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_tasks=CLASS_TASKS)
    body = tiny_net.anatomy.body.take(initial)
    update = update_of(method, trainer, make_shard(0, 10), Message(body), tiny_net.anatomy.head.take(initial))
    tasks = tasks_of(method, update)
    assert tasks.latest is not None
    adaptive = torch.cat([tasks.latest.adaptive[name].flatten() for name in method.decomposed])
    sent = with_prefix(update.message.tensors, "adaptive.")
    assert torch.equal(sent["indices"].long(), (adaptive.abs() > 0.01).nonzero().flatten())
    assert torch.equal(sent["values"], adaptive[adaptive.abs() > 0.01])
    kept = int((adaptive.abs() > 0.01).sum())
    assert 0 < kept < len(adaptive)
    assert update.message.numbers["adaptive_kept"] == kept
    assert tensors_size(update.message) == 4 * sum(tensor.numel() for tensor in body.values()) + 8 * kept
    assert update.message.tensors.keys() - {"adaptive.values", "adaptive.indices"} == body.keys()
    assert all(torch.equal(update.message.tensors[name], tasks.model[name]) for name in body)


def test_a_client_without_images_keeps_its_state_and_sends_no_weights(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    initial, trainer = tiny_net.initial_weights(), make_trainer(epochs=2, **PLAIN_SGD)
    message, base = Message(tiny_net.anatomy.body.take(initial)), tiny_net.anatomy.head.take(initial)
    trained = update_of(method, trainer, make_shard(0, 10), message, base)
    for state, latest in ((None, -1), (trained.client_state, 0)):
        update = update_of(method, trainer, NO_IMAGES, message, base, state, round=3)
        assert not update.message.tensors
        assert update.message.numbers["latest_task"] == latest
        assert update.client_state is not None
        before = initial if state is None else state.tensors
        assert update.client_state.tensors.keys() == before.keys()
        assert all(torch.equal(update.client_state.tensors[name], before[name]) for name in before)
    close(update.model_weights, trained.model_weights)


def updates(method: FedWeit, body: Tensors, kept: Sequence[int], task_index: int) -> list[Message]:
    """Return an update of every client with adaptive weights of its own."""
    numbers = {"samples": 1, "loss": 1.0, "latest_task": task_index, "past_tasks": 0, "adaptive_received": 0}
    return [
        Message(
            {**body, **random_sparse(method, 100 * task_index + client, count).tensors("adaptive.")},
            {**numbers, "adaptive_kept": count},
        )
        for client, count in enumerate(kept)
    ]


@pytest.mark.parametrize(("clients", "tasks"), [(2, 2), (3, 5), (7, 2), (7, 5)])
def test_downloads_grow_with_clients_times_tasks(
    clients: int, tasks: int, method: FedWeit, tiny_net: Net, make_context: MakeContext
) -> None:
    """Every client receives the adaptive weights of every other client once per task, eight bytes per number."""
    body = tiny_net.anatomy.body.take(tiny_net.initial_weights())
    kept, size = 50, tensors_size(Message(body))
    state, last_round, downloaded = State(body), dict.fromkeys(range(clients)), 0
    for round in range(1, 2 * tasks + 1):
        messages = [method.client_message(state, round, client, last_round[client]) for client in range(clients)]
        downloaded += sum(tensors_size(message) - size for message in messages)
        aggregator = method.aggregator(state, round)
        for client, message in enumerate(updates(method, body, [kept] * clients, method.task_of(round))):
            aggregator.add(client, message)
            last_round[client] = round
        state = aggregator.finish()
        assert len(state.parts) <= 2 * clients
    assert downloaded == (tasks - 1) * clients * (clients - 1) * 8 * kept


def test_the_server_keeps_the_adaptive_weights_of_every_client(method: FedWeit, tiny_net: Net) -> None:
    body = tiny_net.anatomy.body.take(tiny_net.initial_weights())
    state = State(body)
    first, second = (updates(method, body, (10, 20, 30, 40), task_index) for task_index in (0, 1))
    for round, senders, sent in ((1, (0, 1), first), (2, (3,), first), (3, (0,), second)):
        aggregator = method.aggregator(state, round)
        for client in senders:
            aggregator.add(client, sent[client])
        state = aggregator.finish()
    stored = [first[0], first[1], first[3], second[0]]
    assert len(state.parts) == 4
    for part, message in zip(sorted(state.parts.items()), [first[0], second[0], first[1], first[3]], strict=True):
        assert torch.equal(part[1].tensors["values"], message.tensors["adaptive.values"])
    assert {len(part.tensors["values"]) for part in state.parts.values()} == {10, 20, 40}

    def received(round: int, client: int, last_round: int | None) -> list[list[float]]:
        message = method.client_message(state, round, client, last_round)
        return [vector.values.tolist() for vector in read_knowledge(message.tensors)]

    values = [message.tensors["adaptive.values"].tolist() for message in stored]
    assert received(2, 2, None) == [], "a task is not over while it lasts"
    assert received(4, 2, None) == values[:3], "all clients' weights, from the task before"
    assert received(4, 1, 2) == [values[0], values[2]], "not its own"
    assert received(4, 0, 3) == [], "once per task"
    assert received(5, 2, 3) == [values[3], values[1], values[2]], "of a client's latest task before this one"


def test_unusable_updates_are_rejected_and_change_nothing(method: FedWeit, tiny_net: Net) -> None:
    body = tiny_net.anatomy.body.take(tiny_net.initial_weights())
    (good,) = updates(method, body, (5,), 0)
    indices, values = good.tensors["adaptive.indices"], good.tensors["adaptive.values"]
    length = sum(shape.numel() for shape in method.shapes.values())
    changes: dict[str, tuple[Tensors, dict[str, int]]] = {
        "no adaptive weights": ({"adaptive.other": values}, {}),
        "not a vector of float32": ({"adaptive.values": values.double()}, {}),
        "5 values and": ({"adaptive.values": values[:4]}, {}),
        "not finite": ({"adaptive.values": values * torch.inf}, {}),
        "have the size 1": ({"adaptive.values": torch.full_like(values, 1e10)}, {}),
        "do not rise": ({"adaptive.indices": indices.flip(0)}, {}),
        "within 0 …": ({"adaptive.indices": indices + length}, {}),
        "are of task -1; expected: 0": ({}, {"latest_task": -1}),
        "'latest_task' is 3": ({}, {"latest_task": 3}),
        "'adaptive_received' is 9": ({}, {"adaptive_received": 9}),
        "'adaptive_kept' is 100000000": ({}, {"adaptive_kept": 10**8}),
        "not part of the model": ({"unknown": values}, {}),
    }
    for reason, (tensors, numbers) in changes.items():
        aggregator = method.aggregator(State(body), 1)
        expected = reason.replace("5 values", r"\(4,\) values")
        with pytest.raises(RejectedUpdateError, match=expected):
            aggregator.add(0, Message({**good.tensors, **tensors}, {**good.numbers, **numbers}))
        after = aggregator.finish()
        assert not after.parts
        assert all(torch.equal(after.tensors[name], body[name]) for name in body)
    with pytest.raises(RejectedUpdateError, match="not values and indices alone"):
        check_sparse({}, 10)


def test_an_outlier_does_not_replace_what_is_stored(make_context: MakeContext, tiny_net: Net) -> None:
    context = replace(make_context(), num_tasks=5)
    context = replace(context, aggregation=context.aggregation.model_copy(update={"norm_factor": 2.0}))
    method, body = FedWeit(SETTINGS, context), tiny_net.anatomy.body.take(tiny_net.initial_weights())
    aggregator = method.aggregator(State(body), 1)
    for client, message in enumerate(updates(method, body, (5, 6, 7), 0)):
        shift = 100.0 if client == 1 else 0.01
        aggregator.add(client, replace(message, tensors={**message.tensors, **{n: t + shift for n, t in body.items()}}))
    state = aggregator.finish()
    assert set(aggregator.rejected) == {1}
    assert sorted(len(part.tensors["values"]) for part in state.parts.values()) == [5, 7]


def test_every_task_is_evaluated_with_its_own_mask_and_adaptive_weights(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_tasks=CLASS_TASKS)
    initial = tiny_net.initial_weights()
    body, base = tiny_net.anatomy.body.take(initial), tiny_net.anatomy.head.take(initial)
    sparse = random_sparse(method, 1).tensors("knowledge.0000.")
    state, learned = None, []
    for round in (1, 3, 7):  # the client takes no part in the third task
        message = Message({**body, **(sparse if round > 1 else {})})
        update = update_of(method, trainer, make_shard(round, 10 + round), message, base, state, round)
        state = update.client_state
        learned.append(tasks_of(method, update))
        body = {name: tensor + 0.01 for name, tensor in tiny_net.anatomy.body.take(update.message.tensors).items()}
    final, evaluated = learned[-1], []

    def evaluate(weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
        evaluated.append((dict(weights), list(tasks)))
        return [EvalResult(task.task_index, 10) for task in tasks]

    (reply,) = ClientRuntime(method, trainer, 0, evaluate).evaluate(State(body), base, state, [5], 5)
    assert [result.correct for result in reply.evaluations] == [0, 1, 2, 3, 4]
    assert [tasks for _, tasks in evaluated] == [[ClientTask(5, task_index)] for task_index in range(5)]
    assert list(final.past) == [0, 1]
    for task_index, snapshot in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 2)):  # a task that was never trained: the latest
        then, weights = learned[snapshot], evaluated[task_index][0]
        assert then.latest is not None
        assert final.latest is not None
        now = final.past[task_index].weights if task_index in final.past else final.latest
        for name in method.decomposed:
            assert torch.equal(now.mask[name], then.latest.mask[name]), "masks of earlier tasks are constant"
            expected = sigmoid(now.mask[name])[:, None] * final.model[name] + now.adaptive[name]
            expected = expected + (now.transfer[name] if snapshot else 0)
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
        for name in set(initial) - set(method.decomposed):
            assert torch.equal(weights[name], then.model[name]), "all other weights are those of its last training"
    assert not torch.equal(learned[0].model["head.weight"], final.model["head.weight"])
    current = method.model_weights(State(body), base, state)
    assert all(torch.equal(current[name], evaluated[3][0][name]) for name in current)
    stranger = method.task_weights(State(body), base, None, 0)
    assert all(torch.equal(stranger[name], {**base, **body}[name]) for name in initial)


def test_shapes_of_the_state_are_known_from_the_numbers_that_are_reported(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer, initial = make_trainer(epochs=1, **PLAIN_SGD), tiny_net.initial_weights()
    body, base = tiny_net.anatomy.body.take(initial), tiny_net.anatomy.head.take(initial)
    state = None
    for round in (1, 3, 5):
        received = {
            name: t
            for row in range(5)
            for name, t in random_sparse(method, row).tensors(f"knowledge.{row:04d}.").items()
        }
        message = Message({**body, **(received if round > 1 else {})})
        update = update_of(method, trainer, make_shard(0, 10), message, base, state, round)
        state = update.client_state
        assert state is not None
        shapes = {n: t.shape for n, t in method.client_state_shapes(update.message.numbers, 1, 8).items()}
        kept = {n: t.shape for n, t in state.tensors.items() if n not in initial}
        assert shapes.keys() == kept.keys()
        own = update.message.numbers["adaptive_kept"]
        for name, shape in shapes.items():
            # Of other clients' weights only the number is known, not how sparse they are: as sparse as its own.
            assert shape == ((own,) if name.startswith("knowledge.") else kept[name]), name
    assert not method.client_state_shapes({"latest_task": -1, "adaptive_kept": 0}, 1, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.tasks.incremental=class", r"data\.tasks\.incremental = 'class': must be task"),
        (
            "fleet.schedule.kind=buffered fleet.schedule.concurrency=3",
            r"fleet\.schedule\.kind = 'buffered': must be another one",
        ),
    ],
)
def test_configurations_that_it_cannot_run_are_rejected(override: str, message: str, tiny_config: MakeConfig) -> None:
    tasks = "data.tasks.count=3", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=1"
    with pytest.raises(UserError, match=message):
        tiny_config("method.name=fedweit", *tasks, "fleet.devices.nano=6", *override.split())
    with pytest.raises(UserError, match="learns task after task"):
        tiny_config("method.name=fedweit")


def test_clients_train_stacked_as_alone_and_records_have_the_bytes_of_their_messages(tmp_path: Path) -> None:
    """Clients that missed a task, with other numbers of earlier tasks and of others' adaptive weights."""
    keys = *TINY, "train.optimizer=sgd", "train.lr=0.05", "method.drift_weight=1"
    configs = {size: load_config("fedvit-digits", [*keys, f"machine.cohort={size}"]) for size in (1, 3)}
    alone, together = (open_run(config, tmp_path / str(size)) for size, config in configs.items())
    state, other = load_state(alone), load_state(together)
    body = 4 * alone.net.anatomy.count_parameters(alone.net.anatomy.body)
    sent: dict[int, list[tuple[int, int]]] = {}  # of each client, the tasks of its updates and the adaptive weights
    for round in range(1, 6):
        state, record = run_round(alone, state, round)
        other, other_record = run_round(together, other, round)
        assert not [entry.failure for entry in (*record.clients, *other_record.clients) if entry.failure]
        task, before = (round - 1) // 2, {client: list(updates) for client, updates in sent.items()}
        for entry in record.clients:
            kept = int(str(entry.numbers["adaptive_kept"]))
            own = sent.setdefault(entry.client, [])
            known = bool(own) and own[-1][0] == task
            others = [
                [count for earlier, count in updates if earlier < task][-1:]
                for client, updates in before.items()
                if client != entry.client and not known
            ]
            expected = body + 8 * sum(sum(counts) for counts in others)
            base = 0 if own else alone.net.anatomy.count_parameters(alone.net.anatomy.head) * 4
            header = 150 * (len(alone.net.anatomy.whole) + 2 * len(others) + 2)
            assert expected + base <= entry.down_bytes <= expected + base + header
            assert body + 8 * kept <= entry.up_bytes <= body + 8 * kept + header
            own.append((task, kept))
    assert max(entry.numbers["past_tasks"] for entry in record.clients) == 2
    assert any(entry.numbers["adaptive_received"] == 3 for entry in record.clients)
    for name, tensor in state.server.tensors.items():
        torch.testing.assert_close(other.server.tensors[name], tensor, rtol=1e-3, atol=1e-4)
    for client in range(4):
        mine, theirs = alone.fleet.client_state(client), together.fleet.client_state(client)
        assert mine is not None
        assert theirs is not None
        for name, tensor in mine.tensors.items():
            if not name.startswith("knowledge."):  # a value at the threshold is sent by one of them alone
                assert float((theirs.tensors[name] - tensor).norm()) <= 1e-3 * float(tensor.norm()) + 1e-4, name
