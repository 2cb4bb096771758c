"""A client's training written out by hand on timm's own module, for the methods that learn task after task."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import quadprog
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from vitfleet.data.images import Shard
from vitfleet.message import State, Tensors
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose

Samples: TypeAlias = tuple[Tensor, Tensor]  # pixels as stored, labels
Change: TypeAlias = Callable[[Tensor, dict[str, Tensor], Samples], Tensor]

PLAIN_SGD: dict[str, object] = {
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "constant",
    "lr": 0.1,
    "batch_size": 4,
}


@dataclass
class Hand:
    """Plain SGD, one client, one round."""

    net: Net
    tasks: Tensor
    shard: Shard
    round: int
    client: int = 0
    epoch: int = 0  # the next one

    def losses(self, weights: Tensors, samples: Samples) -> Tensor:
        """Return each sample's cross-entropy among the classes of its task."""
        pixels, labels = samples
        module = copy.deepcopy(self.net.module.vit)
        logits = functional_call(module, dict(weights), ((pixels.float() / 255 - 0.5) / 0.5,))
        own_task = self.tasks[None, :] == self.tasks[labels][:, None]
        return F.cross_entropy(torch.where(own_task, logits, -torch.inf), labels, reduction="none")

    def gradient(self, weights: Tensors, samples: Samples, names: list[str]) -> Tensor:
        """Return the mean loss's gradient as one vector."""
        leaves = {name: weights[name].clone().requires_grad_() for name in names}
        loss = self.losses({**weights, **leaves}, samples).mean()
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(leaves.values()))])

    def batches(self, epochs: int) -> Iterator[Samples]:
        """Yield the batches of the next epochs."""
        pixels, labels = self.shard.images.images[self.shard.index], self.shard.labels
        for _ in range(epochs):
            address = Address(0, Purpose.ORDER, self.round, self.client, self.epoch)
            self.epoch += 1
            for part in torch.split(torch.from_numpy(address.generator().permutation(len(labels))), 4):
                yield pixels[part], labels[part]

    def train(
        self,
        weights: Tensors,
        names: list[str],
        epochs: int,
        change: Change = lambda gradient, weights, batch: gradient,
    ) -> dict[str, Tensor]:
        """Descend along what ``change`` makes of each gradient."""
        now = {name: tensor.clone() for name, tensor in weights.items()}
        for batch in self.batches(epochs):
            step = change(self.gradient(now, batch, names), now, batch)
            sizes = [now[name].numel() for name in names]
            for name, part in zip(names, torch.split(step, sizes), strict=True):
                now[name] = now[name] - 0.1 * part.reshape(now[name].shape)
        return now


def integrated(gradient: Tensor, rows: list[Tensor], margin: float | list[float] = 0.0) -> Tensor:
    """Solve GEM's dual with quadprog, as its paper has it: min ½ vᵀGGᵀv + gᵀGᵀv subject to v ≥ margin."""
    g, stacked = gradient.double().numpy(), torch.stack(rows).double().numpy()
    if (stacked @ g >= 0).all():
        return gradient
    gram = stacked @ stacked.T
    v = quadprog.solve_qp(gram, -(stacked @ g), np.eye(len(rows)), np.broadcast_to(margin, len(rows)).astype(float))[0]
    return torch.from_numpy(g + stacked.T @ v).float()


def farthest(gradient: Tensor, rows: list[Tensor], k: int) -> list[Tensor]:
    """Return the k rows of largest Wasserstein distance."""
    distances = [wasserstein_distance(gradient.numpy(), row.numpy()) for row in rows]
    return [rows[i] for i in sorted(np.argsort(distances)[-k:])]


def most_obtuse(gradient: Tensor, rows: list[Tensor], k: int) -> list[Tensor]:
    """Return the k rows of smallest cosine."""
    cosines = [float(gradient.double() @ row.double() / row.double().norm()) for row in rows]
    return [rows[i] for i in sorted(np.argsort(cosines)[:k])]


def memory_of(state: State | None, num_tasks: int) -> list[Samples]:
    """Return what a client has stored of its first tasks."""
    assert state is not None
    found = state.tensors
    names = [f"memory.{task_index:04d}" for task_index in range(num_tasks)]
    return [(found[f"{name}.images"], found[f"{name}.labels"].long()) for name in names]


def close(found: Tensors, expected: Tensors) -> None:
    """Hold weights against each other, to single precision after some steps."""
    assert set(found) >= set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=2e-5), name
