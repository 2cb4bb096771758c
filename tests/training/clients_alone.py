"""Clients of unequal sizes, trained together and each alone, eagerly and captured, with one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conftest import CLASSES, MakeShard
from vitfleet.data.images import ImageSet
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalResult, LocalTraining, SampleSet
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.trainer import Trainer

SHARDS = ((0, 20), (3, 11), (9, 36), (2, 3))  # unequal numbers of steps, and batches that are not full


def assert_close(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    """Compare the relative distance of whole tensors: single numbers near zero may differ by more."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name].shape == expected[name].shape, name
        distance = float((actual[name].double() - expected[name].double()).norm())
        assert distance <= tolerance * float(expected[name].double().norm()) + 1e-7, (name, distance)


def in_double(trainer: Trainer) -> Trainer:
    """Return a trainer in double precision: the gradient of a key's bias is rounding errors, and AdamW scales it up."""
    if trainer.preprocess.mean.dtype == torch.float64:
        return trainer  # captured steps serve this preprocessing, not an equal one
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    return replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))


def with_machine(trainer: Trainer, **settings: Any) -> Trainer:
    return replace(trainer, machine=replace(trainer.machine, **settings))


def make_group(trainings: Sequence[LocalTraining], make_shard: MakeShard, round: int = 3) -> list[ClientTraining]:
    """Return clients with these trainings; fewer than four clients have the first of the shards."""
    return [
        ClientTraining(training, make_shard(*bounds), RngContext(7, round, client))
        for client, (training, bounds) in enumerate(zip(trainings, SHARDS, strict=False))
    ]


def train_alone(trainer: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
    return [trainer.train(member.training, member.shard, member.rng) for member in group]


def assert_same_results(actual: Sequence[LocalResult], expected: Sequence[LocalResult]) -> None:
    for result, reference in zip(actual, expected, strict=True):
        assert_close(result.weights, reference.weights)
        assert_close(result.kept, reference.kept)
        torch.testing.assert_close(result.loss, reference.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result.sample_losses, reference.sample_losses, rtol=1e-4, atol=1e-5)
        assert (result.samples, result.steps) == (reference.samples, reference.steps)
        assert result.finite_steps == reference.finite_steps


def check_stacked(trainer: Trainer, trainings: Sequence[LocalTraining], make_shard: MakeShard) -> list[LocalResult]:
    """Compare the results of stacked clients with those of each alone, and return them."""
    trainer = in_double(trainer)
    group = make_group(trainings, make_shard)
    together = trainer.train_together(group)
    assert_same_results(together, train_alone(trainer, group))
    for member, result in zip(group, together, strict=True):
        start = member.training.weights
        assert all(float((result.weights[n] - start[n]).abs().max()) > 0 for n in result.weights if "head" in n)
    return together


def check_every_way(trainer: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
    """Train clients alone and stacked, eagerly and captured (emulated); return the results, which are the same."""
    trainer = in_double(trainer)
    graphed = with_machine(trainer, graphs=True)
    alone = train_alone(trainer, group)
    assert_same_results(trainer.train_together(group), alone)
    assert_same_results(graphed.train_together(group), alone)
    assert_same_results(train_alone(graphed, group), alone)
    return alone


def random_weights(net: Net, count: int = len(SHARDS)) -> list[dict[str, Tensor]]:
    """Return other weights for every client, in double precision."""
    random = torch.Generator().manual_seed(1)
    return [
        {
            name: (tensor + 0.05 * torch.randn(tensor.shape, generator=random)).double()
            for name, tensor in net.initial_weights().items()
        }
        for _ in range(count)
    ]


def stored_to_draw(images: ImageSet, client: int) -> SampleSet:
    """Return a set of its own size for every client, of which four samples are drawn, with stored logits."""
    index = (torch.arange(5 + 9 * client) + client) % len(images)
    logits = torch.randn(len(index), CLASSES, generator=torch.Generator().manual_seed(client))
    stored = {"logits": logits[None]}
    return SampleSet(images.images[index][None], images.labels[index][None], (len(index),), draws=4, stored=stored)


def stored_parts(images: ImageSet, client: int, parts: int) -> SampleSet:
    """Return stored samples in parts of at most 18, 12, 6 … samples. The last part of some clients is empty."""
    sizes = tuple(max(0, 18 - 6 * part - 2 * (client % 3)) for part in range(parts))
    sizes = (*sizes[:-1], 0) if client % 2 else sizes
    index = (torch.arange(parts * sizes[0]).view(parts, -1) + client) % len(images)
    return SampleSet(images.images[index], images.labels[index], sizes)
