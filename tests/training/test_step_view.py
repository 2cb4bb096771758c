"""What a step's view computes, against autograd by hand: of clients alone and stacked, eager and captured.

Each step keeps what it computes and changes no weight. A client that has no more steps keeps what its last one found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import torch
from clients_alone import assert_close, check_every_way, in_double, make_group, random_weights, stored_to_draw
from torch import Tensor
from torch.nn import functional as F

from conftest import CLASSES, MakeShard, MakeTrainer
from family_configs import tiny_family
from vitfleet.config.schema import AugmentConfig
from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors, add_prefix, with_prefix
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining
from vitfleet.training.step import Step, StepView
from vitfleet.training.trainer import Trainer, preprocess_for

OTHER = "other."
BATCH = 8
ALL_AUGMENTATIONS = AugmentConfig(crop=0.25, flip=True, brightness=0.4)
TASKS = torch.tensor([0, 0, 1, 1, 1])


@dataclass(frozen=True)
class ByHand:
    """One batch of a client, computed with timm's weights as arguments and autograd."""

    trainer: Trainer
    training: LocalTraining
    images: ImageSet
    batch: Batch

    @property
    def labels(self) -> Tensor:
        return self.images.labels[self.batch.image_indices]

    @property
    def inputs(self) -> Tensor:
        return self.trainer.preprocess(self.images.images[self.batch.image_indices], self.batch)

    def leaves(self, names: Iterable[str], weights: Tensors | None = None) -> dict[str, Tensor]:
        return {name: (weights or self.training.weights)[name].detach().clone().requires_grad_() for name in names}

    def logits(self, weights: Tensors, inputs: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        keep = None if self.batch.keep is None else self.batch.keep[rows]
        images = self.inputs[rows] if inputs is None else inputs
        logits = self.trainer.net({**self.training.weights, **weights}, images, keep)
        if self.trainer.class_to_task is None:
            return logits
        return logits.masked_fill(self.trainer.class_to_task != TASKS[self.labels[rows]][:, None], -torch.inf)

    def loss(self, weights: Tensors, inputs: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        return F.cross_entropy(self.logits(weights, inputs, rows), self.labels[rows])

    def gradient(self, names: Iterable[str], at: Tensors | None = None) -> dict[str, Tensor]:
        leaves = self.leaves(names, at)
        return gradients_of(self.loss({**(at or {}), **leaves}), leaves)


Expected: TypeAlias = Callable[[ByHand], Tensors]


def gradients_of(loss: Tensor, leaves: Tensors) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def last_batch(trainer: Trainer, member: ClientTraining) -> ByHand:
    batches = trainer._epoch_batches([member], member.training.epochs - 1, trainer.config, 1)
    return ByHand(trainer, member.training, member.shard.images, batches.batch(len(batches) - 1, None))


def check_kept(
    trainer: Trainer,
    step: Step,
    expected: Expected,
    make_shard: MakeShard,
    trainable: Selection,
    constants: Sequence[Tensors] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    **keys: Any,
) -> list[LocalResult]:
    """Compare what four clients keep with what is expected of the last batch of each."""
    trainer, kept_shapes = in_double(trainer), shapes or {name: trainer.net.parts.shapes[name] for name in trainable}
    kept = {name: torch.full(tuple(shape), torch.nan, dtype=torch.float64) for name, shape in kept_shapes.items()}
    weights = random_weights(trainer.net)
    trainings = [  # what does not train is shared
        LocalTraining({**weights[0], **trainable.take(each)}, trainable, 2, step, constants=own, kept=kept, **keys)
        for each, own in zip(weights, constants or [{}] * 4, strict=True)
    ]
    group = make_group(trainings, make_shard)
    results = check_every_way(trainer, group)
    for member, result in zip(group, results, strict=True):
        found = expected(last_batch(trainer, member))
        assert_close(
            result.kept, {name: tensor.detach() for name, tensor in found.items()}, 1e-6
        )  # the loss is in float32
        start = member.training.weights
        assert all(torch.equal(result.weights[name], start[name]) for name in trainable), "nothing trained"
    return results


@dataclass(frozen=True)
class KeepGradientAt:
    """Keeps the gradient at other weights, which are constants."""

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        view.keep(view.grad(cross_entropy, batch, at=with_prefix(view.constants, OTHER)))
        return {}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("trained", "names"),
    [("head", "head"), ("head", "whole"), ("whole", "head"), ("whole", "body"), ("whole", "whole")],
)
def test_gradient_at_other_weights(
    trained: str,
    names: str,
    shared: bool,
    captured: list[object],
    tiny_net: Net,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    """It is taken by what trains among the given weights; the rest of the model is the client's own."""
    parts = tiny_net.parts
    trainable: Selection = getattr(parts, trained)
    given: Selection = getattr(parts, names)
    common = [name for name in trainable if name in given]
    others = [add_prefix(OTHER, given.take(weights)) for weights in random_weights(tiny_net, 5)[1:]]
    constants = [others[0]] * 4 if shared else others

    def expected(hand: ByHand) -> Tensors:
        return hand.gradient(common, with_prefix(hand.training.constants, OTHER))

    shapes = {name: parts.shapes[name] for name in common}
    trainer = make_trainer(batch_size=BATCH)
    check_kept(trainer, KeepGradientAt(), expected, make_shard, trainable, constants, shapes)


@dataclass(frozen=True)
class KeepPerSample:
    """Keeps the gradient of each sample of the batch, zeros after the last; at its own weights, or at others."""

    at: bool = False

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        at = with_prefix(view.constants, OTHER) if self.at else None
        view.keep(view.map(pad_rows, view.per_sample_grad(cross_entropy, batch, at=at)))
        return {}


def pad_rows(rows: Tensors) -> Tensors:
    return {name: F.pad(row, (*(0, 0) * (row.dim() - 1), 0, BATCH - row.shape[0])) for name, row in rows.items()}


@pytest.mark.parametrize("at", ["own weights", "others", "shared others"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("augment", "mask_ratio"), [(None, 0.0), (ALL_AUGMENTATIONS, 0.5)], ids=["plain", "augmented"])
def test_gradient_of_each_sample_is_that_of_a_loop(
    augment: AugmentConfig | None,
    mask_ratio: float,
    known: bool,
    at: str,
    captured: list[object],
    tiny_net: Net,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = make_trainer(augment, batch_size=BATCH, mask_ratio=mask_ratio)
    trainer = replace(trainer, class_to_task=TASKS if known else None)
    body = tiny_net.parts.body

    def expected(hand: ByHand) -> Tensors:
        other = with_prefix(hand.training.constants, OTHER)
        rows = []
        for sample in range(len(hand.labels)):
            leaves = hand.leaves(body, {**hand.training.weights, **other})
            rows.append(gradients_of(hand.loss({**other, **leaves}, rows=slice(sample, sample + 1)), leaves))
        return pad_rows({name: torch.stack([row[name] for row in rows]) for name in body})

    # Among the other weights is the head, which does not train.
    others: list[Tensors] = [add_prefix(OTHER, weights) for weights in random_weights(tiny_net, 5)[1:]]
    constants = {"own weights": None, "others": others, "shared others": others[:1] * 4}[at]
    shapes = {name: (BATCH, *tiny_net.parts.shapes[name]) for name in body}
    results = check_kept(trainer, KeepPerSample(constants is not None), expected, make_shard, body, constants, shapes)
    assert all(float(result.loss) > 0 for result in results), "the mean loss of the samples is reported"


@pytest.mark.parametrize("family", ["cvt", "swin", "t2t", pytest.param("levit", marks=pytest.mark.long)])
def test_gradient_of_each_sample_of_other_families(
    family: str, captured: list[object], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Where timm's own module is lifted over clients; batch norms use their running statistics."""
    net = tiny_family(family, CLASSES)
    head = net.parts.trainable(net.parts.head)
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=BATCH)
    trainer = replace(trainer, net=net, preprocess=preprocess_for(net, torch.device("cpu")))

    def expected(hand: ByHand) -> Tensors:
        rows = []
        for sample in range(len(hand.labels)):
            leaves = hand.leaves(head)
            rows.append(gradients_of(hand.loss(leaves, rows=slice(sample, sample + 1)), leaves))
        return pad_rows({name: torch.stack([row[name] for row in rows]) for name in head})

    shapes = {name: (BATCH, *net.parts.shapes[name]) for name in head}
    check_kept(trainer, KeepPerSample(), expected, make_shard, head, shapes=shapes)


@dataclass(frozen=True)
class KeepScaled:
    """Keeps the gradient, by the head, of each sample's loss at a temperature that is given to the loss."""

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        at = with_prefix(view.constants, OTHER)
        temperature = view.map(torch.mul, view.constants["one"], view.constants["temperature"])
        for given in (temperature, view.constants["temperature"]):
            rows = view.per_sample_grad(self.loss, batch, at=at, given=(given,))
            view.keep(view.map(pad_rows, rows))
        return {}

    def loss(self, outputs: Outputs, temperature: Tensor) -> Tensor:
        return cross_entropy(replace(outputs, logits=outputs.logits / temperature))


@pytest.mark.parametrize("shared", [True, False])
def test_gradient_of_each_sample_by_a_part_of_what_trains_with_a_given_argument(
    shared: bool, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    whole, head = tiny_net.parts.whole, tiny_net.parts.head
    common = torch.tensor(2.0)

    def expected(hand: ByHand) -> Tensors:
        other, temperature = with_prefix(hand.training.constants, OTHER), hand.training.constants["temperature"]
        rows = []
        for sample in range(len(hand.labels)):
            leaves, row = hand.leaves(head, other), slice(sample, sample + 1)
            loss = F.cross_entropy(hand.logits(leaves, rows=row) / temperature, hand.labels[row])
            rows.append(gradients_of(loss, leaves))
        return pad_rows({name: torch.stack([row[name] for row in rows]) for name in head})

    constants = [
        add_prefix(OTHER, head.take(weights))
        | {"one": torch.ones(()), "temperature": common if shared else torch.tensor(1.0 + client)}
        for client, weights in enumerate(random_weights(tiny_net, 5)[1:])
    ]
    shapes = {name: (BATCH, *tiny_net.parts.shapes[name]) for name in head}
    check_kept(make_trainer(batch_size=BATCH), KeepScaled(), expected, make_shard, whole, constants, shapes)


def keep_mean_of_samples(view: StepView, batch: Samples) -> Tensors:
    rows = view.per_sample_grad(cross_entropy, batch)
    mean = view.map(
        lambda rows, weight: {n: torch.einsum("s,s...->...", weight, r) for n, r in rows.items()},
        rows,
        batch.sample_weight.to(torch.float64),
    )
    view.keep(mean)
    return {}


def test_mean_of_the_samples_gradients_is_that_of_the_batch(
    captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    whole = tiny_net.parts.whole
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=BATCH)
    results = check_kept(trainer, keep_mean_of_samples, lambda hand: hand.gradient(whole), make_shard, whole)
    weights = random_weights(tiny_net)
    plain = make_group([LocalTraining(each, whole, 2, keep_gradient, kept={}) for each in weights], make_shard)
    for member, result in zip(plain, results, strict=True):
        alone = in_double(trainer).train(member.training, member.shard, member.rng)
        torch.testing.assert_close(result.loss, alone.loss)


def keep_gradient(view: StepView, batch: Samples) -> Tensors:
    view.grad(cross_entropy, batch)
    return {}


# Perturbed images


def keep_perturbed(view: StepView, batch: Samples) -> Tensors:
    shift = view.zero_perturbation(batch) + 0.3
    computed = view.value_and_grad(cross_entropy, batch, perturbation=shift, input_gradient=True)
    assert computed.input_gradient is not None
    of_images = view.input_grad(cross_entropy, batch, perturbation=2 * shift)
    zeros = {name: torch.zeros_like(weight) for name, weight in view.weights.items()}
    at_zeros = view.input_grad(cross_entropy, batch, perturbation=shift, at=zeros)  # a head of zeros sees no image
    images = {"images": computed.input_gradient, "images twice": of_images, "images at zeros": at_zeros}
    view.keep({**computed.gradients, **view.map(pad_rows, images)})
    return {}


@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
def test_gradients_with_a_perturbation_of_the_images(
    mask_ratio: float, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """By the weights and by the perturbation; what is masked out has no gradient."""
    head = tiny_net.parts.head

    def expected(hand: ByHand) -> Tensors:
        leaves = hand.leaves(head)
        once, twice = (torch.full_like(hand.inputs, shift).requires_grad_() for shift in (0.3, 0.6))
        by_weights = gradients_of(hand.loss(leaves, hand.inputs + 0.3), leaves)
        by_once = gradients_of(hand.loss({}, hand.inputs + once), {"images": once})
        by_twice = gradients_of(hand.loss({}, hand.inputs + twice), {"images twice": twice})
        at_zeros = {"images at zeros": torch.zeros_like(by_once["images"])}
        return {**by_weights, **pad_rows({**by_once, **by_twice, **at_zeros})}

    shapes = {name: tiny_net.parts.shapes[name] for name in head}
    shapes |= {name: torch.Size((BATCH, 1, 8, 8)) for name in ("images", "images twice", "images at zeros")}
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=BATCH, mask_ratio=mask_ratio)
    check_kept(trainer, keep_perturbed, expected, make_shard, head, shapes=shapes)


# Passes without a gradient


def keep_forward(view: StepView, batch: Samples) -> Tensors:
    (own,) = view.forward(batch, representation=True)
    (other,) = view.forward(batch, at=with_prefix(view.constants, OTHER), all_classes=True)
    tokens = view.features(batch, 1)
    assert own.representation is not None
    assert tokens.features is not None
    assert tokens.logits.shape[-1] == 0
    rows = {"logits": own.logits, "others": other.logits, "pooled": own.representation, "tokens": tokens.features}
    view.keep(view.map(samples_only, rows, batch.sample_weight))
    return {}


def samples_only(rows: Tensors, weight: Tensor) -> Tensors:
    return pad_rows({name: row * (weight > 0).view(-1, *[1] * (row.dim() - 1)) for name, row in rows.items()})


@pytest.mark.parametrize("shared", [True, False])
def test_outputs_representation_and_features(
    shared: bool, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    others = [add_prefix(OTHER, weights) for weights in random_weights(tiny_net, 5)[1:]]

    def expected(hand: ByHand) -> Tensors:
        weights = hand.training.weights
        tokens = tiny_net.forward_to(weights, hand.inputs, None, 1)
        plain = tiny_net.forward_from(weights, tokens, 1)
        other = tiny_net(with_prefix(hand.training.constants, OTHER), hand.inputs)
        torch.testing.assert_close(tiny_net(weights, hand.inputs), plain)
        pooled = tiny_net.outputs_and_representation(weights, hand.inputs, None, None)[1]
        torch.testing.assert_close(pooled @ weights["head.weight"].T + weights["head.bias"], plain)
        return pad_rows({"logits": hand.logits({}), "others": other, "pooled": pooled, "tokens": tokens})

    shapes = {"logits": (BATCH, CLASSES), "others": (BATCH, CLASSES), "pooled": (BATCH, 16), "tokens": (BATCH, 5, 16)}
    constants = [others[0]] * 4 if shared else others
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=BATCH)
    check_kept(trainer, keep_forward, expected, make_shard, tiny_net.parts.head, constants, shapes)


@dataclass(frozen=True)
class KeepEach:
    """Keeps the gradients of a loss for each of two temperatures, with one forward pass."""

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        temperatures = ((view.map(torch.mul, view.constants["one"], scale),) for scale in (1, 3))
        for scale, gradient in zip((1, 3), view.grad_of_each(self.loss, batch, each=temperatures), strict=True):
            view.keep(add_prefix(f"{scale}.", gradient))
        return {}

    def loss(self, outputs: Outputs, temperature: Tensor) -> Tensor:
        return cross_entropy(replace(outputs, logits=outputs.logits / temperature))


def test_gradients_of_a_loss_for_each_of_several_arguments(
    captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    head = tiny_net.parts.head

    def expected(hand: ByHand) -> Tensors:
        found: dict[str, Tensor] = {}
        for temperature in (1, 3):
            leaves = hand.leaves(head)
            loss = F.cross_entropy(hand.logits(leaves).float() / temperature, hand.labels)
            found |= add_prefix(f"{temperature}.", gradients_of(loss, leaves))
        return found

    shapes = {f"{temperature}.{name}": tiny_net.parts.shapes[name] for temperature in (1, 3) for name in head}
    constants = [{"one": torch.ones(())} for _ in range(4)]
    check_kept(make_trainer(batch_size=BATCH), KeepEach(), expected, make_shard, head, constants, shapes)


# Drawn samples


def keep_of_drawn(view: StepView, batch: Samples) -> Tensors:
    """Keep the gradient of the drawn samples, the weighted sum of those of single ones, and the difference of both."""
    drawn = view.drawn("replay")
    whole, rows = view.grad(distance, drawn), view.per_sample_grad(distance, drawn)
    summed = view.map(weighted_sum, rows, drawn.sample_weight)
    view.keep(whole)
    view.keep({f"difference.{name}": (summed[name] - gradient).abs() for name, gradient in whole.items()})
    return {}


def distance(outputs: Outputs) -> Tensor:
    """Return the mean squared distance to the stored logits."""
    distances = (outputs.logits.double() - outputs.stored["logits"]).square().sum(dim=-1)
    return torch.dot(distances, outputs.sample_weight.double())


def weighted_sum(rows: Tensors, weight: Tensor) -> Tensors:
    return {name: torch.einsum("s,s...->...", weight.to(row.dtype), row) for name, row in rows.items()}


def test_gradients_of_drawn_samples_use_what_is_stored_with_them(
    captured: list[object], tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    head, trainer = tiny_net.parts.head, in_double(make_trainer(batch_size=BATCH))
    zeros = {name: torch.zeros(tiny_net.parts.shapes[name], dtype=torch.float64) for name in head}
    kept = {**zeros, **add_prefix("difference.", zeros)}
    trainings = [
        LocalTraining(weights, head, 1, keep_of_drawn, kept=kept, sets={"replay": stored_to_draw(tiny_images, client)})
        for client, weights in enumerate(random_weights(tiny_net))
    ]
    group = make_group(trainings, make_shard)
    for client, (member, result) in enumerate(zip(group, check_every_way(trainer, group), strict=True)):
        hand, stored = last_batch(trainer, member), member.training.sets["replay"]
        positions = hand.batch.drawn["replay"].image_indices.flatten()
        assert len(positions) == 4 * len(hand.labels)
        leaves, images = hand.leaves(head), trainer.preprocess(stored.images[0, positions])
        logits = tiny_net({**member.training.weights, **leaves}, images)
        loss = (logits - stored.stored["logits"][0, positions]).square().sum(dim=-1).mean()
        assert_close({name: result.kept[name] for name in head}, gradients_of(loss, leaves), 1e-6)
        scale = max(float(result.kept[name].abs().max()) for name in head)
        assert all(float(result.kept[f"difference.{name}"].max()) < 1e-6 * scale for name in head), client
