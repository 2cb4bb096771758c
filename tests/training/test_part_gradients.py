"""The reference gradients of stacked clients, of their memories and at other weights, are those of each alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fits_alone import assert_close, check_against_single_fits, make_group, random_weights
from torch import Tensor

from conftest import MakeShard, MakeTrainer
from vitfleet.costs.cost_model import stored_passes
from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.client_stack import Cohort
from vitfleet.training.engine import StepEngine
from vitfleet.training.local_training import EpisodicMemory
from vitfleet.training.stack_inputs import ClientFit, RngContext, stack_inputs
from vitfleet.training.step import Fit, FitResult, Objective, ReferenceGradients, Step


@dataclass(frozen=True)
class AddReferences:
    """Adds all present references to the gradient, and counts them."""

    counts: tuple[str, ...] = ("references",)

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        assert references is not None
        rows = references.gradients
        summed = {
            name: gradient + (rows[name] * references.present.view(-1, *(1,) * gradient.dim())).sum(0)
            for name, gradient in gradients.items()
        }
        return summed, {"references": references.present.sum().float()}


@dataclass(frozen=True)
class LongestReferences:
    """Selects the references with the largest norms."""

    k: int
    every: int

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        lengths = torch.stack([rows.square().flatten(1).sum(1) for rows in references.gradients.values()]).sum(0)
        return lengths.topk(self.k).indices.sort().values


@dataclass(frozen=True)
class FixedReferences:
    """Selects the same references in every step."""

    indices: tuple[int, ...]
    every: int

    @property
    def k(self) -> int:
        return len(self.indices)

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        return torch.tensor(self.indices)


def make_memory(images: ImageSet, client: int, parts: int) -> EpisodicMemory:
    """Return a memory whose parts have at most 18, 12, 6 … samples. The last part of some clients is empty."""
    sizes = tuple(max(0, 18 - 6 * part - 2 * (client % 3)) for part in range(parts))
    sizes = (*sizes[:-1], 0) if client % 2 else sizes
    index = (torch.arange(parts * sizes[0]).view(parts, -1) + client) % len(images)
    sample_weight = torch.zeros(index.shape)
    for part, size in enumerate(sizes):
        sample_weight[part, :size] = 1 / max(1, size)
    return EpisodicMemory(images.images[index], images.labels[index], sample_weight, sizes)


@pytest.mark.parametrize("parts_at_once", [1, 2, None])
@pytest.mark.parametrize("selector", [None, LongestReferences(k=2, every=1), LongestReferences(k=2, every=3)], ids=str)
@pytest.mark.parametrize("reference_weights", [False, True])
@pytest.mark.parametrize(("mask_ratio", "restore_every"), [(0.0, 1), (0.5, 1), (0.0, 2)])
def test_cohort_computes_the_reference_gradients_of_each_client(
    selector: LongestReferences | None,
    reference_weights: bool,
    mask_ratio: float,
    restore_every: int,
    parts_at_once: int | None,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = replace(
        make_trainer(batch_size=8, mask_ratio=mask_ratio),
        class_tasks=torch.tensor([0, 0, 1, 1, 1]),
        parts_at_once=parts_at_once,
    )
    weights = random_weights(tiny_net)
    objective = Objective(
        tiny_net.anatomy.whole,
        transform=AddReferences(),
        selector=selector,
        restore_every=restore_every,
        mask_memory=True,
    )
    fits = [
        Fit(
            start,
            objective,
            2,
            memory=make_memory(tiny_images, client, 4),
            reference_weights=weights[-1 - client] if reference_weights else None,
        )
        for client, start in enumerate(weights)
    ]
    for result, fit in zip(check_against_single_fits(trainer, fits, make_shard), fits, strict=True):
        assert isinstance(fit.memory, EpisodicMemory)
        used = 2 if selector else int((fit.memory.sample_weight.sum(1) > 0).sum())
        assert float(result.observed["references"]) == result.steps * (used + reference_weights)


@pytest.mark.parametrize("indices", [(0, 1), (2, 0), (1, 2), (2, 3)], ids=str)
def test_selected_parts_are_computed_whole_until_the_next_selection(
    indices: tuple[int, ...], tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Parts of 18, 12, 6 and fewer samples: a step computes as many samples of the selected ones as there may be."""
    trainer = replace(make_trainer(batch_size=8, optimizer="sgd", lr=0.05), parts_at_once=2)
    preprocess = trainer.preprocess
    double = replace(preprocess, mean=preprocess.mean.double(), std=preprocess.std.double())

    def train(every: int) -> list[FitResult]:
        objective = Objective(
            tiny_net.anatomy.whole, transform=AddReferences(), selector=FixedReferences(indices, every)
        )
        fits = [
            Fit(weights, objective, 1, memory=make_memory(tiny_images, client, 4))
            for client, weights in enumerate(random_weights(tiny_net))
        ]
        return replace(trainer, preprocess=double).fit_cohort(make_group(fits, make_shard))

    kept, selected_anew = train(every=9), train(every=1)
    assert max(result.steps for result in kept) > 2
    for result, reference in zip(kept, selected_anew, strict=True):
        assert_close(result.weights, reference.weights)


def test_images_of_selected_parts_are_counted_as_they_are_computed(
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    forward = StepEngine.forward

    def count_stored(
        self: StepEngine, weights: Tensors, images: Tensor, batch: Batch | None, *args: Any, **keys: Any
    ) -> Any:
        if batch is None:
            computed.append(len(images))
        return forward(self, weights, images, batch, *args, **keys)

    monkeypatch.setattr(StepEngine, "forward", count_stored)
    objective = Objective(tiny_net.anatomy.whole, transform=AddReferences(), selector=FixedReferences((3, 1), every=3))
    fit = Fit(tiny_net.initial_weights(), objective, 1, memory=make_memory(tiny_images, 0, 4))
    result = make_trainer(batch_size=8).fit(fit, make_shard(0, 24), RngContext(0, 1, 0))
    # Widths 24, 16, 8 and 8: all of them in the first step, the first two in the others.
    assert result.steps == 3
    assert sum(computed) == 56 + 40 + 40
    assert stored_passes(fit, result.steps) == sum(computed)


def test_reference_gradient_is_the_gradient_of_its_memory_part(
    tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """One step of SGD along the sum of the gradient and the references, compared with autograd."""
    trainer = make_trainer(optimizer="sgd", momentum=0, weight_decay=0, lr=0.1, schedule="constant")
    weights, memory = tiny_net.initial_weights(), make_memory(tiny_images, 1, 3)
    objective = Objective(tiny_net.anatomy.whole, transform=AddReferences())
    shard = make_shard(0, 12)
    result = trainer.fit(Fit(weights, objective, 1, memory=memory), shard, RngContext(7, 3, 0))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(tiny_net.module.vit, leaves, (images.float() / 255 - 0.5) / 0.5)
        return torch.nn.functional.cross_entropy(logits, labels)

    batch_loss = loss(shard.images.images[shard.index], shard.images.labels[shard.index])
    assert memory.sizes == (16, 10, 0)
    part_losses = [
        loss(memory.images[part][:size], memory.labels[part][:size]) for part, size in enumerate(memory.sizes) if size
    ]
    total = torch.autograd.grad(batch_loss + part_losses[0] + part_losses[1], list(leaves.values()))
    assert_close(result.weights, {n: weights[n] - 0.1 * g for n, g in zip(leaves, total, strict=True)}, 1e-6)


@pytest.mark.parametrize("clients", [1, 3])
def test_gradients_of_parts_together_are_those_of_each_part(
    clients: int, tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Parts that share a client's weights in one backward pass, against autograd part by part."""
    trainer = replace(make_trainer(), parts_at_once=9)
    objective, sizes = Objective(tiny_net.anatomy.body), (8, 7, 5)
    group = []
    for client, weights in enumerate(random_weights(tiny_net, clients)):
        memory = make_memory(tiny_images, client, 3)
        sample_weight = torch.stack([(torch.arange(8) < size) / size for size in sizes])
        memory = EpisodicMemory(memory.images[:, :8], memory.labels[:, :8], sample_weight, sizes)
        weights = {name: tensor.float() for name, tensor in weights.items()}
        group.append(ClientFit(Fit(weights, objective, 1, memory=memory), make_shard(0, 8), RngContext(0, 1, client)))
    cohort = Cohort(trainer.engine, group, stack_inputs(group, tiny_net, 0.0))
    references = cohort.memory_gradients.compute({}, refresh=True, restore=True)
    assert references is not None
    for client, client_fit in enumerate(group):
        fit = client_fit.fit
        assert isinstance(fit.memory, EpisodicMemory)
        leaves = {name: fit.weights[name].clone().requires_grad_() for name in objective.trainable}
        for part, size in enumerate(sizes):
            images = trainer.preprocess(fit.memory.images[part, :size])
            logits = tiny_net({**fit.weights, **leaves}, images)
            loss = torch.nn.functional.cross_entropy(logits, fit.memory.labels[part, :size])
            expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            rows = references.gradients
            mine = {name: rows[name][client, part] if clients > 1 else rows[name][part] for name in leaves}
            # The gradient of a key's bias is all rounding errors.
            assert_close(
                {n: t for n, t in mine.items() if "qkv.bias" not in n},
                {n: t for n, t in expected.items() if "qkv.bias" not in n},
            )
            assert all(torch.allclose(mine[name], expected[name], atol=1e-6) for name in mine)
