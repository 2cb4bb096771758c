"""The learning rate of every round is the closed form's; optimisers get what the configuration says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitfleet.config.schema import TrainConfig
from vitfleet.train.optim import learning_rate, make_optimizer


def test_warm_up_then_half_a_cosine() -> None:
    config = TrainConfig(lr=0.8, schedule="cosine", warmup_rounds=3)
    warming = [0.8 * 1 / 4, 0.8 * 2 / 4, 0.8 * 3 / 4]
    cooling = [0.4 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    rates = [learning_rate(config, round, 10) for round in range(1, 11)]
    assert rates == pytest.approx(warming + cooling, rel=1e-12)


def test_the_peak_is_the_first_round_after_the_warm_up() -> None:
    config = TrainConfig(lr=0.3, warmup_rounds=4)
    rates = {round: learning_rate(config, round, 20) for round in range(1, 21)}
    assert rates[5] == 0.3
    assert max(rates, key=lambda round: rates[round]) == 5


def test_halfway_down_the_cosine_the_rate_is_half() -> None:
    assert learning_rate(TrainConfig(lr=2e-3), 6, 10) == pytest.approx(1e-3, rel=1e-12)


def test_constant_is_constant_after_its_warm_up() -> None:
    config = TrainConfig(lr=0.5, schedule="constant", warmup_rounds=1)
    assert [learning_rate(config, round, 4) for round in (1, 2, 3, 4)] == [0.25, 0.5, 0.5, 0.5]


@given(
    lr=st.floats(1e-6, 10),
    rounds=st.integers(1, 300),
    warmup=st.integers(0, 400),
    schedule=st.sampled_from(["cosine", "constant"]),
)
def test_every_rate_is_above_zero_and_at_most_lr_and_there_is_one_hill(
    lr: float, rounds: int, warmup: int, schedule: str
) -> None:
    config = TrainConfig.model_validate({"lr": lr, "warmup_rounds": warmup, "schedule": schedule})
    rates = [learning_rate(config, round, rounds) for round in range(1, rounds + 1)]
    assert all(0 < rate <= lr for rate in rates)
    top = min(warmup, rounds - 1)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_sgd_gets_its_numbers() -> None:
    weight = torch.zeros(3, requires_grad=True)
    config = TrainConfig(optimizer="sgd", momentum=0.7, weight_decay=0.02, lr=9)
    optimizer = make_optimizer(config, [weight], 0.1)
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.7, 0.02)
    assert group["params"] == [weight]


def test_adamw_gets_its_numbers_and_starts_empty() -> None:
    weight = torch.zeros(3, requires_grad=True)
    config = TrainConfig(optimizer="adamw", weight_decay=0.02, lr=9)
    optimizer = make_optimizer(config, iter([weight]), 0.1)
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.02)
    assert not optimizer.state
