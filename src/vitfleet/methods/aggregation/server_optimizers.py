"""Server optimisers: the change that a round's clients propose takes the place of a gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (Algorithm 2: FedAdagrad, FedAdam, FedYogi); Hsu et al.,
"Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019 (FedAvgM). The
change of a tensor is Δ = aggregate − w, with the server's weights w before the round, whatever rule made the aggregate.

An optimiser takes its parameters, w, Δ and the moments that it returned in the last round in which clients sent the
tensor (in the first one there are none). It returns the new weights and moments as new tensors. It is applied to each
tensor separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import ServerOptimizerParams
from vitfleet.config.registry import SERVER_OPTIMIZERS, register_server_optimizer
from vitfleet.message import State, Tensors, add_prefix, with_prefix

ServerOptimizer: TypeAlias = Callable[[Any, Tensor, Tensor, Tensors], tuple[Tensor, Tensors]]


class SgdParams(ServerOptimizerParams):
    """A step of rate η along the change: w + ηΔ. With η = 1 the server takes the aggregate, as FedAvg does."""

    @property
    def takes_aggregate(self) -> bool:
        """Whether the server's new weights are the aggregate itself: w + (aggregate − w) would be rounded."""
        return self.lr == 1


class MomentumParams(ServerOptimizerParams):
    """SGD with momentum: v ← βv + Δ, w + ηv (FedAvgM, Hsu et al., 2019)."""

    momentum: float = Field(0.9, ge=0, lt=1, description="momentum β of the server")


class AdagradParams(ServerOptimizerParams):
    """v ← v + Δ², w + ηΔ / (√v + τ) (FedAdagrad, Reddi et al., 2021)."""

    lr: float = Field(0.01, gt=0, description="learning rate of the server")
    tau: float = Field(1e-3, gt=0, description="τ: the larger, the less adaptive; v begins as τ²")


class AdamParams(AdagradParams):
    """m ← β₁m + (1 − β₁)Δ, v ← β₂v + (1 − β₂)Δ², w + ηm / (√v + τ) (FedAdam, Reddi et al., 2021)."""

    beta1: float = Field(0.9, ge=0, lt=1, description="decay β₁ of the mean of the changes")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay β₂ of the mean of their squares")


class YogiParams(AdamParams):
    """FedAdam with v ← v − (1 − β₂)Δ² sign(v − Δ²) (FedYogi, Reddi et al., 2021)."""


@register_server_optimizer("sgd", SgdParams)
def sgd(params: SgdParams, weight: Tensor, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
    """Take a step along the change."""
    return weight + params.lr * change, {}


@register_server_optimizer("momentum", MomentumParams)
def momentum(params: MomentumParams, weight: Tensor, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
    """Take a step along the decaying sum of the changes."""
    velocity = params.momentum * moments.get("velocity", 0.0) + change
    return weight + params.lr * velocity, {"velocity": velocity}


@register_server_optimizer("adam", AdamParams)
def adam(params: AdamParams, weight: Tensor, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
    """Take a step of FedAdam. As in the paper, moments are not corrected for where they began."""
    square = params.beta2 * moments.get("square", params.tau**2) + (1 - params.beta2) * change.square()
    return _adaptive_step(params, weight, change, moments, square)


@register_server_optimizer("yogi", YogiParams)
def yogi(params: YogiParams, weight: Tensor, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
    """Take a step of FedYogi: v moves by (1 − β₂)Δ², however large it is itself."""
    known = moments.get("square", torch.full_like(change, params.tau**2))
    square = known - (1 - params.beta2) * change.square() * torch.sign(known - change.square())
    return _adaptive_step(params, weight, change, moments, square)


def _adaptive_step(
    params: AdamParams, weight: Tensor, change: Tensor, moments: Tensors, square: Tensor
) -> tuple[Tensor, Tensors]:
    """Return the weights after a step along the mean change, divided by √v + τ, and the moments."""
    mean = params.beta1 * moments.get("mean", 0.0) + (1 - params.beta1) * change
    return weight + params.lr * mean / (square.sqrt() + params.tau), {"mean": mean, "square": square}


@register_server_optimizer("adagrad", AdagradParams)
def adagrad(params: AdagradParams, weight: Tensor, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
    """Take a step along the change, divided by the root of the sum of all squares so far."""
    square = moments.get("square", params.tau**2) + change.square()
    return weight + params.lr * change / (square.sqrt() + params.tau), {"square": square}


def apply_server_optimizer(
    params: ServerOptimizerParams, before: State, aggregated: State, moments: State, parameters: Collection[str]
) -> tuple[State, State]:
    """Return the server's state after a round, and the optimiser's moments; before the first round these are empty.

    A tensor that no client sent is, in the aggregated state, the same object as before: it keeps its value and its
    moments. What is not one of the model's parameters (running statistics, what a method averages besides weights)
    stays as aggregated.
    """
    if params.takes_aggregate:
        return aggregated, moments
    optimizer: ServerOptimizer = SERVER_OPTIMIZERS.entry_of(params).target
    weights, moved = dict(aggregated.tensors), dict[str, Tensor]()
    for name, aggregate in aggregated.tensors.items():
        weight = before.tensors.get(name)
        if name not in parameters or weight is None or aggregate is weight:
            continue
        prefix = f"{name}/"
        weights[name], its_moments = optimizer(params, weight, aggregate - weight, with_prefix(moments.tensors, prefix))
        moved |= add_prefix(prefix, its_moments)
    return replace(aggregated, tensors=weights), State({**moments.tensors, **moved}) if moved else moments


def moment_bytes(params: ServerOptimizerParams, parameters: int) -> int:
    """Return the memory of the moments of so many parameters, as a step of a few of them has it."""
    if params.takes_aggregate:
        return 0
    optimizer: ServerOptimizer = SERVER_OPTIMIZERS.entry_of(params).target
    few = torch.zeros(1000)
    _, moments = optimizer(params, few, few, {})
    return sum(tensor.nbytes for tensor in moments.values()) * parameters // len(few)
