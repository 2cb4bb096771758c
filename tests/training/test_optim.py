"""The learning rate follows its closed form; the optimiser takes the steps of torch's own optimisers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitfleet.config.schema import TrainConfig
from vitfleet.training.optimizers.optimizer import Optimizer, learning_rate


def test_learning_rate_rises_linearly_then_follows_half_a_cosine() -> None:
    config = TrainConfig(lr=0.8, schedule="cosine", warmup_rounds=3)
    rising = [0.8 * 1 / 4, 0.8 * 2 / 4, 0.8 * 3 / 4]
    falling = [0.4 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    rates = [learning_rate(config, round, 10) for round in range(1, 11)]
    assert rates == pytest.approx(rising + falling, rel=1e-12)


def test_learning_rate_peaks_in_the_first_round_after_the_warmup() -> None:
    config = TrainConfig(lr=0.3, warmup_rounds=4)
    rates = {round: learning_rate(config, round, 20) for round in range(1, 21)}
    assert rates[5] == 0.3
    assert max(rates, key=lambda round: rates[round]) == 5


def test_learning_rate_is_half_at_the_middle_of_the_cosine() -> None:
    assert learning_rate(TrainConfig(lr=2e-3), 6, 10) == pytest.approx(1e-3, rel=1e-12)


def test_constant_learning_rate_is_constant_after_the_warmup() -> None:
    config = TrainConfig(lr=0.5, schedule="constant", warmup_rounds=1)
    assert [learning_rate(config, round, 4) for round in (1, 2, 3, 4)] == [0.25, 0.5, 0.5, 0.5]


@given(
    lr=st.floats(1e-6, 10),
    rounds=st.integers(1, 300),
    warmup=st.integers(0, 400),
    schedule=st.sampled_from(["cosine", "constant"]),
)
def test_learning_rate_is_positive_at_most_lr_and_has_one_peak(
    lr: float, rounds: int, warmup: int, schedule: str
) -> None:
    config = TrainConfig.model_validate({"lr": lr, "warmup_rounds": warmup, "schedule": schedule})
    rates = [learning_rate(config, round, rounds) for round in range(1, rounds + 1)]
    assert all(0 < rate <= lr for rate in rates)
    peak = min(warmup, rounds - 1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


WEIGHTS = {"a": (4, 3), "b": (5,)}
OPTIMIZERS = {
    "sgd": TrainConfig(optimizer="sgd", momentum=0.7, weight_decay=0.02),
    "sgd without momentum": TrainConfig(optimizer="sgd", momentum=0.0, weight_decay=0.02),
    "adamw": TrainConfig(optimizer="adamw", weight_decay=0.02),
}


def torch_optimizer(config: TrainConfig, weights: list[Tensor], rate: float) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(weights, rate, momentum=config.momentum, weight_decay=config.weight_decay, fused=True)
    return torch.optim.AdamW(weights, rate, weight_decay=config.weight_decay, fused=True)


def random_like(shapes: Mapping[str, tuple[int, ...]], seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*lead, *shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_of_one_client_steps_as_torch_does(config: TrainConfig) -> None:
    ours = random_like(WEIGHTS, 0)
    theirs = [weight.clone() for weight in ours.values()]
    reference, optimizer = torch_optimizer(config, theirs, 0.1), Optimizer(config, ours, None)
    for training in range(2):  # the second starts from reset state
        reference = torch_optimizer(config, theirs, 0.1)
        optimizer.restart(0.1)
        for step in range(4):
            gradients = random_like(WEIGHTS, 10 * training + step + 1)
            for weight, gradient in zip(theirs, gradients.values(), strict=True):
                weight.grad = gradient
            reference.step()
            optimizer.step(gradients, None)
            for mine, expected in zip(ours.values(), theirs, strict=True):
                assert torch.equal(mine, expected)


@pytest.mark.parametrize("fewer", [True, False], ids=["first clients", "active flags"])
@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_of_stacked_clients_steps_each_active_client_as_if_alone(config: TrainConfig, fewer: bool) -> None:
    active_clients = [[True, True, True], [True, True, False], [True, False, False], [True, True, True]]
    together = random_like(WEIGHTS, 0, 3)
    alone = [{name: tensor[client].clone() for name, tensor in together.items()} for client in range(3)]
    optimizer = Optimizer(config, together, 3)
    optimizer.restart(0.1)
    singles = [Optimizer(config, weights, None) for weights in alone]
    for single in singles:
        single.restart(0.1)
    for step, active in enumerate(active_clients):
        gradients = random_like(WEIGHTS, step + 1, 3)
        if fewer:
            count = sum(active)
            optimizer.first(count).step({name: gradient[:count] for name, gradient in gradients.items()}, None)
        else:
            optimizer.step(gradients, torch.tensor([float(flag) for flag in active]))
        for client, single in enumerate(singles):
            if active[client]:
                single.step({name: gradient[client] for name, gradient in gradients.items()}, None)
    for client, weights in enumerate(alone):
        for name, weight in weights.items():
            assert torch.equal(together[name][client], weight), (client, name)
