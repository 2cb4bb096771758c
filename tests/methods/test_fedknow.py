"""FedKNOW's client round, held against one written by hand with quadprog and SciPy, and what its clients keep."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, Samples, close, farthest, integrated
from torch import Tensor
from torch.func import functional_call

from conftest import MakeContext, MakeShard, MakeTrainer
from vitfleet.costs.cost_model import CostModel
from vitfleet.message import Message, State, Tensors, with_prefix
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.gradients.fedknow import (
    TEACHERS,
    FedKnow,
    FedKnowParams,
    extract_knowledge,
    read_knowledge,
    teachers,
)
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
EPOCHS, SHARE, TEMPERATURE = 2, 0.3, 2.0


# Knowledge


def random_model(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(7, 9, generator=random), "b": torch.randn(37, generator=random)}


def test_knowledge_is_exactly_the_largest_tenth_of_all_weights() -> None:
    weights = random_model()
    knowledge = extract_knowledge(weights, Selection(("a", "b")), 0.1, torch.tensor(3, dtype=torch.int16))
    vector = [*weights["a"].flatten().tolist(), *weights["b"].tolist()]
    largest = sorted(range(100), key=lambda index: -abs(vector[index]))[:10]
    assert knowledge.indices.tolist() == sorted(largest)
    assert knowledge.values.tolist() == [vector[index] for index in sorted(largest)]
    assert (knowledge.values.dtype, knowledge.indices.dtype, int(knowledge.label)) == (torch.float32, torch.int32, 3)
    assert sum(tensor.nbytes for tensor in knowledge.tensors().values()) == 10 * (4 + 4) + 2


@pytest.mark.parametrize(("share", "kept"), [(0.001, 1), (0.1, 10), (0.255, 26), (1.0, 100)])
def test_number_of_kept_weights(share: float, kept: int) -> None:
    knowledge = extract_knowledge(random_model(), Selection(("a", "b")), share, torch.tensor(0))
    assert len(knowledge.values) == kept


def test_of_equal_weights_the_first_are_kept() -> None:
    weights = {"a": torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 2.0])}
    knowledge = extract_knowledge(weights, Selection(("a",)), 0.67, torch.tensor(0))
    assert knowledge.indices.tolist() == [0, 1, 2, 5]


def test_a_missed_task_is_an_absent_teacher() -> None:
    known = {
        index: extract_knowledge(random_model(index), Selection(("a", "b")), 0.1, torch.tensor(index))
        for index in (0, 2, 3)
    }
    assert teachers(known, 0) == {}
    assert teachers({}, 3) == {}
    found = with_prefix(teachers(known, 3), TEACHERS)  # task 3 is the current one
    assert found["present"].tolist() == [True, False, True]
    assert torch.equal(found["values"][2], known[2].values)
    assert found["label"].tolist() == [0, 0, 2]


# A client's rounds


def make_method(make_context: MakeContext, **params: object) -> FedKnow:
    context = make_context(num_tasks=3, epochs=EPOCHS, **PLAIN_SGD)
    return FedKnow(FedKnowParams.model_validate({"k": 1, "kept_share": SHARE, **params}), context)


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return replace(make_trainer(epochs=EPOCHS, **PLAIN_SGD), class_to_task=TASKS)


def play(method: FedKnow, trainer: Trainer, net: Net, make_shard: MakeShard) -> list[tuple[Tensors, ClientUpdate]]:
    """Play three rounds of one client, a task each; return what it started from and what it made of it."""
    random = torch.Generator().manual_seed(5)
    base = method.initial_broadcast(net.initial_weights()).tensors
    initial = method.initial_state(net.initial_weights()).tensors
    own: State | None = None
    played: list[tuple[Tensors, ClientUpdate]] = []
    for task_index, scale in enumerate((0.0, 0.1, 0.1)):  # weights that other clients had their part in
        sent = {name: one + scale * torch.randn(one.shape, generator=random) for name, one in initial.items()}
        shard = make_shard(12 * task_index, 12 * task_index + 12)
        job = ClientRoundInput(task_index + 1, 0, Message(sent), base, own, shard, task_index)
        update = run_update(method.client_update(job), trainer, shard, RngContext(0, task_index + 1, 0))
        own = update.client_state
        kept = base if not played else played[-1][1].model_weights
        played.append(({**kept, **sent}, update))
    return played


def teacher_gradient(
    net: Net, weights: Tensors, teacher: Tensors, batch: Samples, names: list[str], label: int
) -> Tensor:
    """Return the gradient of the distillation loss among the classes of the teacher's task, as one vector."""
    classes = torch.nonzero(TASKS[label] == TASKS)[:, 0]
    leaves = {name: weights[name].clone().requires_grad_() for name in names}
    inputs = ((batch[0].float() / 255 - 0.5) / 0.5,)
    module = copy.deepcopy(net.module.vit)
    own = functional_call(module, {**weights, **leaves}, inputs)[:, classes] / TEMPERATURE
    target = functional_call(module, dict(teacher), inputs)[:, classes] / TEMPERATURE
    loss = -(target.softmax(1) * own.log_softmax(1)).sum(1).mean()
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(leaves.values()))])


def pruned(weights: Tensors, share: float) -> dict[str, Tensor]:
    """Set all but the largest weights of a model to zero."""
    magnitudes = torch.cat([tensor.abs().flatten() for tensor in weights.values()])
    least = magnitudes.sort(descending=True).values[round(share * len(magnitudes)) - 1]
    return {name: torch.where(tensor.abs() >= least, tensor, 0) for name, tensor in weights.items()}


@pytest.mark.usefixtures("checked_angles")
@pytest.mark.parametrize("heads", ["local", "shared"])
def test_three_tasks_as_by_hand(
    heads: str, trainer: Trainer, make_context: MakeContext, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = make_method(make_context, heads=heads)
    played = play(method, trainer, tiny_net, make_shard)
    shared, names = list(method.shared), list(method.parts.whole)
    for task_index, (received, update) in enumerate(played):
        shard = make_shard(12 * task_index, 12 * task_index + 12)
        hand, weights = Hand(tiny_net, TASKS, shard, round=task_index + 1), dict(received)
        if task_index:
            previous = played[task_index - 1][1].model_weights
            before = {**received, **{name: previous[name] for name in shared}}

            def rotated(
                after: Tensor, weights: Tensors, batch: Samples, before: Tensors = before, hand: Hand = hand
            ) -> Tensor:
                there = hand.gradient(before, batch, shared)
                return there - torch.clamp(there @ after, max=0) / (after @ after) * after

            weights = hand.train(weights, shared, 1, rotated)
        old = [
            (pruned(played[index][1].model_weights, SHARE), int(make_shard(12 * index, 12 * index + 12).labels[0]))
            for index in range(task_index)
        ]

        def restored(
            own: Tensor, weights: Tensors, batch: Samples, old: list[tuple[dict[str, Tensor], int]] = old
        ) -> Tensor:
            rows = [teacher_gradient(tiny_net, weights, teacher, batch, names, label) for teacher, label in old]
            return integrated(own, farthest(own, rows, 1)) if rows else own

        weights = hand.train(weights, names, EPOCHS, restored)
        close(update.model_weights, weights)
        assert set(update.message.tensors) == set(shared), "no knowledge leaves the client"
        assert update.client_state is not None
        known = read_knowledge(update.client_state.tensors)
        assert sorted(known) == list(range(task_index + 1))
        count = round(SHARE * method.parts.count_parameters(method.parts.whole))
        assert {len(task.values) for task in known.values()} == {count}
        assert update.message.numbers["knowledge_bytes"] == (task_index + 1) * (8 * count + 2)
        assert update.message.numbers["known_tasks"] == sorted(known)
        assert not update.message.numbers.get("unsolved")
        assert not update.message.numbers.get("tuning_unsolved")
        if task_index:
            assert update.message.numbers["integrated"] == EPOCHS * 3
            assert update.message.numbers["tuning_integrated"] == 3


def test_knowledge_of_a_task_is_replaced_in_the_clients_next_round_of_it(
    trainer: Trainer, make_context: MakeContext, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = make_method(make_context)
    initial, shard = tiny_net.initial_weights(), make_shard(0, 12)
    own: State | None = None
    for round in (1, 2):
        message = Message(method.initial_state(initial).tensors)
        job = ClientRoundInput(round, 0, message, method.initial_broadcast(initial).tensors, own, shard, 0)
        update = run_update(method.client_update(job), trainer, shard, RngContext(0, round, 0))
        own = update.client_state
        assert own is not None
        (knowledge,) = read_knowledge(own.tensors).values()
        vector = torch.cat([update.model_weights[name].flatten() for name in method.parameters])
        assert torch.equal(knowledge.values, vector[knowledge.indices.long()])
        assert "integrated" not in update.message.numbers, "a task is no constraint on itself"


def test_a_client_without_images_keeps_what_it_knows(
    trainer: Trainer, make_context: MakeContext, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = make_method(make_context)
    *_, (_, last) = play(method, trainer, tiny_net, make_shard)
    initial, shard = tiny_net.initial_weights(), make_shard(0, 0)
    base = method.initial_broadcast(initial).tensors
    job = ClientRoundInput(4, 0, Message(method.initial_state(initial).tensors), base, last.client_state, shard, 2)
    update = run_update(method.client_update(job), trainer, shard, RngContext(0, 4, 0))
    assert update.client_state is not None
    assert last.client_state is not None
    before, after = (read_knowledge(state.tensors) for state in (last.client_state, update.client_state))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[index].values, after[index].values) for index in before)
    assert not update.message.tensors


def test_reported_tasks_that_cannot_be_are_ignored(make_context: MakeContext) -> None:
    method = make_method(make_context)
    cost_model = CostModel(method, method.context.net, method.context.train)
    expected = {(2, 0, -1, 7): (0, 2), (1,): (1,), (): ()}
    for reported, known in expected.items():
        state = cost_model.kept_state({"known_tasks": list(reported)})
        assert state is not None
        assert tuple(read_knowledge(state.tensors)) == known
    assert cost_model.kept_state({"known_tasks": 3}) == cost_model.kept_state({"known_tasks": []})
