"""ER and DER++, held against a loop by hand with autograd, and what their clients store."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from by_hand import PLAIN_SGD, close
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from conftest import CLASSES, MakeContext, MakeShard, MakeTrainer
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.replay.experience_replay import (
    REPLAY,
    DarkExperienceStep,
    DerPlusPlus,
    DerPlusPlusParams,
    ErParams,
    ExperienceReplay,
    drawn_before,
)
from vitfleet.methods.continual.stored_samples import StoredSamples, read_memory
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.driver import run_update
from vitfleet.training.samples import Outputs
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
ALPHA, BETA = 0.3, 0.7
CLIENT = 2


@dataclass(frozen=True)
class ByHand:
    """One client's training by hand: plain SGD at rate 0.1 in batches of four, all stored tasks in one buffer."""

    net: Net
    tasks: Tensor | None

    def logits(self, weights: Tensors, images: Tensor) -> Tensor:
        module = copy.deepcopy(self.net.module.vit)
        logits: Tensor = functional_call(module, dict(weights), ((images.float() / 255 - 0.5) / 0.5,))
        return logits

    def cross_entropy(self, weights: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(weights, images)
        if self.tasks is not None:
            logits = torch.where(self.tasks == self.tasks[labels][:, None], logits, -torch.inf)
        return F.cross_entropy(logits, labels)

    def distance(self, weights: Tensors, images: Tensor, labels: Tensor, stored: Tensor) -> Tensor:
        """Return the mean over samples of the mean squared difference, sample by sample."""
        distances = []
        for logits, label, target in zip(self.logits(weights, images), labels, stored, strict=True):
            own = torch.ones(CLASSES, dtype=torch.bool) if self.tasks is None else self.tasks == self.tasks[label]
            distances.append(F.mse_loss(logits[own], target[own]))
        return torch.stack(distances).mean()

    def train(
        self, weights: Tensors, images: Tensor, labels: Tensor, memory: StoredSamples | None, round: int, kind: str
    ) -> dict[str, Tensor]:
        now = {name: tensor.clone() for name, tensor in weights.items()}
        for epoch in range(2):
            order = Address(0, Purpose.ORDER, round, CLIENT, epoch).generator().permutation(len(labels))
            terms = 1 if kind == "er" else 2
            stored = 1 if memory is None else len(memory)
            drawn = Address(0, REPLAY, round, CLIENT, epoch).generator().integers(stored, size=(12, terms))
            for start in range(0, len(labels), 4):
                batch, rows = order[start : start + 4], drawn[start : start + 4]
                leaves = {name: tensor.clone().requires_grad_() for name, tensor in now.items()}
                loss = self.cross_entropy(leaves, images[batch], labels[batch])
                if memory is not None:
                    loss = loss + self.replay_terms(leaves, memory, torch.from_numpy(rows), kind)
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                now = {name: now[name] - 0.1 * one for name, one in zip(leaves, gradients, strict=True)}
        return now

    def replay_terms(self, weights: Tensors, memory: StoredSamples, rows: Tensor, kind: str) -> Tensor:
        last = rows[:, -1]
        entropy = self.cross_entropy(weights, memory.images[last], memory.labels[last].long())
        if kind == "er":
            return entropy
        first = rows[:, 0]
        assert memory.logits is not None
        labels = memory.labels[first].long()
        distance = self.distance(weights, memory.images[first], labels, memory.logits[first])
        return ALPHA * distance + BETA * entropy


def make_replay_method(kind: str, make_context: MakeContext) -> ExperienceReplay | DerPlusPlus:
    context = make_context(num_tasks=3, epochs=2, **PLAIN_SGD)
    if kind == "er":
        return ExperienceReplay(ErParams(stored_share=0.4), context)
    return DerPlusPlus(DerPlusPlusParams(stored_share=0.4, alpha=ALPHA, beta=BETA), context)


def run_client(
    method: ExperienceReplay | DerPlusPlus,
    trainer: Trainer,
    make_shard: MakeShard,
    task_index: int,
    own: State | None,
    round: int,
) -> ClientUpdate:
    initial, shard = trainer.net.initial_weights(), make_shard(12 * task_index, 12 * task_index + 12)
    message, base = Message(method.initial_state(initial).tensors), method.initial_broadcast(initial).tensors
    job = ClientRoundInput(round, CLIENT, message, base, own, shard, task_index)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, round, CLIENT))


def merge(state: State | None, num_tasks: int) -> StoredSamples | None:
    """Return what a client has stored of its first tasks, as one."""
    stored = {} if state is None else read_memory(state.tensors)
    tasks = [stored[index] for index in range(num_tasks)]
    if not tasks:
        return None
    logits = [task.logits for task in tasks if task.logits is not None]
    return StoredSamples(
        torch.cat([task.images for task in tasks]),
        torch.cat([task.labels for task in tasks]),
        torch.cat(logits) if logits else None,
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["er", "der++"])
def test_three_tasks_as_by_hand(
    kind: str, known: bool, make_context: MakeContext, make_trainer: MakeTrainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    tasks = TASKS if known else None
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=tasks)
    method, hand = make_replay_method(kind, make_context), ByHand(tiny_net, tasks)
    own: State | None = None
    for task_index, round in ((0, 1), (1, 2), (1, 3), (2, 4)):  # two rounds in the second task
        head = tiny_net.initial_weights() if own is None else own.tensors
        received = {**method.parts.head.take(head), **method.parts.body.take(tiny_net.initial_weights())}
        shard = make_shard(12 * task_index, 12 * task_index + 12)
        images, labels = shard.images.images[shard.index], shard.labels
        expected = hand.train(received, images, labels, merge(own, task_index), round, kind)
        update = run_client(method, trainer, make_shard, task_index, own, round)
        close(update.model_weights, expected)
        assert set(update.message.tensors) == set(method.parts.body)
        own = update.client_state


def test_stored_logits_are_those_of_the_model_that_was_just_trained(
    make_context: MakeContext, make_trainer: MakeTrainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=TASKS)
    method, hand = make_replay_method("der++", make_context), ByHand(tiny_net, TASKS)
    own: State | None = None
    kept: dict[int, Tensor] = {}
    for task_index, round in ((0, 1), (0, 2), (1, 3), (2, 4)):
        update = run_client(method, trainer, make_shard, task_index, own, round)
        own = update.client_state
        assert own is not None
        stored = read_memory(own.tensors)
        logits = stored[task_index].logits
        assert logits is not None
        torch.testing.assert_close(logits, hand.logits(update.model_weights, stored[task_index].images))
        for earlier in range(task_index):
            assert torch.equal(torch.as_tensor(stored[earlier].logits), kept[earlier]), "an earlier task's stay"
        kept[task_index] = logits
        sample_bytes = 8 * 8 + 2 + 4 * CLASSES
        assert update.message.numbers["memory_bytes"] == sum(map(len, stored.values())) * sample_bytes


def test_the_same_samples_are_stored_in_every_round_of_a_task(
    make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(epochs=2, **PLAIN_SGD)
    method = make_replay_method("er", make_context)
    first = run_client(method, trainer, make_shard, 0, None, 1).client_state
    second = run_client(method, trainer, make_shard, 0, first, 2).client_state
    assert first is not None
    assert second is not None
    assert torch.equal(read_memory(first.tensors)[0].images, read_memory(second.tensors)[0].images)


def test_only_earlier_tasks_are_replayed() -> None:
    stored = {
        index: StoredSamples(
            torch.full((2, 1, 8, 8), index, dtype=torch.uint8), torch.full((2,), index, dtype=torch.int16)
        )
        for index in (3, 0, 2)  # task 1 was missed
    }
    assert drawn_before(stored, 0, 1) is None
    assert drawn_before(stored, 2, 0) is None
    assert drawn_before({}, 2, 1) is None
    drawn = drawn_before(stored, 3, 1)
    assert drawn is not None
    assert drawn.labels.tolist() == [[0, 0, 2, 2]]
    assert drawn.images[0, :, 0, 0, 0].tolist() == [0, 0, 2, 2]
    assert (drawn.sizes, drawn.draws) == ((4,), 1)
    assert not drawn.stored


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.0), (0.0, 0.7), (0.3, 0.7)])
def test_dark_experience_loss_is_the_formula(alpha: float, beta: float) -> None:
    """Two samples in the batch, one of them padding; each term has three replayed samples per sample of the batch."""
    random = torch.Generator().manual_seed(0)
    drawn = 3 * ((alpha > 0) + (beta > 0))
    logits, stored = torch.randn(2, 2 * drawn, CLASSES, generator=random)
    labels = torch.randint(0, CLASSES, (2 * drawn,), generator=random)
    own_task = TASKS[labels][:, None] == TASKS
    batch_logits, batch_labels = torch.randn(2, CLASSES, generator=random), torch.tensor([1, 4])
    masked = torch.where(own_task, logits, -torch.inf).requires_grad_()
    weight = torch.tensor([1.0, 0.0]).repeat_interleave(drawn) / drawn
    nothing = torch.zeros(())
    batch = Outputs(batch_logits, batch_labels, torch.tensor([1.0, 0.0]), nothing, {}, {}, nothing)
    replayed = Outputs(masked, labels, weight, nothing, {}, {}, nothing, stored={"logits": stored})
    loss = DarkExperienceStep(alpha, beta, 3).loss(batch, replayed)
    expected = F.cross_entropy(batch_logits[:1], batch_labels[:1])
    if alpha:
        distances = [F.mse_loss(logits[i][own_task[i]], stored[i][own_task[i]]) for i in range(3)]
        expected = expected + alpha * torch.stack(distances).mean()
    if beta:
        expected = expected + beta * F.cross_entropy(masked[drawn - 3 : drawn], labels[drawn - 3 : drawn])
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, masked)
    assert bool(gradient.isfinite().all())
    assert not gradient[~own_task].any()
