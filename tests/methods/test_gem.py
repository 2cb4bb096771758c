"""GEM and A-GEM, held against a loop by hand: quadprog for one, the closed form for the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, Samples, close, integrated, memory_of
from torch import Tensor

from conftest import MakeSetting, MakeShard, MakeTrainer
from vitfleet.config.methods import AGemConfig, GemConfig
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import Answer, Job
from vitfleet.methods.gem import AGem, Gem
from vitfleet.methods.knowledge import read
from vitfleet.models.net import Net
from vitfleet.train.drive import drive
from vitfleet.train.given import Place
from vitfleet.train.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return replace(make_trainer(epochs=2, **PLAIN_SGD), tasks=TASKS)


def of_kind(kind: str, make_setting: MakeSetting) -> Gem | AGem:
    setting = replace(make_setting(epochs=2, **PLAIN_SGD), stages=3)
    return Gem(GemConfig(rho=0.4, check=True), setting) if kind == "gem" else AGem(AGemConfig(rho=0.4), setting)


def ask(
    method: Gem | AGem, trainer: Trainer, net: Net, make_shard: MakeShard, stage: int, own: State | None, round: int
) -> Answer:
    initial, shard = net.initial_weights(), make_shard(12 * stage, 12 * stage + 12)
    down, base = Message(method.start(initial).tensors), method.base(initial).tensors
    return drive(method.work(Job(round, 0, down, base, own, shard, stage)), trainer, shard, Place(0, round, 0))


@pytest.mark.parametrize("kind", ["gem", "a-gem"])
def test_three_tasks_as_by_hand(
    kind: str, make_setting: MakeSetting, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = of_kind(kind, make_setting)
    own: State | None = None
    names = list(tiny_net.anatomy.whole)
    for stage in range(3):
        head = tiny_net.initial_weights() if own is None else own.tensors
        received = {**method.anatomy.head.take(head), **method.anatomy.body.take(tiny_net.initial_weights())}
        answer = ask(method, trainer, tiny_net, make_shard, stage, own, round=stage + 1)
        old = [] if own is None else memory_of(own, stage)
        hand = Hand(tiny_net, TASKS, make_shard(12 * stage, 12 * stage + 12), round=stage + 1)

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

        close(answer.model, hand.train(received, names, 2, projected))
        assert set(answer.up.tensors) == set(method.anatomy.body)
        own = answer.own


def test_what_is_stored_of_a_task_is_drawn_once(
    make_setting: MakeSetting, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = of_kind("gem", make_setting)
    first = ask(method, trainer, tiny_net, make_shard, 0, None, round=1)
    second = ask(method, trainer, tiny_net, make_shard, 0, first.own, round=2)
    third = ask(method, trainer, tiny_net, make_shard, 1, second.own, round=3)
    assert first.own is not None
    assert second.own is not None
    assert third.own is not None
    one, two, three = (read(own.tensors) for own in (first.own, second.own, third.own))
    assert torch.equal(one[0].images, two[0].images)
    assert torch.equal(one[0].images, three[0].images)
    assert list(three) == [0, 1]
    assert "integrated" not in second.up.numbers, "a task is no constraint on itself"
    assert third.up.numbers["integrated"] == 6
