"""Stacked clients are trained as each would be alone: the same draws, the same steps, the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import CLASSES, MakeConfig, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig, ModelConfig, TrainConfig
from vitfleet.data.epoch_draws import draw_epoch
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.methods.derpp import DarkExperienceLoss
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.cohort import Cohort
from vitfleet.training.cohort_driver import group_fits
from vitfleet.training.cohort_inputs import ClientFit, RngContext, stack_inputs
from vitfleet.training.memories import EpisodicMemory, ReplayBuffer
from vitfleet.training.objective import Fit, FitResult, Objective, ReferenceGradients, Step, cross_entropy
from vitfleet.training.trainer import Trainer

SHARDS = ((0, 20), (3, 11), (9, 36), (2, 3))  # unequal numbers of steps, and batches that are not full
ALL_AUGMENTATIONS = AugmentConfig(crop=0.25, flip=True, brightness=0.4)


def assert_close(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    """Compare the relative distance of whole tensors: single numbers near zero may differ by more."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name].shape == expected[name].shape, name
        distance = float((actual[name].double() - expected[name].double()).norm())
        assert distance <= tolerance * float(expected[name].double().norm()) + 1e-7, (name, distance)


def make_group(fits: Sequence[Fit], make_shard: MakeShard) -> list[ClientFit]:
    return [
        ClientFit(fit, make_shard(*bounds), RngContext(7, 3, client))
        for client, (fit, bounds) in enumerate(zip(fits, SHARDS, strict=True))
    ]


def check_against_single_fits(trainer: Trainer, fits: Sequence[Fit], make_shard: MakeShard) -> list[FitResult]:
    """Compare the results of a cohort with those of its clients alone, and return them.

    In double precision, because the gradient of a key's bias is all rounding errors, and AdamW scales it up.
    """
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))
    group = make_group(fits, make_shard)
    together = trainer.fit_cohort(group)
    for client_fit, result in zip(group, together, strict=True):
        alone = trainer.fit(client_fit.fit, client_fit.shard, client_fit.rng)
        assert_close(result.weights, alone.weights)
        assert_close(result.observed, alone.observed)
        torch.testing.assert_close(result.loss, alone.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result.sample_losses, alone.sample_losses, rtol=1e-4, atol=1e-5)
        assert (result.samples, result.steps) == (alone.samples, alone.steps)
        start = client_fit.fit.weights
        assert all(float((result.weights[n] - start[n]).abs().max()) > 0 for n in result.weights if "head" in n)
    return together


def random_weights(net: Net, count: int = len(SHARDS)) -> list[dict[str, Tensor]]:
    """Return other weights for every client."""
    random = torch.Generator().manual_seed(1)
    return [
        {
            name: (tensor + 0.05 * torch.randn(tensor.shape, generator=random)).double()
            for name, tensor in net.initial_weights().items()
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("train", [{}, {"optimizer": "sgd"}, {"clip": 0.1}, {"mask_ratio": 0.5}], ids=str)
def test_cohort_trains_the_whole_model_as_single_clients_do(
    train: dict[str, object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=8, **train)
    objective = Objective(tiny_net.anatomy.whole)
    check_against_single_fits(
        trainer, [Fit(weights, objective, 2, score_samples=True) for weights in random_weights(tiny_net)], make_shard
    )


@pytest.mark.parametrize("part", ["head", "bias", "one layer", "lora", "prompts"])
def test_cohort_shares_frozen_weights(part: str, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
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
    weights = random_weights(net)
    # All clients have the same frozen weights.
    fits = [Fit({**weights[0], **selection.take(trained)}, Objective(selection), 2) for trained in weights]
    check_against_single_fits(replace(make_trainer(batch_size=8), net=net), fits, make_shard)


def test_cohort_trains_a_model_of_fewer_blocks(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    anatomy = tiny_net.anatomy
    objective = Objective(anatomy.union(anatomy.blocks[0], anatomy.head), depth=1)
    check_against_single_fits(
        make_trainer(batch_size=8), [Fit(weights, objective, 1) for weights in random_weights(tiny_net)], make_shard
    )


@dataclass(frozen=True)
class InfiniteLoss:
    """Cross-entropy that is infinite in every step that has a certain sample."""

    def __call__(self, step: Step) -> Tensor:
        poisoned = ((step.positions == step.constants["poisoned"]) & (step.sample_weight > 0)).any()
        return torch.where(poisoned, torch.inf, cross_entropy(step))


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_before_the_first_non_finite_loss_are_counted(
    graphs: bool, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(batch_size=4, lr=1e-6)
    trainer = replace(trainer, machine=replace(trainer.machine, graphs=graphs))
    objective = Objective(tiny_net.anatomy.whole, InfiniteLoss())
    poisoned = [5, 99, 20, 99]
    fits = [
        Fit(tiny_net.initial_weights(), objective, 2, {"poisoned": torch.tensor(position)}) for position in poisoned
    ]
    group = make_group(fits, make_shard)
    for results in (trainer.fit_cohort(group), [trainer.fit_cohort([client_fit])[0] for client_fit in group]):
        for client_fit, result, position in zip(group, results, poisoned, strict=True):
            order = draw_epoch(7, 3, client_fit.rng.client, 0, len(client_fit), 8, AugmentConfig(), 4, 4).order
            first = order.tolist().index(position) // 4 if position in order else result.steps
            assert (int(result.finite_steps), result.steps) == (first, 2 * -(-len(client_fit) // 4))
            assert bool(result.loss.isfinite()) == (position == 99)


@dataclass(frozen=True)
class AnchoredLoss:
    """Cross-entropy, and the squared distance to the constants."""

    def __call__(self, step: Step) -> Tensor:
        distances = [(weight - step.constants[name]).square().sum() for name, weight in step.weights.items()]
        return cross_entropy(step) + 0.1 * torch.stack(distances).sum()


@pytest.mark.parametrize("shared", [True, False])
def test_cohort_with_shared_or_separate_constants(
    shared: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    weights = random_weights(tiny_net)
    anchors = [weights[0]] * len(weights) if shared else weights[::-1]
    objective = Objective(tiny_net.anatomy.whole, AnchoredLoss())
    fits = [Fit(start, objective, 2, anchor) for start, anchor in zip(weights, anchors, strict=True)]
    check_against_single_fits(make_trainer(batch_size=8), fits, make_shard)


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


def make_buffer(images: ImageSet, client: int) -> ReplayBuffer:
    """Return a buffer of its own size for every client, with a target for every class."""
    index = (torch.arange(5 + 9 * client) + client) % len(images)
    targets = torch.randn(len(index), CLASSES, generator=torch.Generator().manual_seed(client))
    return ReplayBuffer(images.images[index], images.labels[index], 4, {"logits": targets})


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
def test_cohort_replays_the_stored_samples_of_each_client(
    known: bool,
    mask_ratio: float,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=8, mask_ratio=mask_ratio, optimizer="sgd")
    trainer = replace(trainer, class_tasks=torch.tensor([0, 0, 1, 1, 1]) if known else None)
    objective = Objective(tiny_net.anatomy.whole, DarkExperienceLoss(0.5, 0.5, 2))
    fits = [
        Fit(start, objective, 2, replay=make_buffer(tiny_images, client))
        for client, start in enumerate(random_weights(tiny_net))
    ]
    without = [replace(fit, replay=None) for fit in fits]
    results = check_against_single_fits(trainer, fits, make_shard)
    others = check_against_single_fits(trainer, without, make_shard)
    for result, other in zip(results, others, strict=True):
        assert float(result.loss) > float(other.loss), "the replayed samples are part of the loss"


METHODS = {
    "fedavg": (),
    "fedprox": ("method.mu=0.5",),
    "apfl": (),
    "standalone": (),
    "transfl": ("method.k=1",),
    "fed-head": (),
    "fed-bias": (),
    "fed-prompt": ("method.prompts=2",),
    "fed-prompt, shallow": ("method.prompts=2", "method.deep=false"),
    "fed-lora": ("method.rank=2",),
    "fedbfpt": ("method.local_layers=2", "model.depth=3"),
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5", "method.feature_dtype=fp32"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_result_stacked(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    outcomes = []
    for cohort in (1, 4):
        config = tiny_config(
            f"method.name={method.split(',')[0]}",
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
        client_tensors = {
            f"{client}.{name}": tensor
            for client in range(6)
            if (client_state := context.fleet.client_state(client))
            for name, tensor in client_state.tensors.items()
        }
        part_tensors = {
            f"{key}.{name}": tensor for key, part in state.server.parts.items() for name, tensor in part.tensors.items()
        }
        outcomes.append({**state.server.tensors, **client_tensors, **part_tensors})
    assert_close(outcomes[1], outcomes[0])


def test_group_fits(tiny_net: Net, make_trainer: MakeTrainer, tiny_images: ImageSet) -> None:
    def client(size: int, epochs: int = 1, depth: int | None = None, replay: ReplayBuffer | None = None) -> ClientFit:
        objective = Objective(tiny_net.anatomy.head, depth=depth)
        shard = Shard(tiny_images, torch.arange(size))
        fit = Fit(tiny_net.initial_weights(), objective, epochs, replay=replay)
        return ClientFit(fit, shard, RngContext(0, 1, 0))

    def grouped(*fits: ClientFit, batch: int = 8) -> list[list[int]]:
        grouped_fits = group_fits(list(enumerate(fits)), make_trainer(batch_size=batch))
        return sorted(sorted(index for index, _ in group) for group in grouped_fits)

    assert grouped(client(40), client(30), client(20)) == [[0, 1, 2]]
    unequal = client(40), client(10), client(30), client(9)
    assert grouped(*unequal, batch=1) == [[0, 1, 2, 3]]  # smaller clients are left out of the last steps
    assert grouped(client(40), client(10), client(30), batch=64) == [[0, 1, 2]]  # one step each
    assert grouped(client(40), client(40, epochs=2), client(40, depth=1)) == [[0], [1], [2]]
    masked = client(40)
    masked = replace(masked, fit=replace(masked.fit, train=TrainConfig(mask_ratio=0.5)))
    assert grouped(client(40), masked) == [[0], [1]]  # other settings
    assert grouped(client(0), client(8), client(0)) == [[0], [1], [2]]  # clients without samples are not stacked
    stored, more = make_buffer(tiny_images, 0), make_buffer(tiny_images, 1)
    assert grouped(client(8), client(8, replay=stored), client(8, replay=more)) == [[0], [1, 2]]


def test_fit_cohort_halves_a_group_that_is_out_of_memory(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(batch_size=8, optimizer="sgd")
    whole_fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 1)
    group = make_group([whole_fit] * len(SHARDS), make_shard)
    fit, sizes = Trainer._fit, []

    def fit_at_most_two(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        sizes.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError
        return fit(self, group)

    monkeypatch.setattr(Trainer, "_fit", fit_at_most_two)
    results = trainer.fit_cohort(group)
    assert sizes == [4, 2, 2]
    for client_fit, result in zip(group, results, strict=True):
        alone = trainer.fit(client_fit.fit, client_fit.shard, client_fit.rng)
        assert_close(result.weights, alone.weights)
    monkeypatch.setattr(trainer.memory_budget, "max_clients", lambda wanted, device: min(wanted, 1))
    sizes.clear()
    trainer.fit_cohort(group)
    assert sizes == [1, 1, 1, 1]  # at most as many as the budget allows


def test_fit_raises_if_a_single_client_is_out_of_memory(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trainer, "_fit", out_of_memory)
    fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 1)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer().fit(fit, make_shard(0, 8), RngContext(0, 1, 0))
