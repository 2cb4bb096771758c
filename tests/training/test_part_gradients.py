"""The gradients of parts of a set of stored samples: by hand, stacked as alone, of chosen parts, and reused."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from clients_alone import assert_close, check_every_way, check_stacked, in_double, make_group, random_weights
from clients_alone import stored_parts as make_parts
from torch import Tensor

from conftest import MakeShard, MakeTrainer
from vitfleet.costs.flops import FlopCounter, full_flops
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors, add_prefix, with_prefix
from vitfleet.models.net import Net
from vitfleet.training.engine import StepEngine
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.step import StepView

STORED, OLD, ROWS, PRESENT, CHOSEN = "memory", "old.", "rows.", "present", "chosen"


def two_longest(rows: Tensors) -> Tensor:
    """Choose the parts with the largest gradients."""
    lengths = torch.stack([tensor.square().flatten(1).sum(1) for tensor in rows.values()]).sum(0)
    return lengths.topk(2).indices.sort().values


@dataclass(frozen=True)
class Fixed:
    """Chooses the same parts in every step."""

    indices: tuple[int, ...]

    def __call__(self, rows: Tensors) -> Tensor:
        return torch.tensor(self.indices)


@dataclass(frozen=True)
class AddParts:
    """Adds the gradients of stored parts to that of the batch, and that of the batch at other weights.

    Attributes
    ----------
    choose
        Chooses parts by the gradients of all; ``None``: all are used.
    every
        Steps between two choices.
    recompute
        Steps after which gradients are computed again.
    at_old
        Whether the gradient at other weights is added.
    """

    choose: Callable[[Tensors], Tensor] | None = None
    every: int = 1
    recompute: int = 1
    at_old: bool = False

    def kind(self, index: int) -> Hashable:
        return index % self.every == 0, index % self.recompute == 0

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        gradients = view.grad(cross_entropy, batch)
        chooses, computes = cast(tuple[bool, bool], view.kind)
        if computes:
            view.keep(self.part_gradients(view, chooses))
        rows, present = with_prefix(view.scratch, ROWS), view.scratch[PRESENT]
        old = view.grad(cross_entropy, batch, at=with_prefix(view.constants, OLD)) if self.at_old else None
        view.count({"references": view.map(lambda present: present.sum() + int(self.at_old), present)})
        total: Tensors = view.map(add_all, gradients, rows, old)
        return total

    def part_gradients(self, view: StepView, chooses: bool) -> Tensors:
        rows: Tensors
        known = None if chooses or self.choose is None else view.scratch[CHOSEN]
        parts = view.parts(STORED, known)
        rows, present = view.part_grads(cross_entropy, parts), parts.present
        if self.choose is None or known is not None:
            return {**add_prefix(ROWS, rows), PRESENT: present}
        chosen = view.map(self.choose, rows)
        rows, present = view.map(take, rows, present, chosen)
        return {**add_prefix(ROWS, rows), PRESENT: present, CHOSEN: chosen}

    def scratch(self, weights: Tensors, parts: int) -> dict[str, Tensor]:
        count = parts if self.choose is None else 2
        rows = {
            ROWS + name: weight.new_empty((count, *weight.shape), device="meta") for name, weight in weights.items()
        }
        chosen = torch.empty(2, dtype=torch.long, device="meta")
        return {**rows, PRESENT: torch.empty(count, dtype=torch.bool, device="meta"), CHOSEN: chosen}


def take(rows: Tensors, present: Tensor, chosen: Tensor) -> tuple[Tensors, Tensor]:
    return {name: tensor.index_select(0, chosen) for name, tensor in rows.items()}, present.index_select(0, chosen)


def add_all(gradients: Tensors, rows: Tensors, old: Tensors | None) -> Tensors:
    """The gradients of parts without samples are zero."""
    total = {name: gradient + rows[name].sum(0) for name, gradient in gradients.items()}
    return total if old is None else {name: total[name] + old[name] for name in total}


def make_training(
    net: Net, images: ImageSet, client: int, weights: Tensors, step: AddParts, parts: int = 4, epochs: int = 2
) -> LocalTraining:
    return LocalTraining(
        weights,
        net.parts.whole,
        epochs,
        step,
        kept={"references": torch.zeros(())},
        scratch=step.scratch(weights, parts),
        sets={STORED: make_parts(images, client, parts)},
    )


# One at a time is what a CPU does in every other test.
@pytest.mark.parametrize("parts_at_once", [pytest.param(1, marks=pytest.mark.long), 2, None])
@pytest.mark.parametrize("choose", [None, two_longest], ids=["all", "two longest"])
@pytest.mark.parametrize("at_old", [False, True])
@pytest.mark.parametrize(
    ("masked", "every", "recompute"),
    [(False, 1, 1), (False, 3, 1), (True, 1, 1), (True, 3, 1), (False, 1, 2), (False, 4, 2)],
)
def test_stacked_clients_have_the_gradients_of_their_own_parts(
    choose: Callable[[Tensors], Tensor] | None,
    at_old: bool,
    masked: bool,
    every: int,
    recompute: int,
    parts_at_once: int | None,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = replace(
        make_trainer(batch_size=8, mask_ratio=0.5 if masked else 0.0),
        class_to_task=torch.tensor([0, 0, 1, 1, 1]),
        parts_at_once=parts_at_once,
    )
    step = AddParts(choose, every, recompute, at_old)
    trainings, weights = [], random_weights(tiny_net)
    for client, start in enumerate(weights):
        training = make_training(tiny_net, tiny_images, client, start, step)
        stored = training.sets[STORED]
        keep = torch.rand(*stored.labels.shape, 4, generator=torch.Generator().manual_seed(client)).argsort(-1)[..., :2]
        training = replace(training, sets={STORED: replace(stored, keep=keep if masked else None)})
        trainings.append(replace(training, constants=add_prefix(OLD, weights[-1 - client]) if at_old else {}))
    for result, training in zip(check_stacked(trainer, trainings, make_shard), trainings, strict=True):
        used = 2 if choose else sum(size > 0 for size in training.sets[STORED].sizes)
        assert float(result.kept["references"]) == result.steps * (used + at_old)


@pytest.mark.parametrize("indices", [(0, 1), (0, 2), (1, 2), (2, 3)], ids=str)
def test_chosen_parts_are_computed_whole_until_the_next_choice(
    indices: tuple[int, ...], tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Parts of 18, 12, 6 and fewer samples: a step computes as many samples of the chosen ones as there may be."""
    trainer = in_double(replace(make_trainer(batch_size=8, optimizer="sgd", lr=0.05), parts_at_once=2))

    def train(every: int) -> list[LocalResult]:
        step = AddParts(Fixed(indices), every)
        trainings = [
            make_training(tiny_net, tiny_images, client, weights, step, epochs=1)
            for client, weights in enumerate(random_weights(tiny_net))
        ]
        return trainer.train_together(make_group(trainings, make_shard))

    kept, chosen_anew = train(every=9), train(every=1)
    assert max(result.steps for result in kept) > 2
    for result, reference in zip(kept, chosen_anew, strict=True):
        assert_close(result.weights, reference.weights)


def test_captured_steps_of_every_kind_are_those_of_clients_alone(
    captured: list[Any], tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(batch_size=4, optimizer="sgd", lr=0.05), parts_at_once=2)
    step = AddParts(two_longest, every=4, recompute=2)
    trainings = [
        make_training(tiny_net, tiny_images, client, weights, step)
        for client, weights in enumerate(random_weights(tiny_net))
    ]
    check_every_way(trainer, make_group(trainings, make_shard))
    assert {kind.kind for kind in captured[0].graphs} == {(True, True), (False, False), (False, True)}


def test_images_of_chosen_parts_are_counted_as_they_are_computed(
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    forward = StepEngine.forward

    def count_images(self: StepEngine, weights: Tensors, samples: Samples, *args: Any, **keys: Any) -> Any:
        computed.append(samples.labels.numel())
        return forward(self, weights, samples, *args, **keys)

    monkeypatch.setattr(StepEngine, "forward", count_images)
    step = AddParts(Fixed((1, 3)), every=3)
    training = make_training(tiny_net, tiny_images, 0, tiny_net.initial_weights(), step, epochs=1)
    trainer = make_trainer(batch_size=8)
    result = trainer.train(training, make_shard(0, 24), RngContext(0, 1, 0))
    # Widths 24, 16, 8 and 8: all of them in the first step, the first two in the others.
    assert result.steps == 3
    assert sum(computed) == 24 + 56 + 40 + 40
    monkeypatch.undo()
    counted = FlopCounter(tiny_net, trainer.config).training(training, 24)
    assert counted == sum(computed) * full_flops(tiny_net).training


def test_the_gradient_of_a_part_is_that_of_its_samples(
    tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """One step of SGD along the sum of the gradient and those of the parts, compared with autograd."""
    trainer = make_trainer(optimizer="sgd", momentum=0, weight_decay=0, lr=0.1, schedule="constant")
    weights = tiny_net.initial_weights()
    training = make_training(tiny_net, tiny_images, 1, weights, AddParts(), parts=3, epochs=1)
    stored, shard = training.sets[STORED], make_shard(0, 12)
    result = trainer.train(training, shard, RngContext(7, 3, 0))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(tiny_net.module.vit, leaves, (images.float() / 255 - 0.5) / 0.5)
        return torch.nn.functional.cross_entropy(logits, labels)

    batch_loss = loss(shard.images.images[shard.index], shard.images.labels[shard.index])
    assert stored.sizes == (16, 10, 0)
    part_losses = [
        loss(stored.images[part][:size], stored.labels[part][:size]) for part, size in enumerate(stored.sizes) if size
    ]
    total = torch.autograd.grad(batch_loss + part_losses[0] + part_losses[1], list(leaves.values()))
    assert_close(result.weights, {n: weights[n] - 0.1 * g for n, g in zip(leaves, total, strict=True)}, 1e-6)


def keep_part_gradients(view: StepView, batch: Samples) -> Tensors:
    view.keep(view.part_grads(cross_entropy, view.parts(STORED)))
    return {}


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("parts_at_once", [1, 2, 9])
def test_gradients_of_parts_together_are_those_of_each_part(
    clients: int,
    parts_at_once: int,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    """Parts that share a client's weights in one backward pass, against autograd part by part."""
    trainer, trainable, sizes = replace(make_trainer(), parts_at_once=parts_at_once), tiny_net.parts.body, (8, 7, 5)
    trainings = []
    for client, weights in enumerate(random_weights(tiny_net, clients)):
        stored = make_parts(tiny_images, client, 3)
        stored = replace(stored, images=stored.images[:, :8], labels=stored.labels[:, :8], sizes=sizes)
        weights = {name: tensor.float() for name, tensor in weights.items()}
        kept = {name: torch.zeros(3, *weights[name].shape) for name in trainable}
        trainings.append(LocalTraining(weights, trainable, 1, keep_part_gradients, kept=kept, sets={STORED: stored}))
    results = trainer.train_together(make_group(trainings, make_shard))
    for training, result in zip(trainings, results, strict=True):
        stored = training.sets[STORED]
        leaves = {name: training.weights[name].clone().requires_grad_() for name in trainable}
        for part, size in enumerate(sizes):
            images = trainer.preprocess(stored.images[part, :size])
            logits = tiny_net({**training.weights, **leaves}, images)
            loss = torch.nn.functional.cross_entropy(logits, stored.labels[part, :size])
            expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            mine = {name: result.kept[name][part] for name in leaves}
            # The gradient of a key's bias is all rounding errors.
            assert_close(
                {n: t for n, t in mine.items() if "qkv.bias" not in n},
                {n: t for n, t in expected.items() if "qkv.bias" not in n},
            )
            assert all(torch.allclose(mine[name], expected[name], atol=1e-6) for name in mine)
