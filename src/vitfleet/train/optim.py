"""Optimisers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from vitfleet.config.schema import TrainConfig


def learning_rate(config: TrainConfig, round: int, rounds: int) -> float:
    """Return the learning rate of a round (counted from 1).

    A client sees few steps a round, so the schedule runs over the rounds of the whole run: linear up over
    ``warmup_rounds``, then half a cosine towards (never reaching) zero. It is constant within a round.
    """
    if round <= config.warmup_rounds:
        return config.lr * round / (config.warmup_rounds + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (round - 1 - config.warmup_rounds) / max(1, rounds - config.warmup_rounds)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(config: TrainConfig, weights: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return a fresh optimiser over these weights: a client keeps none of its state between rounds."""
    tensors = list(weights)
    if config.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True)
    return torch.optim.AdamW(tensors, lr=lr, weight_decay=config.weight_decay, fused=True)
