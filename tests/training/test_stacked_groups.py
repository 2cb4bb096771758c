"""Which clients are trained together, and what happens where their memory does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from clients_alone import SHARDS, assert_close, make_group, stored_to_draw

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.driver import group_trainings
from vitfleet.training.local_training import LocalResult, LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView
from vitfleet.training.trainer import Trainer


@dataclass(frozen=True)
class StepOfDepth:
    """A step through some blocks; steps of equal depth are equal."""

    depth: int

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch, depth=self.depth)


def test_group_trainings(tiny_net: Net, make_trainer: MakeTrainer, tiny_images: ImageSet) -> None:
    def client(size: int, epochs: int = 1, depth: int = 2, stored: SampleSet | None = None) -> ClientTraining:
        sets = {} if stored is None else {"replay": stored}
        weights = tiny_net.initial_weights()
        training = LocalTraining(weights, tiny_net.parts.head, epochs, StepOfDepth(depth), sets=sets)
        return ClientTraining(training, Shard(tiny_images, torch.arange(size)), RngContext(0, 1, 0))

    def grouped(*members: ClientTraining, batch: int = 8) -> list[list[int]]:
        groups = group_trainings(list(enumerate(members)), make_trainer(batch_size=batch))
        return sorted(sorted(index for index, _ in group) for group in groups)

    def changed(**keys: Any) -> ClientTraining:
        member = client(40)
        return replace(member, training=replace(member.training, **keys))

    assert grouped(client(40), client(30), client(20)) == [[0, 1, 2]]
    unequal = client(40), client(10), client(30), client(9)
    assert grouped(*unequal, batch=1) == [[0, 1, 2, 3]]  # smaller clients are left out of the last steps
    assert grouped(client(40), client(10), client(30), batch=64) == [[0, 1, 2]]  # one step each
    assert grouped(client(40), client(40, epochs=2), client(40, depth=1)) == [[0], [1], [2]]
    others: list[dict[str, Any]] = [
        {"train": TrainConfig(mask_ratio=0.5)},
        {"augment": False},
        {"score_samples": True},
        {"random": ("noise",)},
        {"constants": {"anchor": torch.zeros(3)}},
        {"kept": {"steps": torch.zeros(())}},
        {"scratch": {"rows": torch.zeros(3)}},
        {"trainable": tiny_net.parts.whole},
    ]
    assert grouped(client(40), *(changed(**keys) for keys in others)) == [[index] for index in range(9)]
    zeros, ones = ({"kept": {"seen": fill(size)}} for fill, size in ((torch.zeros, 3), (torch.ones, 5)))
    assert grouped(changed(**zeros), changed(**ones)) == [[0, 1]]  # of other shapes
    assert grouped(client(0), client(8), client(0)) == [[0], [1], [2]]  # clients without samples are not stacked
    stored, more = stored_to_draw(tiny_images, 0), stored_to_draw(tiny_images, 1)
    assert grouped(client(8), client(8, stored=stored), client(8, stored=more)) == [[0], [1, 2]]
    assert grouped(client(8, stored=stored), client(8, stored=replace(more, draws=5))) == [[0], [1]]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")], ids=str)
def test_a_group_that_is_out_of_memory_is_halved(
    error: RuntimeError,
    tiny_net: Net,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(batch_size=8, optimizer="sgd")
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1)
    group = make_group([training] * len(SHARDS), make_shard)
    train, sizes = Trainer._train, []

    def train_at_most_two(self: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
        sizes.append(len(group))
        if len(group) > 2:
            raise error
        return train(self, group)

    monkeypatch.setattr(Trainer, "_train", train_at_most_two)
    results = trainer.train_together(group)
    assert sizes == [4, 2, 2]
    for member, result in zip(group, results, strict=True):
        alone = trainer.train(member.training, member.shard, member.rng)
        assert_close(result.weights, alone.weights)
    monkeypatch.setattr(trainer.memory_budget, "max_clients", lambda wanted, device: min(wanted, 1))
    sizes.clear()
    trainer.train_together(group)
    assert sizes == [1, 1, 1, 1]  # at most as many as the budget allows


def test_training_raises_if_a_single_client_is_out_of_memory(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trainer, "_train", out_of_memory)
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer().train(training, make_shard(0, 8), RngContext(0, 1, 0))
