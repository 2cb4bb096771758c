"""Server optimisers against torch's and against closed forms; which tensors they apply to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vitfleet.config.base import ServerOptimizerParams
from vitfleet.config.registry import SERVER_OPTIMIZERS
from vitfleet.message import State
from vitfleet.methods.aggregation.server_optimizers import (
    AdagradParams,
    AdamParams,
    MomentumParams,
    SgdParams,
    YogiParams,
    apply_server_optimizer,
    moment_bytes,
)

ROUNDS = 6
TAU = 0.02


def aggregates() -> list[Tensor]:
    """Return what clients propose in each round, in float64."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(7, 3, generator=random, dtype=torch.float64) for _ in range(ROUNDS)]


def weights_by_round(params: ServerOptimizerParams) -> list[Tensor]:
    """Return the weights after each round; they begin as zeros."""
    state, moments = State({"w": torch.zeros(7, 3, dtype=torch.float64)}), State()
    found = []
    for aggregate in aggregates():
        aggregated = State({"w": aggregate}, state.numbers)
        state, moments = apply_server_optimizer(params, state, aggregated, moments, {"w"})
        found.append(state.tensors["w"])
    return found


def changes(weights: list[Tensor]) -> list[Tensor]:
    """Return Δ of each round, given the weights after each."""
    before = [torch.zeros_like(weights[0]), *weights[:-1]]
    return [aggregate - weight for aggregate, weight in zip(aggregates(), before, strict=True)]


@pytest.mark.parametrize(
    ("params", "optimizer"),
    [
        (SgdParams(lr=0.3), lambda weights: torch.optim.SGD(weights, lr=0.3)),
        (MomentumParams(lr=0.7, momentum=0.6), lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.6)),
        (
            AdagradParams(lr=0.2, tau=TAU),
            lambda weights: torch.optim.Adagrad(weights, lr=0.2, eps=TAU, initial_accumulator_value=TAU**2),
        ),
    ],
)
def test_optimizer_equals_that_of_torch(
    params: ServerOptimizerParams, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    expected = torch.zeros(7, 3, dtype=torch.float64, requires_grad=True)
    of_torch = optimizer([expected])
    for aggregate, actual in zip(aggregates(), weights_by_round(params), strict=True):
        expected.grad = expected.detach() - aggregate
        of_torch.step()
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-12)


def test_adam_equals_its_sums_without_bias_correction() -> None:
    """m_t = (1 − β₁) Σ β₁^(t−i) Δ_i and v_t = β₂^t τ² + (1 − β₂) Σ β₂^(t−i) Δ_i²."""
    weights = weights_by_round(AdamParams(lr=0.1, tau=TAU, beta1=0.8, beta2=0.95))
    deltas = changes(weights)
    weight = torch.zeros_like(weights[0])
    for t, actual in enumerate(weights, start=1):
        past = list(enumerate(deltas[:t], start=1))
        mean = sum((0.2 * 0.8 ** (t - i) * delta for i, delta in past), torch.zeros(()))
        square = sum((0.05 * 0.95 ** (t - i) * delta**2 for i, delta in past), torch.tensor(0.95**t * TAU**2))
        weight = weight + 0.1 * mean / (square**0.5 + TAU)
        torch.testing.assert_close(actual, weight, rtol=1e-6, atol=1e-9)


def test_yogi_raises_and_lowers_its_squares_by_the_change_alone() -> None:
    """With β₁ = 0: a Δ² above v raises v by (1 − β₂)Δ², one below it lowers v by as much; FedAdam would decay v."""
    params = YogiParams(lr=1.0, tau=1.0, beta1=0.0, beta2=0.75)
    weight, moments = torch.zeros(1), State()
    for change, square in ((2.0, 1.0 + 0.25 * 4.0), (1.0, 2.0 - 0.25 * 1.0), (0.0, 1.75)):
        before = State({"w": weight})
        after, moments = apply_server_optimizer(params, before, State({"w": weight + change}), moments, {"w"})
        assert float(moments.tensors["w/square"]) == pytest.approx(square)
        expected = float(weight) + change / (square**0.5 + 1.0)
        weight = after.tensors["w"]
        assert float(weight) == pytest.approx(expected)


def test_sgd_of_rate_1_takes_the_aggregate_itself() -> None:
    before, aggregated = State({"w": torch.rand(5)}), State({"w": torch.rand(5)})
    after, moments = apply_server_optimizer(SgdParams(), before, aggregated, State(), {"w"})
    assert after is aggregated
    assert not moments.tensors


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS.names())
def test_only_parameters_that_clients_sent_are_optimized(name: str) -> None:
    params = SERVER_OPTIMIZERS.make_params(name, lr=0.5)
    before = State({name: torch.rand(4) for name in ("sent", "unsent", "running_mean", "importance")})
    fresh = {name: torch.rand(4) for name in ("sent", "running_mean", "importance")}
    aggregated = State({**before.tensors, **fresh}, {"updated": [3]}, {"part": State()})
    known = State({"unsent/mean": torch.rand(4)})
    after, moments = apply_server_optimizer(params, before, aggregated, known, {"sent", "unsent"})
    assert not torch.equal(after.tensors["sent"], fresh["sent"])
    assert after.tensors["unsent"] is before.tensors["unsent"]
    assert all(after.tensors[name] is fresh[name] for name in ("running_mean", "importance"))
    assert moments.tensors["unsent/mean"] is known.tensors["unsent/mean"]
    assert {key.split("/")[0] for key in moments.tensors} <= {"sent", "unsent"}
    assert (after.numbers, after.parts) == (aggregated.numbers, aggregated.parts)


def test_a_name_that_begins_like_another_has_moments_of_its_own() -> None:
    params, names = MomentumParams(momentum=0.5), {"w", "w.bias"}
    state, moments = State({name: torch.zeros(2) for name in names}), State()
    for _ in range(3):
        changed = {name: weight + (1.0 if name == "w" else 2.0) for name, weight in state.tensors.items()}
        state, moments = apply_server_optimizer(params, state, State(changed), moments, names)
    assert torch.equal(moments.tensors["w/velocity"], torch.full((2,), 1.75))
    assert torch.equal(moments.tensors["w.bias/velocity"], torch.full((2,), 3.5))


@pytest.mark.parametrize("params", [SgdParams(), SgdParams(lr=2.0), MomentumParams(), AdamParams(), AdagradParams()])
def test_moment_bytes_are_those_of_a_step(params: Any) -> None:
    before, aggregated = State({"w": torch.zeros(300)}), State({"w": torch.ones(300)})
    _, moments = apply_server_optimizer(params, before, aggregated, State(), {"w"})
    assert moment_bytes(params, 300) == sum(tensor.nbytes for tensor in moments.tensors.values())
