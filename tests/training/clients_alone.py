"""Clients of unequal sizes, trained together and each alone, for the tests of cohorts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conftest import CLASSES, MakeShard
from vitfleet.data.images import ImageSet
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.local_training import ReplayBuffer
from vitfleet.training.stack_inputs import ClientFit, RngContext
from vitfleet.training.step import Fit, FitResult
from vitfleet.training.trainer import Trainer

SHARDS = ((0, 20), (3, 11), (9, 36), (2, 3))  # unequal numbers of steps, and batches that are not full


def assert_close(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    """Compare the relative distance of whole tensors: single numbers near zero may differ by more."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name].shape == expected[name].shape, name
        distance = float((actual[name].double() - expected[name].double()).norm())
        assert distance <= tolerance * float(expected[name].double().norm()) + 1e-7, (name, distance)


def make_group(fits: Sequence[Fit], make_shard: MakeShard) -> list[ClientFit]:
    return [
        ClientFit(fit, make_shard(*bounds), RngContext(7, 3, client))
        for client, (fit, bounds) in enumerate(zip(fits, SHARDS, strict=True))
    ]


def check_against_single_fits(trainer: Trainer, fits: Sequence[Fit], make_shard: MakeShard) -> list[FitResult]:
    """Compare the results of a cohort with those of its clients alone, and return them.

    In double precision, because the gradient of a key's bias is all rounding errors, and AdamW scales it up.
    """
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))
    group = make_group(fits, make_shard)
    together = trainer.fit_cohort(group)
    for client_fit, result in zip(group, together, strict=True):
        alone = trainer.fit(client_fit.fit, client_fit.shard, client_fit.rng)
        assert_close(result.weights, alone.weights)
        assert_close(result.observed, alone.observed)
        torch.testing.assert_close(result.loss, alone.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result.sample_losses, alone.sample_losses, rtol=1e-4, atol=1e-5)
        assert (result.samples, result.steps) == (alone.samples, alone.steps)
        start = client_fit.fit.weights
        assert all(float((result.weights[n] - start[n]).abs().max()) > 0 for n in result.weights if "head" in n)
    return together


def random_weights(net: Net, count: int = len(SHARDS)) -> list[dict[str, Tensor]]:
    """Return other weights for every client."""
    random = torch.Generator().manual_seed(1)
    return [
        {
            name: (tensor + 0.05 * torch.randn(tensor.shape, generator=random)).double()
            for name, tensor in net.initial_weights().items()
        }
        for _ in range(count)
    ]


def make_buffer(images: ImageSet, client: int) -> ReplayBuffer:
    """Return a buffer of its own size for every client, with a target for every class."""
    index = (torch.arange(5 + 9 * client) + client) % len(images)
    targets = torch.randn(len(index), CLASSES, generator=torch.Generator().manual_seed(client))
    return ReplayBuffer(images.images[index], images.labels[index], 4, {"logits": targets})
