"""The memory of a training step, against sums by hand; benchmarks/memory.py holds it to what a machine measures."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from vitfleet.config.schema import Config, ModelConfig
from vitfleet.methods import Setting, adapt, make_method
from vitfleet.models.zoo import build
from vitfleet.run.costs import Costing
from vitfleet.run.memory import Ledger, Memory, training_memory

FLOAT = 4


def memory_of(
    batch: int = 8, mask_ratio: float = 0.0, optimizer: str = "adamw", bf16: bool = False, **table: object
) -> Memory:
    train = {"batch_size": batch, "mask_ratio": mask_ratio, "optimizer": optimizer}
    config = Config.model_validate({"method": table, "train": train})
    model = ModelConfig(dim=64, depth=4, heads=4, patch_size=4)
    net = build(model, 10, 3, 32, 0, partial(adapt, config.method))
    setting = Setting.of(net, config.train, 10, 0, 10, torch.device("cpu"))
    costing = Costing(make_method(config.method, setting), net, config.train)
    (fit,) = costing.rehearse(1, 0, np.arange(20) % 10).fits
    return training_memory(net, fit, config.train, bf16)


def test_the_ledger_knows_what_lives_and_what_was_most() -> None:
    ledger = Ledger()
    given = torch.zeros(1000)
    ledger.ignore({"given": given})
    with ledger:
        first = given + 1
        view = first[:10]
        second = first * 2
        del first
        assert ledger.live == 2 * 1000 * FLOAT  # the view keeps the whole
        del view
        assert ledger.live == 1000 * FLOAT
        third = given.view(10, 100)  # of what is counted elsewhere
        assert ledger.live == 1000 * FLOAT
        del second, third
    assert (ledger.live, ledger.peak) == (0, 2 * 1000 * FLOAT)


def test_the_ledger_follows_what_the_backward_pass_needs() -> None:
    left, right = torch.zeros(100, 50, requires_grad=True), torch.zeros(50, 200, requires_grad=True)
    ledger = Ledger()
    ledger.ignore({"left": left, "right": right})
    with ledger:
        product = left @ right  # 100 x 200
        squared = product**2  # keeps the product
        loss = squared.sum()
        del squared, product
        assert ledger.live == (100 * 200 + 1) * FLOAT
        gradients = torch.autograd.grad(loss, [left, right])
        del loss
        assert ledger.live == (100 * 50 + 50 * 200) * FLOAT
        del gradients


def test_weights_gradients_and_optimiser_are_counted_by_hand() -> None:
    full = memory_of(name="fed-full")
    model = ModelConfig(dim=64, depth=4, heads=4, patch_size=4)
    anatomy = build(model, 10, 3, 32, 0).anatomy
    whole = FLOAT * anatomy.count(anatomy.whole)
    assert (full.weights, full.gradients, full.optimizer) == (2 * whole, whole, 2 * whole)
    assert memory_of(name="fed-full", optimizer="sgd").optimizer == whole
    head = memory_of(name="fed-head")
    trained = FLOAT * anatomy.count(anatomy.head)
    assert (head.weights, head.gradients, head.optimizer) == (whole + trained, trained, 2 * trained)


def test_activations_grow_with_the_batch_and_shrink_with_the_mask() -> None:
    small, large = (memory_of(batch, name="fed-full").activations for batch in (8, 32))
    assert 3.5 < large / small < 4.1
    masked = memory_of(32, 0.75, name="fed-full").activations
    assert 0.15 < masked / large < 0.35


def test_a_frozen_layer_saves_less_and_a_head_alone_saves_hardly_anything() -> None:
    full, bias, head = (memory_of(32, name=name).activations for name in ("fed-full", "fed-bias", "fed-head"))
    assert head < 0.3 * bias
    assert bias < 0.8 * full


def test_half_precision_takes_about_half() -> None:
    full, half = (memory_of(32, name="fed-full", bf16=bf16).activations for bf16 in (False, True))
    assert 0.4 < half / full < 0.8


def test_an_anchor_that_is_the_received_model_costs_nothing() -> None:
    assert memory_of(name="fedprox").weights == memory_of(name="fed-full").weights
