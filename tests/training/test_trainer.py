"""The trainer is a plain training loop: held against one written by hand on timm's own module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig
from vitfleet.data.images import Shard
from vitfleet.message import Tensors
from vitfleet.models.functional_vit import FunctionalViT
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.cohort_inputs import RngContext
from vitfleet.training.objective import Fit, FitResult, Objective, ReferenceGradients, Step, cross_entropy
from vitfleet.training.optim import learning_rate
from vitfleet.training.trainer import Trainer

PLACE = RngContext(seed=7, round=3, client=2)
PLAIN_SGD: Mapping[str, object] = {
    "optimizer": "sgd",
    "momentum": 0,
    "weight_decay": 0,
    "lr": 0.1,
    "schedule": "constant",
}


def whole(net: Net) -> Fit:
    return Fit(net.initial_weights(), Objective(net.anatomy.whole), epochs=1)


def plain_module(net: Net, weights: Tensors) -> nn.Module:
    """timm's own module, trained the usual way: no functional calls, no vitfleet."""
    module = copy.deepcopy(net.module.vit)
    module.load_state_dict(dict(weights))
    return module.requires_grad_(True).train()


def epoch_batches(place: RngContext, epoch: int, samples: int) -> Tensor:
    rng = Address(place.seed, Purpose.ORDER, place.round, place.client, epoch).generator()
    return torch.from_numpy(rng.permutation(samples))


def by_hand(shard: Shard, index: Tensor) -> tuple[Tensor, Tensor]:
    chosen = shard.index[index]
    return (shard.images.images[chosen].float() / 255 - 0.5) / 0.5, shard.images.labels[chosen]


def gradients_by_hand(net: Net, weights: Tensors, shard: Shard, index: Tensor) -> dict[str, Tensor]:
    module = plain_module(net, weights)
    images, labels = by_hand(shard, index)
    names, leaves = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.cross_entropy(module(images), labels), leaves)
    return dict(zip(names, gradients, strict=True))


def assert_close(left: Tensors, correct: Tensors, tolerance: float = 1e-6) -> None:
    assert set(left) == set(correct)
    for name in left:
        torch.testing.assert_close(left[name], correct[name], rtol=0, atol=tolerance, msg=name)


def assert_same(left: Tensors, correct: Tensors) -> None:
    assert set(left) == set(correct)
    for name in left:
        assert torch.equal(left[name], correct[name]), name


def without_key_bias(weights: Tensors) -> dict[str, Tensor]:
    """Softmax does not feel a key's bias: its gradient is nothing but rounding, of which AdamW makes whole steps."""
    kept = dict(weights)
    for name in [name for name in weights if name.endswith("attn.qkv.bias")]:
        query, _, value = torch.chunk(kept[name], 3)
        kept[name] = torch.cat([query, value])
    return kept


def furthest(left: Tensors, correct: Tensors) -> float:
    return max(float((left[name] - correct[name]).abs().max()) for name in left)


def test_one_sgd_step_is_weights_minus_rate_times_gradient(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    shard = make_shard(0, 12)
    fit = whole(tiny_net)
    gradients = gradients_by_hand(tiny_net, fit.weights, shard, epoch_batches(PLACE, 0, 12))
    fitted = make_trainer(**PLAIN_SGD, batch_size=16).fit(fit, shard, PLACE)
    assert fitted.steps == 1
    assert_close(fitted.weights, {name: fit.weights[name] - 0.1 * gradients[name] for name in fit.weights}, 1e-7)
    assert furthest(fitted.weights, fit.weights) > 1e-3


def train_by_hand(net: Net, trainer: Trainer, fit: Fit, shard: Shard, place: RngContext) -> tuple[nn.Module, float]:
    config = trainer.config
    module = plain_module(net, fit.weights)
    rate = learning_rate(config, place.round, trainer.rounds)
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            module.parameters(), lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
    total = 0.0
    for epoch in range(place.first_epoch, place.first_epoch + fit.epochs):
        for index in torch.split(epoch_batches(place, epoch, len(shard)), config.batch_size):
            images, labels = by_hand(shard, index)
            loss = F.cross_entropy(module(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if config.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), config.clip)
            optimizer.step()
            total += loss.item() * len(index)
    return module, total / (len(shard) * fit.epochs)


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "adamw", "clip": 0.5, "lr": 1e-3, "batch_size": 8, "warmup_rounds": 5},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.5, "batch_size": 7},
        {"optimizer": "sgd", "clip": 0.2, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 8},
    ],
)
def test_a_whole_fit_equals_a_loop_written_by_hand(
    train: dict[str, object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    shard = make_shard(3, 30)  # 27 images: the last batch is ragged
    trainer = make_trainer(**train)
    fit = replace(whole(tiny_net), epochs=4)
    place = replace(PLACE, first_epoch=2)
    fitted = trainer.fit(fit, shard, place)
    module, loss = train_by_hand(tiny_net, trainer, fit, shard, place)
    assert_close(without_key_bias(fitted.weights), without_key_bias(module.state_dict()))
    assert float(fitted.loss) == pytest.approx(loss, rel=1e-5)
    assert (fitted.samples, fitted.steps) == (27, 16)


def test_clipping_bounds_the_step(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    fit = whole(tiny_net)
    fitted = make_trainer(**PLAIN_SGD, clip=1e-2, batch_size=64).fit(fit, make_shard(0, 20), PLACE)
    squares = [(fitted.weights[name] - fit.weights[name]).double().square().sum() for name in fit.weights]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(0.1 * 1e-2, rel=1e-3)


def test_frozen_weights_stay_and_get_no_gradient(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    seen: list[set[str]] = []

    def loss(step: Step) -> Tensor:
        seen.append(set(step.weights))
        return cross_entropy(step)

    weights = tiny_net.initial_weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    fit = Fit(weights, Objective(tiny_net.anatomy.head, loss), epochs=2)
    fitted = make_trainer(batch_size=8).fit(fit, make_shard(0, 20), PLACE)
    head = set(tiny_net.anatomy.head)
    assert set(fitted.weights) == head
    assert all(names == head for names in seen)
    assert_same(weights, before)
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in weights.values())
    assert furthest(fitted.weights, tiny_net.anatomy.head.take(before)) > 1e-4


def test_training_leaves_its_input_and_the_architecture_alone(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fit = whole(tiny_net)
    before = {name: tensor.clone() for name, tensor in fit.weights.items()}
    fitted = make_trainer().fit(fit, make_shard(0, 20), PLACE)
    assert_same(fit.weights, before)
    assert_same(tiny_net.initial_weights(), before)
    assert furthest(fitted.weights, before) > 1e-4
    given = {tensor.data_ptr() for tensor in fit.weights.values()}
    assert not given & {tensor.data_ptr() for tensor in fitted.weights.values()}
    assert not any(tensor.requires_grad for tensor in fitted.weights.values())


@dataclass(frozen=True)
class ScaleTheHead:
    """Scales the head's gradients and stops all others."""

    by: float
    counts: tuple[str, ...] = ("turned",)

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        assert references is None
        scaled = {name: one * (self.by if name.startswith("head.") else 0) for name, one in gradients.items()}
        return scaled, {"turned": torch.ones(())}


def test_the_transform_is_what_is_applied(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    shard = make_shard(0, 12)
    weights = tiny_net.initial_weights()
    objective = Objective(tiny_net.anatomy.whole, transform=ScaleTheHead(2))
    fitted = make_trainer(**PLAIN_SGD).fit(Fit(weights, objective, epochs=1), shard, PLACE)
    gradients = gradients_by_hand(tiny_net, weights, shard, epoch_batches(PLACE, 0, 12))
    factor = {name: 0.2 if name.startswith("head.") else 0.0 for name in weights}
    assert_close(fitted.weights, {name: weights[name] - factor[name] * gradients[name] for name in weights}, 1e-7)
    assert torch.equal(fitted.weights["cls_token"], weights["cls_token"])
    assert float(fitted.observed["turned"]) == fitted.steps == 1


@dataclass(frozen=True)
class SumOfSquares:
    """Sums the squared gradients, and the samples they were taken over."""

    @staticmethod
    def start(weights: Tensors) -> Tensors:
        return {name: torch.zeros_like(weight) for name, weight in weights.items()} | {"seen": torch.zeros(())}

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        squares = {name: observer_state[name] + gradient.square() for name, gradient in gradients.items()}
        return squares | {"seen": observer_state["seen"] + len(step.labels)}


def test_the_observer_sees_the_gradients_as_they_were(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    stop = ScaleTheHead(0)  # so that every step is taken at the same weights
    shard = make_shard(0, 20)
    weights = tiny_net.initial_weights()
    objective = Objective(tiny_net.anatomy.whole, transform=stop, observer=SumOfSquares())
    trainer = make_trainer(**PLAIN_SGD, clip=1e-6, batch_size=8)
    fitted = trainer.fit(Fit(weights, objective, epochs=2, observer_state=SumOfSquares.start(weights)), shard, PLACE)
    assert_same(fitted.weights, weights)
    observer_state = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for epoch in (0, 1):
        for index in torch.split(epoch_batches(PLACE, epoch, 20), 8):
            for name, gradient in gradients_by_hand(tiny_net, weights, shard, index).items():
                observer_state[name] += gradient.square()
    assert float(fitted.observed["seen"]) == 40
    assert_close({name: fitted.observed[name] for name in observer_state}, observer_state)
    assert float(observer_state["head.weight"].sum()) > 1e-3


def test_an_observer_does_not_disturb_the_training(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fit = whole(tiny_net)
    watched = replace(
        fit,
        objective=replace(fit.objective, observer=SumOfSquares()),
        observer_state=SumOfSquares.start(tiny_net.initial_weights()),
    )
    trainer = make_trainer(clip=0.1)
    alone, seen = (trainer.fit(one, make_shard(0, 20), PLACE) for one in (fit, watched))
    assert_same(alone.weights, seen.weights)
    assert alone.observed == {}


def test_a_client_without_images_trains_nothing(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fit = replace(whole(tiny_net), epochs=3)
    fitted = make_trainer(weight_decay=0.5).fit(fit, make_shard(4, 4), PLACE)
    assert_same(fitted.weights, fit.weights)
    assert (float(fitted.loss), fitted.samples, fitted.steps) == (0.0, 0, 0)


def test_a_mask_leaves_the_kept_patches_and_the_class_token(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    run = FunctionalViT.block

    def note(self: FunctionalViT, weights: Tensors, place: int, inputs: Tensor) -> Tensor:
        if place == 0:
            tokens.append(inputs.shape[1])
        return run(self, weights, place, inputs)

    monkeypatch.setattr(FunctionalViT, "block", note)
    fit = replace(whole(tiny_net), epochs=2)
    shard = make_shard(0, 20)
    masked = make_trainer(mask_ratio=0.5, batch_size=8).fit(fit, shard, PLACE)
    assert tokens == [1 + 2] * 6  # two of four patches, in 2 epochs x 3 steps
    assert masked.steps == 6
    assert torch.isfinite(masked.loss)
    assert furthest(masked.weights, fit.weights) > 1e-4
    tokens.clear()
    unmasked = make_trainer(batch_size=8).fit(fit, shard, PLACE)
    assert tokens == [1 + 4] * 6
    assert furthest(masked.weights, unmasked.weights) > 1e-5


@pytest.mark.parametrize(
    "augment",
    [AugmentConfig(flip=True), AugmentConfig(crop=0.3), AugmentConfig(brightness=0.5)],
    ids=["flip", "crop", "brightness"],
)
def test_augmentation_changes_what_is_learnt(
    augment: AugmentConfig, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fit, shard = whole(tiny_net), make_shard(0, 20)
    plain = make_trainer().fit(fit, shard, PLACE)
    augmented = make_trainer(augment).fit(fit, shard, PLACE)
    assert furthest(plain.weights, augmented.weights) > 1e-5


def test_what_was_trained_before_changes_nothing(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fit = replace(whole(tiny_net), epochs=2)
    augment = AugmentConfig(flip=True, crop=0.2, brightness=0.3)
    shards = {client: make_shard(10 * client, 10 * client + 9) for client in range(4)}

    def train(order: list[int]) -> dict[int, FitResult]:
        trainer = make_trainer(augment, mask_ratio=0.25, batch_size=4, clip=1.0)
        return {client: trainer.fit(fit, shards[client], replace(PLACE, client=client)) for client in order}

    forward, backward, alone = train([0, 1, 2, 3]), train([3, 1, 0, 2]), train([2])
    torch.rand(100)  # nor does anybody else's use of torch's own generator
    for client in range(4):
        assert_same(forward[client].weights, backward[client].weights)
        assert torch.equal(forward[client].loss, backward[client].loss)
    assert_same(forward[2].weights, alone[2].weights)


@pytest.mark.parametrize(
    "other",
    [replace(PLACE, seed=8), replace(PLACE, round=4), replace(PLACE, client=3), replace(PLACE, first_epoch=1)],
    ids=["seed", "round", "client", "epoch"],
)
def test_another_place_draws_other_numbers(
    other: RngContext, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fit = whole(tiny_net)
    trainer = make_trainer(**PLAIN_SGD, batch_size=4)  # constant rate: only the order can differ
    here, there = (trainer.fit(fit, make_shard(0, 20), place) for place in (PLACE, other))
    assert furthest(here.weights, there.weights) > 1e-6
