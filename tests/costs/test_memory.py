"""Memory of a training step, compared with sums by hand; benchmarks/memory.py compares it with measurements."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config, ModelConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.memory import AllocationTracker, MemoryUsage, TrackedStep, round_memory, training_memory
from vitfleet.methods import MethodContext, adapt_model, make_method
from vitfleet.models.zoo import build_model

FLOAT_BYTES = 4
MODEL = ModelConfig(dim=64, depth=4, heads=4, patch_size=4)


def memories_of(
    batch: int = 8,
    mask_ratio: float = 0.0,
    optimizer: str = "adamw",
    bf16: bool = False,
    stored: list[int] | None = None,
    epochs: int = 2,
    **table: object,
) -> list[MemoryUsage]:
    """Return the memory of each training of a first round, or of a round with stored samples of earlier tasks."""
    train = {"batch_size": batch, "mask_ratio": mask_ratio, "optimizer": optimizer, "epochs": epochs}
    tree: dict[str, object] = {"method": table, "train": train}
    if METHODS[str(table["name"])].target.needs_tasks:
        tree["data"] = {"tasks": {"count": 5, "classes": 2, "per_client": [2, 2]}}
    config = Config.model_validate(tree)
    net = build_model(MODEL, 10, 3, 32, 0, partial(adapt_model, config.method))
    context = MethodContext(config, net, 10, torch.device("cpu"))
    cost_model = CostModel(make_method(config.method, context), net, config.train)
    task_index, client_metrics = (0, None) if stored is None else (len(stored), {"stored": stored})
    dry_run = cost_model.dry_run(1, 0, np.arange(20) % 10, task_index, client_metrics)
    held, known = dry_run.held_tensors, list[TrackedStep]()
    usages = [training_memory(net, each, config.train, bf16, held, 1, known) for each in dry_run.trainings]
    assert round_memory(net, dry_run, config.train, bf16, 1, known) == max(usages, key=lambda usage: usage.total)
    return usages


def memory_of(**keys: Any) -> MemoryUsage:
    """Return the memory of the largest of these trainings."""
    return max(memories_of(**keys), key=lambda usage: usage.total)


def test_allocation_tracker_counts_live_and_peak_bytes() -> None:
    tracker = AllocationTracker()
    ignored = torch.zeros(1000)
    tracker.ignore([ignored])
    with tracker:
        first = ignored + 1
        view = first[:10]
        second = first * 2
        del first
        assert tracker.live == 2 * 1000 * FLOAT_BYTES  # the view keeps the whole storage alive
        del view
        assert tracker.live == 1000 * FLOAT_BYTES
        third = ignored.view(10, 100)  # a view of an ignored tensor
        assert tracker.live == 1000 * FLOAT_BYTES
        del second, third
    assert (tracker.live, tracker.peak) == (0, 2 * 1000 * FLOAT_BYTES)


def test_allocation_tracker_counts_activations_saved_for_backward() -> None:
    left, right = torch.zeros(100, 50, requires_grad=True), torch.zeros(50, 200, requires_grad=True)
    tracker = AllocationTracker()
    tracker.ignore([left, right])
    with tracker:
        product = left @ right  # 100 x 200
        squared = product**2  # saves the product for the backward pass
        loss = squared.sum()
        del squared, product
        assert tracker.live == (100 * 200 + 1) * FLOAT_BYTES
        gradients = torch.autograd.grad(loss, [left, right])
        del loss
        assert tracker.live == (100 * 50 + 50 * 200) * FLOAT_BYTES
        del gradients


def test_weights_gradients_and_optimiser_match_sums_by_hand() -> None:
    full = memory_of(name="fed-full")
    parts = build_model(MODEL, 10, 3, 32, 0).parts
    whole = FLOAT_BYTES * parts.count_parameters(parts.whole)
    step_counter_bytes = 64  # upper bound
    assert (full.weights, full.gradients) == (2 * whole, whole)
    assert 0 <= full.optimizer - 2 * whole < step_counter_bytes
    assert 0 <= memory_of(name="fed-full", optimizer="sgd").optimizer - whole < step_counter_bytes
    head = memory_of(name="fed-head")
    trained = FLOAT_BYTES * parts.count_parameters(parts.head)
    assert (head.weights, head.gradients) == (whole + trained, trained)
    assert 0 <= head.optimizer - 2 * trained < step_counter_bytes


def test_activations_grow_with_the_batch_and_shrink_with_the_mask() -> None:
    small, large = (memory_of(batch=batch, name="fed-full").activations for batch in (8, 32))
    assert 3.5 < large / small < 4.5  # not exactly 4: gradients not yet allocated at the peak are subtracted from both
    masked = memory_of(batch=32, mask_ratio=0.75, name="fed-full").activations
    assert 0.15 < masked / large < 0.35


def test_frozen_layers_save_fewer_activations_and_head_tuning_the_fewest() -> None:
    full, bias, head = (memory_of(batch=32, name=name).activations for name in ("fed-full", "fed-bias", "fed-head"))
    assert head < 0.3 * bias
    assert bias < 0.8 * full


def test_bf16_takes_about_half_of_the_activation_memory() -> None:
    full, half = (memory_of(batch=32, name="fed-full", bf16=bf16).activations for bf16 in (False, True))
    assert 0.4 < half / full < 0.8


def test_fedprox_anchor_shares_the_memory_of_the_received_model() -> None:
    assert memory_of(name="fedprox").weights == memory_of(name="fed-full").weights


def test_a_second_model_has_weights_gradients_and_moments_of_its_own() -> None:
    parts = build_model(MODEL, 10, 3, 32, 0).parts
    whole = FLOAT_BYTES * parts.count_parameters(parts.whole)
    apfl = memory_of(name="apfl")
    assert apfl.gradients == 2 * whole
    assert 3 * whole <= apfl.weights < 3 * whole + 64  # received, and two that train
    assert 0 <= apfl.optimizer - 4 * whole < 128


def test_memory_grows_by_one_reference_gradient_per_stored_task() -> None:
    """Each stored task adds a gradient in float32 and, for its products with the others, two copies in float64."""
    parts = build_model(MODEL, 10, 3, 32, 0).parts
    whole = FLOAT_BYTES * parts.count_parameters(parts.whole)
    two_tasks, four_tasks = (memory_of(name="gem", stored=[8] * tasks).total for tasks in (2, 4))
    assert 2 * 2 * whole < four_tasks - two_tasks < 2 * 6 * whole
    agem_one_task, agem_two_tasks = (memory_of(name="a-gem", stored=[8 // tasks] * tasks).total for tasks in (1, 2))
    assert abs(agem_two_tasks - agem_one_task) < whole / 10  # A-GEM has one reference gradient for any number of tasks


def test_replayed_samples_double_the_activations() -> None:
    first, later = (memory_of(batch=32, name="er", stored=stored) for stored in (None, [8, 8]))
    assert 1.8 < later.activations / first.activations < 2.2
    image_and_label = 3 * 32 * 32 + 2
    parts = build_model(MODEL, 10, 3, 32, 0).parts
    kept = FLOAT_BYTES * parts.count_parameters(parts.whole)
    # The kept model and samples, and the buffer of the training: images and labels of 64 samples, and the 16 stored.
    buffer = (64 + 16) * (3 * 32 * 32 + 8)
    assert later.weights - first.weights == kept + 16 * image_and_label + buffer
    with_logits = memory_of(batch=32, name="der++", stored=[8, 8])
    assert with_logits.activations > 1.3 * later.activations, "two terms, each with samples of its own"


def test_fedvit_holds_the_model_from_before_the_aggregation() -> None:
    parts = build_model(MODEL, 10, 3, 32, 0).parts
    whole, body = (FLOAT_BYTES * parts.count_parameters(part) for part in (parts.whole, parts.body))
    *_, first_time = memories_of(name="fedvit")
    tuning, _, returning = memories_of(name="fedvit", stored=[])
    counters = 64  # upper bound, in bytes
    # As received, as kept, and what trains: the second gradient is computed at the kept weights, which are not copied.
    assert 0 <= tuning.weights - (2 * whole + body) < counters
    assert returning.weights - first_time.weights == whole + body, "the kept weights, and the tuned ones"
