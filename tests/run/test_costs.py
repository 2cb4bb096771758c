"""The operations of a client's training, against the formulas of a ViT-B/16."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from vitfleet.config.schema import Config, ModelConfig, TrainConfig
from vitfleet.methods import Setting, adapt, make_method
from vitfleet.models.zoo import build
from vitfleet.run.costs import Flops, client_flops

DEPTH, WIDTH, CLASSES = 12, 768, 100


def layer(tokens: int) -> int:
    """Multiply-adds of one layer's forward pass."""
    return 12 * tokens * WIDTH**2 + 2 * tokens**2 * WIDTH


def flops_of(mask_ratio: float = 0.0, **table: object) -> Flops:
    params = Config.model_validate({"method": table}).method
    with torch.device("meta"):
        net = build(ModelConfig(name="vit_base_patch16_224"), CLASSES, 3, 224, 0, partial(adapt, params))
    setting = Setting.of(net, TrainConfig(mask_ratio=mask_ratio), 10, 0, CLASSES, torch.device("cpu"))
    return client_flops(make_method(params, setting), net, mask_ratio)


def test_full_training_is_three_forward_passes() -> None:
    full = flops_of(name="fed-full")
    assert full.forward == pytest.approx(2 * 17.563e9, rel=0.005)
    # All but the first layer's gradient towards the pixels.
    assert full.training == pytest.approx(3 * full.forward, rel=0.01)


def test_head_tuning_is_one_forward_pass() -> None:
    head = flops_of(name="fed-head")
    assert head.training == pytest.approx(head.forward, rel=0.001)


def test_fedbfpt_runs_half_of_the_layers() -> None:
    assert flops_of(name="fedbfpt").forward / 2e9 == pytest.approx(8.84, rel=0.005)


def test_eftvits_ratio_to_full_training() -> None:
    eftvit = flops_of(0.75, name="eftvit", local_layers=2)
    assert eftvit.forward / 2e9 == pytest.approx(4.322, rel=0.005)
    assert flops_of(name="fed-full").training / eftvit.training == pytest.approx(5.63, abs=0.05)
    # Every layer passes the gradient on; only the two local ones have weights to train.
    assert eftvit.training == pytest.approx(2 * (2 * DEPTH + 2) * layer(50), rel=0.03)


def test_a_frozen_layer_costs_less_than_one_that_trains_and_more_than_none() -> None:
    bias, full, head = (flops_of(name=name).training for name in ("fed-bias", "fed-full", "fed-head"))
    assert head < bias < full
    assert bias == pytest.approx(2 * full / 3, rel=0.02)


def test_body_and_head_epochs_are_averaged() -> None:
    """One epoch of head tuning and four of the body, which cost nearly what full training does."""
    config = Config.model_validate({"method": {"name": "fedrep", "head_epochs": 1}, "train": {"epochs": 5}})
    with torch.device("meta"):
        net = build(ModelConfig(name="vit_base_patch16_224"), CLASSES, 3, 224, 0)
    setting = Setting.of(net, config.train, 10, 0, CLASSES, torch.device("cpu"))
    found = client_flops(make_method(config.method, setting), net, 0.0)
    head, full = flops_of(name="fed-head").training, flops_of(name="fed-full").training
    assert found.training == pytest.approx((head + 4 * full) / 5, rel=0.002)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("fed-head", "swin_tiny_patch4_window7_224"),
        ("transfl", "levit_128s"),
        ("fed-lora", "swin_tiny_patch4_window7_224"),
    ],
)
def test_other_families_are_counted_too(name: str, model: str) -> None:
    params = Config.model_validate({"method": {"name": name}}).method
    net = build(ModelConfig(name=model), CLASSES, 3, 224, 0, partial(adapt, params))
    setting = Setting.of(net, TrainConfig(), 10, 0, CLASSES, torch.device("cpu"))
    flops = client_flops(make_method(params, setting), net, 0.0)
    assert 0 < flops.forward <= flops.training
