"""The memory of a training step, against sums by hand; benchmarks/memory.py holds it to what a machine measures."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from vitfleet.config.schema import Config, ModelConfig
from vitfleet.costs.flops import CostModel
from vitfleet.costs.memory import AllocationTracker, MemoryUsage, round_memory
from vitfleet.methods import MethodContext, adapt_model, make_method
from vitfleet.models.zoo import build_model

FLOAT = 4


MODEL = ModelConfig(dim=64, depth=4, heads=4, patch_size=4)


def memory_of(
    batch: int = 8,
    mask_ratio: float = 0.0,
    optimizer: str = "adamw",
    bf16: bool = False,
    stored: list[int] | None = None,
    epochs: int = 2,
    **table: object,
) -> MemoryUsage:
    """Return the memory of a first round, or of one with samples stored of earlier tasks."""
    train = {"batch_size": batch, "mask_ratio": mask_ratio, "optimizer": optimizer, "epochs": epochs}
    tree: dict[str, object] = {"method": table, "train": train}
    if table["name"] in {"gem", "a-gem", "fedvit"}:
        tree["data"] = {"tasks": {"count": 5, "classes": 2, "per_client": [2, 2]}}
    config = Config.model_validate(tree)
    net = build_model(MODEL, 10, 3, 32, 0, partial(adapt_model, config.method))
    context = MethodContext.from_net(net, config.train, 10, 0, 10, torch.device("cpu"), config.num_tasks)
    cost_model = CostModel(make_method(config.method, context), net, config.train)
    task_index, client_metrics = (0, None) if stored is None else (len(stored), {"stored": stored})
    return round_memory(
        net, cost_model.dry_run(1, 0, np.arange(20) % 10, task_index, client_metrics), config.train, bf16
    )


def test_the_ledger_knows_what_lives_and_what_was_most() -> None:
    ledger = AllocationTracker()
    given = torch.zeros(1000)
    ledger.ignore([given])
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
    left, correct = torch.zeros(100, 50, requires_grad=True), torch.zeros(50, 200, requires_grad=True)
    ledger = AllocationTracker()
    ledger.ignore([left, correct])
    with ledger:
        product = left @ correct  # 100 x 200
        squared = product**2  # keeps the product
        loss = squared.sum()
        del squared, product
        assert ledger.live == (100 * 200 + 1) * FLOAT
        gradients = torch.autograd.grad(loss, [left, correct])
        del loss
        assert ledger.live == (100 * 50 + 50 * 200) * FLOAT
        del gradients


def test_weights_gradients_and_optimiser_are_counted_by_hand() -> None:
    full = memory_of(name="fed-full")
    anatomy = build_model(MODEL, 10, 3, 32, 0).anatomy
    whole = FLOAT * anatomy.count_parameters(anatomy.whole)
    few = 64  # counters
    assert (full.weights, full.gradients) == (2 * whole, whole)
    assert 0 <= full.optimizer - 2 * whole < few
    assert 0 <= memory_of(name="fed-full", optimizer="sgd").optimizer - whole < few
    head = memory_of(name="fed-head")
    trained = FLOAT * anatomy.count_parameters(anatomy.head)
    assert (head.weights, head.gradients) == (whole + trained, trained)
    assert 0 <= head.optimizer - 2 * trained < few


def test_activations_grow_with_the_batch_and_shrink_with_the_mask() -> None:
    small, large = (memory_of(batch, name="fed-full").activations for batch in (8, 32))
    assert 3.5 < large / small < 4.5  # gradients that are not there yet at the worst moment are taken off both
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


def test_every_reference_gradient_has_a_place() -> None:
    """A stored task more is a gradient more, in float32 and, for its products with the others, twice in float64."""
    anatomy = build_model(MODEL, 10, 3, 32, 0).anatomy
    whole = FLOAT * anatomy.count_parameters(anatomy.whole)
    some, more = (memory_of(name="gem", stored=[8] * tasks).total for tasks in (2, 4))
    assert 2 * 2 * whole < more - some < 2 * 6 * whole
    together, still = (memory_of(name="a-gem", stored=[8 // tasks] * tasks).total for tasks in (1, 2))
    assert abs(still - together) < whole / 10  # one reference, however many tasks


def test_the_model_from_before_an_aggregation_is_held_too() -> None:
    anatomy = build_model(MODEL, 10, 3, 32, 0).anatomy
    body = FLOAT * anatomy.count_parameters(anatomy.body)
    newcomer, returning = memory_of(name="fedvit"), memory_of(name="fedvit", stored=[])
    assert returning.weights - newcomer.weights == 2 * body  # as it was kept, and a copy to take gradients at
