"""BCN's client rounds, held against a loop by hand with autograd."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from by_hand import PLAIN_SGD, close
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from conftest import MakeContext, MakeShard, MakeTrainer
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput
from vitfleet.methods.continual.replay.bcn import Bcn, BcnParams
from vitfleet.methods.continual.replay.experience_replay import REPLAY
from vitfleet.methods.continual.stored_samples import read_memory
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext

TASKS = torch.tensor([0, 0, 1, 1, 1])
BETA, EPSILON, RATE = 0.9, 0.5, 0.05
CLIENT = 2


@dataclass(frozen=True)
class ByHand:
    """Plain SGD at rate 0.1 in batches of four; as many stored samples as the batch has."""

    net: Net
    tasks: Tensor | None

    def loss(self, weights: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(copy.deepcopy(self.net.module.vit), dict(weights), (inputs,))
        if self.tasks is not None:
            logits = torch.where(self.tasks == self.tasks[labels][:, None], logits, -torch.inf)
        return F.cross_entropy(logits, labels)

    def gradient(self, weights: Tensors, images: Tensor, labels: Tensor, stored: Tensor, answers: Tensor) -> Tensors:
        """Return the gradient of H; the displacements of both players are constants."""
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        new = self.loss(leaves, images, labels)
        if not len(answers):
            return dict(zip(leaves, torch.autograd.grad(new, list(leaves.values())), strict=True))
        x = stored.clone().requires_grad_()
        by_image, *by_weight = torch.autograd.grad(self.loss(leaves, x, answers), [x, *leaves.values()])
        moved_x = torch.stack([one + EPSILON * g / g.norm() for one, g in zip(stored, by_image, strict=True)])
        moved = {name: leaves[name] - RATE * g for name, g in zip(leaves, by_weight, strict=True)}
        resting = self.loss(leaves, stored, answers)
        raised = self.loss(leaves, moved_x, answers) - resting
        lowered = self.loss(moved, stored, answers) - resting
        total = BETA * new + resting + raised + lowered
        return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))

    def train(
        self, weights: Tensors, samples: tuple[Tensor, Tensor], memory: tuple[Tensor, Tensor], round: int
    ) -> Tensors:
        now = dict(weights)
        (images, labels), (stored, answers) = samples, memory
        for epoch in range(2):
            order = Address(0, Purpose.ORDER, round, CLIENT, epoch).generator().permutation(len(labels))
            draws = Address(0, REPLAY, round, CLIENT, epoch).generator()
            drawn = draws.integers(max(1, len(answers)), size=(len(labels), 1))[:, 0]
            for start in range(0, len(labels), 4):
                batch = order[start : start + 4]
                rows = torch.from_numpy(drawn[start : start + 4]) if len(answers) else torch.empty(0, dtype=torch.long)
                gradients = self.gradient(now, images[batch], labels[batch], stored[rows], answers[rows])
                now = {name: now[name] - 0.1 * gradients[name] for name in now}
        return now


def inputs_of(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.5


@pytest.mark.parametrize("known", [True, False])
def test_three_tasks_as_by_hand(
    known: bool, make_context: MakeContext, make_trainer: MakeTrainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    tasks = TASKS if known else None
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=tasks)
    context = make_context(num_tasks=3, epochs=2, **PLAIN_SGD)
    method = Bcn(BcnParams(stored_share=0.4, beta=BETA, epsilon=EPSILON, descent_rate=RATE), context)
    initial, hand = tiny_net.initial_weights(), ByHand(tiny_net, tasks)
    base, sent = method.initial_broadcast(initial).tensors, method.initial_state(initial).tensors
    own: State | None = None
    for task_index, round in ((0, 1), (1, 2), (1, 3), (2, 4)):  # two rounds in the second task
        shard = make_shard(12 * task_index, 12 * task_index + 12)
        received = {**method.parts.head.take(initial if own is None else own.tensors), **sent}
        known_tasks = {} if own is None else read_memory(own.tensors)
        old = [known_tasks[index] for index in range(task_index)]
        memory = (
            inputs_of(torch.cat([task.images for task in old]) if old else torch.empty(0, 1, 8, 8)),
            torch.cat([task.labels for task in old]).long() if old else torch.empty(0, dtype=torch.long),
        )
        samples = inputs_of(shard.images.images[shard.index]), shard.labels
        expected = hand.train(received, samples, memory, round)
        job = ClientRoundInput(round, CLIENT, Message(sent), base, own, shard, task_index)
        update = run_update(method.client_update(job), trainer, shard, RngContext(0, round, CLIENT))
        close(update.model_weights, expected)
        assert set(update.message.tensors) == set(method.parts.body)
        own = update.client_state


def test_defaults_are_the_authors() -> None:
    params = BcnParams()
    assert (params.beta, params.epsilon, params.stored_share) == (0.99, 1e-3, 0.1)
    assert (params.ascent_steps, params.descent_steps, params.replays) == (1, 1, 1)
