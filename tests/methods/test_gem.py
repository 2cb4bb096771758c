"""GEM and A-GEM, held against a loop by hand: quadprog for one, the closed form for the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, Samples, close, integrated, memory_of
from torch import Tensor

from conftest import MakeContext, MakeShard, MakeTrainer
from projection_angles import counting_obtuse_angles
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.gradients.gem import AGem, AGemParams, Gem, GemParams
from vitfleet.methods.continual.gradients.projection import References, project
from vitfleet.methods.continual.stored_samples import read_memory
from vitfleet.models.net import Net
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=TASKS)


def of_kind(kind: str, make_context: MakeContext) -> Gem | AGem:
    context = make_context(num_tasks=3, epochs=2, **PLAIN_SGD)
    return Gem(GemParams(stored_share=0.4), context) if kind == "gem" else AGem(AGemParams(stored_share=0.4), context)


def ask(
    method: Gem | AGem,
    trainer: Trainer,
    net: Net,
    make_shard: MakeShard,
    task_index: int,
    own: State | None,
    round: int,
) -> ClientUpdate:
    initial, shard = net.initial_weights(), make_shard(12 * task_index, 12 * task_index + 12)
    down, base = Message(method.initial_state(initial).tensors), method.initial_broadcast(initial).tensors
    return run_update(
        method.client_update(ClientRoundInput(round, 0, down, base, own, shard, task_index)),
        trainer,
        shard,
        RngContext(0, round, 0),
    )


@pytest.mark.usefixtures("checked_angles")
@pytest.mark.parametrize("kind", ["gem", "a-gem"])
def test_three_tasks_as_by_hand(
    kind: str, make_context: MakeContext, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = of_kind(kind, make_context)
    own: State | None = None
    names = list(tiny_net.parts.whole)
    for task_index in range(3):
        head = tiny_net.initial_weights() if own is None else own.tensors
        received = {**method.parts.head.take(head), **method.parts.body.take(tiny_net.initial_weights())}
        answer = ask(method, trainer, tiny_net, make_shard, task_index, own, round=task_index + 1)
        old = [] if own is None else memory_of(own, task_index)
        hand = Hand(tiny_net, TASKS, make_shard(12 * task_index, 12 * task_index + 12), round=task_index + 1)

        def projected(
            gradient: Tensor, weights: Tensors, batch: Samples, old: list[Samples] = old, hand: Hand = hand
        ) -> Tensor:
            if not old:
                return gradient
            if kind == "gem":
                return integrated(gradient, [hand.gradient(weights, samples, names) for samples in old])
            together = torch.cat([pixels for pixels, _ in old]), torch.cat([labels for _, labels in old])
            reference = hand.gradient(weights, together, names)
            return gradient - torch.clamp(gradient @ reference, max=0) / (reference @ reference) * reference

        close(answer.model_weights, hand.train(received, names, 2, projected))
        assert set(answer.message.tensors) == set(method.parts.body)
        assert not answer.message.numbers.get("unsolved")
        own = answer.client_state


def test_an_obtuse_angle_would_be_seen() -> None:
    """Of the tests above: what they use to check every step finds a gradient that was not projected."""
    gradient, reference = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([[-1.0, 1.0]])}
    references = References(reference, torch.ones(1, dtype=torch.bool))

    def unchanged(gradients: Tensors, *references: References, margin: float) -> tuple[Tensors, Tensors]:
        return gradients, {"unsolved": torch.zeros(())}

    for projection, seen in ((unchanged, 1), (project, 0)):
        _, counts = counting_obtuse_angles(projection)(gradient, references)
        assert int(counts["unsolved"]) == seen


def test_what_is_stored_of_a_task_is_drawn_once(
    make_context: MakeContext, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = of_kind("gem", make_context)
    first = ask(method, trainer, tiny_net, make_shard, 0, None, round=1)
    second = ask(method, trainer, tiny_net, make_shard, 0, first.client_state, round=2)
    third = ask(method, trainer, tiny_net, make_shard, 1, second.client_state, round=3)
    assert first.client_state is not None
    assert second.client_state is not None
    assert third.client_state is not None
    one, two, three = (
        read_memory(own.tensors) for own in (first.client_state, second.client_state, third.client_state)
    )
    assert torch.equal(one[0].images, two[0].images)
    assert torch.equal(one[0].images, three[0].images)
    assert list(three) == [0, 1]
    assert "integrated" not in second.message.numbers, "a task is no constraint on itself"
    assert third.message.numbers["integrated"] == 6
