"""Clients trained together are trained as each would be alone: the same draws, the same steps, the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import CLASSES, MakeConfig, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.cohort_driver import group_fits
from vitfleet.training.cohort_inputs import ClientFit, RngContext
from vitfleet.training.objective import (
    EpisodicMemory,
    Fit,
    FitResult,
    Objective,
    ReferenceGradients,
    Step,
    cross_entropy,
)
from vitfleet.training.trainer import Trainer

SIZES = ((0, 20), (3, 11), (9, 36), (2, 3))  # unequal numbers of steps, and batches that are not full
ALL = AugmentConfig(crop=0.25, flip=True, brightness=0.4)


def close(left: Tensors, correct: Tensors, tolerance: float = 1e-5) -> None:
    """Hold to a relative distance over all tensors of one name: single numbers near zero may differ by more."""
    assert left.keys() == correct.keys()
    for name in left:
        assert left[name].shape == correct[name].shape, name
        distance = float((left[name].double() - correct[name].double()).norm())
        assert distance <= tolerance * float(correct[name].double().norm()) + 1e-7, (name, distance)


def assign(fits: Sequence[Fit], make_shard: MakeShard) -> list[ClientFit]:
    return [
        ClientFit(fit, make_shard(*size), RngContext(7, 3, client))
        for client, (fit, size) in enumerate(zip(fits, SIZES, strict=True))
    ]


def check(trainer: Trainer, fits: Sequence[Fit], make_shard: MakeShard) -> list[FitResult]:
    """Hold a cohort to its clients alone, and return what came of it.

    In double precision: a key's bias has no gradient but rounding errors, which AdamW makes as large as any other.
    """
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))
    group = assign(fits, make_shard)
    together = trainer.fit_cohort(group)
    for one, fitted in zip(group, together, strict=True):
        alone = trainer.fit(one.fit, one.shard, one.rng)
        close(fitted.weights, alone.weights)
        close(fitted.observed, alone.observed)
        torch.testing.assert_close(fitted.loss, alone.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fitted.sample_losses, alone.sample_losses, rtol=1e-4, atol=1e-5)
        assert (fitted.samples, fitted.steps) == (alone.samples, alone.steps)
        start = one.fit.weights
        assert all(float((fitted.weights[n] - start[n]).abs().max()) > 0 for n in fitted.weights if "head" in n)
    return together


def varied(net: Net, count: int = len(SIZES)) -> list[dict[str, Tensor]]:
    """Return different weights for every client."""
    random = torch.Generator().manual_seed(1)
    return [
        {
            name: (one + 0.05 * torch.randn(one.shape, generator=random)).double()
            for name, one in net.initial_weights().items()
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("train", [{}, {"optimizer": "sgd"}, {"clip": 0.1}, {"mask_ratio": 0.5}], ids=str)
def test_the_whole_model(
    train: dict[str, object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(ALL, batch_size=8, **train)
    objective = Objective(tiny_net.anatomy.whole)
    check(trainer, [Fit(weights, objective, 2, score_samples=True) for weights in varied(tiny_net)], make_shard)


@pytest.mark.parametrize("part", ["head", "bias", "one layer", "lora", "prompts"])
def test_selections_share_what_is_frozen(part: str, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    def adapt(vit: torch.nn.Module) -> None:
        if part == "lora":
            add_lora(vit, 2, 4.0, ("q", "v", "fc1"))
        if part == "prompts":
            add_prompts(vit, 3, deep=True)

    net = build_model(ModelConfig(dim=16, depth=2, heads=2, patch_size=4), CLASSES, 1, 8, 0, adapt)
    anatomy = net.anatomy
    selection = {
        "head": anatomy.head,
        "bias": anatomy.union(anatomy.biases, anatomy.head),
        "one layer": anatomy.union(anatomy.blocks[1], anatomy.head),
        "lora": anatomy.union(anatomy.lora, anatomy.head),
        "prompts": anatomy.union(anatomy.prompts, anatomy.head),
    }[part]
    given, *others = varied(net)
    # All were given the same, but for what each has of its own.
    fits = [Fit({**given, **selection.take(own)}, Objective(selection), 2) for own in (given, *others)]
    check(replace(make_trainer(batch_size=8), net=net), fits, make_shard)


def test_a_model_of_which_blocks_are_left_out(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    anatomy = tiny_net.anatomy
    objective = Objective(anatomy.union(anatomy.blocks[0], anatomy.head), depth=1)
    check(make_trainer(batch_size=8), [Fit(weights, objective, 1) for weights in varied(tiny_net)], make_shard)


@dataclass(frozen=True)
class Anchored:
    """Cross-entropy and a pull towards constants."""

    def __call__(self, step: Step) -> Tensor:
        pull = [(weight - step.constants[name]).square().sum() for name, weight in step.weights.items()]
        return cross_entropy(step) + 0.1 * torch.stack(pull).sum()


@pytest.mark.parametrize("shared", [True, False])
def test_constants_of_their_own_or_of_all(
    shared: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    weights = varied(tiny_net)
    anchors = [weights[0]] * len(weights) if shared else weights[::-1]
    objective = Objective(tiny_net.anatomy.whole, Anchored())
    fits = [Fit(own, objective, 2, anchor) for own, anchor in zip(weights, anchors, strict=True)]
    check(make_trainer(batch_size=8), fits, make_shard)


@dataclass(frozen=True)
class Follow:
    """Steps along the sum of the references that are there, and counts them."""

    counts: tuple[str, ...] = ("followed",)

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        assert references is not None
        rows = references.gradients
        turned = {
            name: gradient + (rows[name] * references.present.view(-1, *(1,) * gradient.dim())).sum(0)
            for name, gradient in gradients.items()
        }
        return turned, {"followed": references.present.sum().float()}


@dataclass(frozen=True)
class Longest:
    """Chooses the references of the largest gradients."""

    k: int
    every: int

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        lengths = torch.stack([rows.square().flatten(1).sum(1) for rows in references.gradients.values()]).sum(0)
        return lengths.topk(self.k).indices.sort().values


def remember(images: ImageSet, client: int, parts: int) -> EpisodicMemory:
    """Return a memory whose parts have 18, 12, 6 … samples, or fewer by client; of some clients the last is empty."""
    sizes = tuple(max(0, 18 - 6 * part - 2 * (client % 3)) for part in range(parts))
    sizes = (*sizes[:-1], 0) if client % 2 else sizes
    index = (torch.arange(parts * sizes[0]).view(parts, -1) + client) % len(images)
    share = torch.zeros(index.shape)
    for part, size in enumerate(sizes):
        share[part, :size] = 1 / max(1, size)
    return EpisodicMemory(images.images[index], images.labels[index], share, sizes)


@pytest.mark.parametrize("at_once", [1, 2, None])
@pytest.mark.parametrize("selector", [None, Longest(k=2, every=1), Longest(k=2, every=3)], ids=str)
@pytest.mark.parametrize("reference_weights", [False, True])
def test_references_of_their_own(
    selector: Longest | None,
    reference_weights: bool,
    at_once: int | None,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = replace(make_trainer(batch_size=8), class_tasks=torch.tensor([0, 0, 1, 1, 1]), parts_at_once=at_once)
    weights = varied(tiny_net)
    objective = Objective(tiny_net.anatomy.whole, transform=Follow(), selector=selector)
    fits = [
        Fit(
            own,
            objective,
            2,
            memory=remember(tiny_images, client, 4),
            reference_weights=weights[-1 - client] if reference_weights else None,
        )
        for client, own in enumerate(weights)
    ]
    for fitted, fit in zip(check(trainer, fits, make_shard), fits, strict=True):
        assert fit.memory is not None
        seen = 2 if selector else int((fit.memory.sample_weight.sum(1) > 0).sum())
        assert float(fitted.observed["followed"]) == fitted.steps * (seen + reference_weights)


def test_a_reference_is_the_gradient_of_its_part(
    tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """One step of plain SGD along own and reference gradients, held to autograd by hand."""
    trainer = make_trainer(optimizer="sgd", momentum=0, weight_decay=0, lr=0.1, schedule="constant")
    weights, memory = tiny_net.initial_weights(), remember(tiny_images, 1, 3)
    objective = Objective(tiny_net.anatomy.whole, transform=Follow())
    shard = make_shard(0, 12)
    fitted = trainer.fit(Fit(weights, objective, 1, memory=memory), shard, RngContext(7, 3, 0))
    leaves = {name: one.clone().requires_grad_() for name, one in weights.items()}

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(tiny_net.module.vit, leaves, (images.float() / 255 - 0.5) / 0.5)
        return torch.nn.functional.cross_entropy(logits, labels)

    own = loss(shard.images.images[shard.index], shard.images.labels[shard.index])
    assert memory.sizes == (16, 10, 0)
    parts = [loss(memory.images[at][:size], memory.labels[at][:size]) for at, size in enumerate(memory.sizes) if size]
    total = torch.autograd.grad(own + parts[0] + parts[1], list(leaves.values()))
    close(fitted.weights, {n: weights[n] - 0.1 * g for n, g in zip(leaves, total, strict=True)}, 1e-6)


METHODS = {
    "fedavg": (),
    "fedprox": ("method.mu=0.5",),
    "standalone": (),
    "transfl": ("method.k=1",),
    "fed-head": (),
    "fed-bias": (),
    "fed-prompt": ("method.prompts=2",),
    "fed-lora": ("method.rank=2",),
    "fedbfpt": ("method.local_layers=2", "model.depth=3"),
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5", "method.values=fp32"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_out_the_same(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    outcomes = []
    for cohort in (1, 4):
        config = tiny_config(
            f"method.name={method}",
            *METHODS[method],
            f"machine.cohort={cohort}",
            "fleet.per_round=6",
            "train.epochs=2",
            "train.optimizer=sgd",
            "train.lr=0.05",
        )
        context = open_run(config, tmp_path / str(cohort))
        state, record = run_round(context, load_state(context), 1)
        assert not [entry.failure for entry in record.clients if entry.failure]
        owns = {
            f"{client}.{name}": tensor
            for client in range(6)
            if (own := context.fleet.client_state(client))
            for name, tensor in own.tensors.items()
        }
        features = {f"{key}.{n}": t for key, part in state.server.parts.items() for n, t in part.tensors.items()}
        outcomes.append({**state.server.tensors, **owns, **features})
    close(outcomes[1], outcomes[0])


def test_who_may_train_together(tiny_net: Net, make_trainer: MakeTrainer, tiny_images: ImageSet) -> None:
    def client(size: int, epochs: int = 1, depth: int | None = None) -> ClientFit:
        objective = Objective(tiny_net.anatomy.head, depth=depth)
        shard = Shard(tiny_images, torch.arange(size))
        return ClientFit(Fit(tiny_net.initial_weights(), objective, epochs), shard, RngContext(0, 1, 0))

    def grouped(*wanted: ClientFit, batch: int = 8, compile: bool = False) -> list[list[int]]:
        trainer = make_trainer(batch_size=batch)
        found = group_fits(list(enumerate(wanted)), replace(trainer, machine=replace(trainer.machine, compile=compile)))
        return sorted(sorted(place for place, _ in group) for group in found)

    assert grouped(client(40), client(30), client(20)) == [[0, 1, 2]]
    some = client(40), client(10), client(30), client(9)
    assert grouped(*some, batch=1) == [[0, 1, 2, 3]]  # who has fewer steps is left out of the last ones
    assert grouped(*some, batch=1, compile=True) == [[0, 2], [1, 3]]  # too much padding together
    assert grouped(*some, batch=8, compile=True) == [[0, 1, 2, 3]]  # a few steps more or less
    assert grouped(client(40), client(10), client(30), batch=64) == [[0, 1, 2]]  # a step each
    assert grouped(client(40), client(40, epochs=2), client(40, depth=1)) == [[0], [1], [2]]
    assert grouped(client(0), client(8), client(0)) == [[0], [1], [2]]  # who has nothing needs no company


def test_what_does_not_fit_into_memory_is_halved(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(batch_size=8, optimizer="sgd")
    fit_all = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 1)
    group = assign([fit_all] * len(SIZES), make_shard)
    fit, tried = Trainer._fit, []

    def cramped(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        tried.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError
        return fit(self, group)

    monkeypatch.setattr(Trainer, "_fit", cramped)
    found = trainer.fit_cohort(group)
    assert tried == [4, 2, 2]
    for one, fitted in zip(group, found, strict=True):
        close(fitted.weights, trainer.fit(one.fit, one.shard, one.rng).weights)
    monkeypatch.setattr(trainer.memory_budget, "max_clients", lambda wanted, device: min(wanted, 1))
    tried.clear()
    trainer.fit_cohort(group)
    assert tried == [1, 1, 1, 1]  # no more than there is room for


def test_one_client_that_does_not_fit_is_an_error(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trainer, "_fit", full)
    fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 1)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer().fit(fit, make_shard(0, 8), RngContext(0, 1, 0))
