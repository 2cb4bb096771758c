"""FedViT's client round, held against one written by hand with quadprog and SciPy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, Samples, close, farthest, integrated, memory_of
from torch import Tensor

from conftest import MakeContext, MakeShard, MakeTrainer
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.gradients.fedvit import FedVit, FedVitParams
from vitfleet.methods.continual.stored_samples import select_samples
from vitfleet.models.net import Net
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.step import cross_entropy_step
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
EPOCHS = 3


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return replace(make_trainer(epochs=EPOCHS, **PLAIN_SGD), class_to_task=TASKS)


@pytest.fixture
def method(make_context: MakeContext) -> FedVit:
    context = make_context(num_tasks=3, epochs=EPOCHS, **PLAIN_SGD)
    return FedVit(FedVitParams(k=1, head_epochs=1, stored_share=0.3), context)


def bodies(method: FedVit, net: Net) -> list[dict[str, Tensor]]:
    """Return what the server sends in three rounds: bodies that others had their part in."""
    random = torch.Generator().manual_seed(5)
    initial = method.initial_state(net.initial_weights()).tensors
    return [
        {name: one + scale * torch.randn(one.shape, generator=random) for name, one in initial.items()}
        for scale in (0.0, 0.1, 0.1)
    ]


def play(method: FedVit, trainer: Trainer, net: Net, make_shard: MakeShard) -> list[tuple[Tensors, ClientUpdate]]:
    """Play three rounds of one client, a task each; return what it got and what it made of it."""
    base = method.initial_broadcast(net.initial_weights()).tensors
    own: State | None = None
    played: list[tuple[Tensors, ClientUpdate]] = []
    for task_index, body in enumerate(bodies(method, net)):
        shard = make_shard(12 * task_index, 12 * task_index + 12)
        job = ClientRoundInput(task_index + 1, 0, Message(body), base, own, shard, task_index)
        answer = run_update(method.client_update(job), trainer, shard, RngContext(0, task_index + 1, 0))
        own = answer.client_state
        head = base if not played else method.parts.head.take(played[-1][1].model_weights)
        played.append(({**head, **body}, answer))
    return played


@pytest.mark.usefixtures("checked_angles")
def test_three_tasks_as_by_hand(method: FedVit, trainer: Trainer, tiny_net: Net, make_shard: MakeShard) -> None:
    played = play(method, trainer, tiny_net, make_shard)
    body, head = list(method.parts.body), list(method.parts.head)
    for task_index, (received, answer) in enumerate(played):
        hand = Hand(tiny_net, TASKS, make_shard(12 * task_index, 12 * task_index + 12), round=task_index + 1)
        weights = dict(received)
        if task_index:
            before = {**received, **method.parts.body.take(played[task_index - 1][1].model_weights)}

            def rotated(
                after: Tensor, weights: Tensors, batch: Samples, before: Tensors = before, hand: Hand = hand
            ) -> Tensor:
                there = hand.gradient(before, batch, body)
                return there - torch.clamp(there @ after, max=0) / (after @ after) * after

            weights = hand.train(weights, body, 1, rotated)
        weights = hand.train(weights, head, 1)
        old = memory_of(answer.client_state, task_index)

        def restored(
            own: Tensor, weights: Tensors, batch: Samples, old: list[Samples] = old, hand: Hand = hand
        ) -> Tensor:
            rows = [hand.gradient(weights, samples, body) for samples in old]
            return integrated(own, farthest(own, rows, 1)) if rows else own

        weights = hand.train(weights, body, EPOCHS - 1, restored)
        close(answer.model_weights, weights)
        close(answer.message.tensors, {name: weights[name] for name in body})
        assert set(answer.message.tensors) == set(body), "no head leaves the client"
        assert not answer.message.numbers.get("unsolved")
        assert not answer.message.numbers.get("tuning_unsolved")
        # What it knows of the task: the samples of lowest loss under the model it now has.
        shard = hand.shard
        losses = hand.losses(weights, (shard.images.images[shard.index], shard.labels)).detach()
        kept = shard.index[select_samples(losses, shard.labels, 0.3)]
        pixels, labels = memory_of(answer.client_state, task_index + 1)[task_index]
        assert torch.equal(pixels, shard.images.images[kept])
        assert torch.equal(labels, shard.images.labels[kept])


def test_what_was_done_is_told(method: FedVit, trainer: Trainer, tiny_net: Net, make_shard: MakeShard) -> None:
    first, second, third = (answer.message.numbers for _, answer in play(method, trainer, tiny_net, make_shard))
    assert set(first) == {"samples", "loss", "memory_bytes", "stored"}
    counts = first["stored"], second["stored"], third["stored"]
    assert [len(one) for one in counts if isinstance(one, list)] == [1, 2, 3]
    assert second["integrated"] == third["integrated"] == 2 * 3  # two body epochs of three steps
    assert second["tuning_integrated"] == 3
    for numbers in (second, third):
        assert (numbers["degenerate"], numbers["unsolved"]) == (0, 0)
        rotated = numbers["rotated"]
        assert isinstance(rotated, int)
        assert 0 <= rotated <= 6


def test_without_earlier_rounds_it_is_fedreps_round(
    method: FedVit, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    base, body = method.initial_broadcast(tiny_net.initial_weights()).tensors, bodies(method, tiny_net)[0]
    work = method.client_update(ClientRoundInput(1, 0, Message(body), base, None, make_shard(0, 12), 0))
    first = next(work)
    assert first.trainable == method.parts.head
    later = work.send(trainer.train(first, make_shard(0, 12), RngContext(0, 1, 0)))
    assert later.trainable == method.parts.body
    for training in (first, later):
        assert training.step is cross_entropy_step
        assert (training.sets, training.constants, training.kept) == ({}, {}, {})
    assert (first.epochs, later.epochs) == (1, EPOCHS - 1)


def test_the_clients_own_model_is_what_it_trained(
    method: FedVit, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    *_, (_, answer) = play(method, trainer, tiny_net, make_shard)
    server = method.initial_state(tiny_net.initial_weights())
    base = method.initial_broadcast(tiny_net.initial_weights()).tensors
    own = method.model_weights(server, base, answer.client_state)
    assert set(own) == set(tiny_net.parts.shapes)
    assert all(torch.equal(own[name], answer.model_weights[name]) for name in own)
    stranger = method.model_weights(server, base, None)
    assert all(torch.equal(stranger[name], one) for name, one in tiny_net.initial_weights().items())
