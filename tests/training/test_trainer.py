"""The trainer computes what a plain training loop on timm's own module computes."""

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
from vitfleet.models.forward.functional_vit import FunctionalViT
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.optimizers.optimizer import learning_rate
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.step import StepView
from vitfleet.training.trainer import Trainer

RNG = RngContext(seed=7, round=3, client=2)
PLAIN_SGD: Mapping[str, object] = {
    "optimizer": "sgd",
    "momentum": 0,
    "weight_decay": 0,
    "lr": 0.1,
    "schedule": "constant",
}


def whole_model(net: Net) -> LocalTraining:
    return LocalTraining(net.initial_weights(), net.parts.whole, epochs=1)


def plain_module(net: Net, weights: Tensors) -> nn.Module:
    """Return timm's own module, to be trained without functional calls."""
    module = copy.deepcopy(net.module.vit)
    module.load_state_dict(dict(weights))
    return module.requires_grad_(True).train()


def epoch_order(rng: RngContext, epoch: int, samples: int) -> Tensor:
    generator = Address(rng.seed, Purpose.ORDER, rng.round, rng.client, epoch).generator()
    return torch.from_numpy(generator.permutation(samples))


def preprocessed(shard: Shard, index: Tensor) -> tuple[Tensor, Tensor]:
    indices = shard.index[index]
    return (shard.images.images[indices].float() / 255 - 0.5) / 0.5, shard.images.labels[indices]


def expected_gradients(net: Net, weights: Tensors, shard: Shard, index: Tensor) -> dict[str, Tensor]:
    module = plain_module(net, weights)
    images, labels = preprocessed(shard, index)
    names, leaves = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.cross_entropy(module(images), labels), leaves)
    return dict(zip(names, gradients, strict=True))


def assert_close(actual: Tensors, expected: Tensors, tolerance: float = 1e-6) -> None:
    assert set(actual) == set(expected)
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=tolerance, msg=name)


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert set(actual) == set(expected)
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


def without_key_bias(weights: Tensors) -> dict[str, Tensor]:
    """Drop the bias of the keys: softmax ignores it, and AdamW scales the rounding errors of its gradient up."""
    kept = dict(weights)
    for name in [name for name in weights if name.endswith("attn.qkv.bias")]:
        query, _, value = torch.chunk(kept[name], 3)
        kept[name] = torch.cat([query, value])
    return kept


def max_difference(actual: Tensors, expected: Tensors) -> float:
    return max(float((actual[name] - expected[name]).abs().max()) for name in actual)


def test_one_sgd_step_is_weights_minus_learning_rate_times_gradient(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    shard = make_shard(0, 12)
    training = whole_model(tiny_net)
    gradients = expected_gradients(tiny_net, training.weights, shard, epoch_order(RNG, 0, 12))
    result = make_trainer(**PLAIN_SGD, batch_size=16).train(training, shard, RNG)
    assert result.steps == 1
    assert_close(
        result.weights, {name: training.weights[name] - 0.1 * gradients[name] for name in training.weights}, 1e-7
    )
    assert max_difference(result.weights, training.weights) > 1e-3


def train_with_torch(
    net: Net, trainer: Trainer, training: LocalTraining, shard: Shard, rng: RngContext
) -> tuple[nn.Module, float]:
    config = trainer.config
    module = plain_module(net, training.weights)
    lr = learning_rate(config, rng.round, trainer.rounds)
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            module.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    total = 0.0
    for epoch in range(rng.first_epoch, rng.first_epoch + training.epochs):
        for index in torch.split(epoch_order(rng, epoch, len(shard)), config.batch_size):
            images, labels = preprocessed(shard, index)
            loss = F.cross_entropy(module(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm)
            optimizer.step()
            total += loss.item() * len(index)
    return module, total / (len(shard) * training.epochs)


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "adamw", "max_grad_norm": 0.5, "lr": 1e-3, "batch_size": 8, "warmup_rounds": 5},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.5, "batch_size": 7},
        {"optimizer": "sgd", "max_grad_norm": 0.2, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 8},
    ],
)
def test_training_equals_a_plain_torch_loop(
    train: dict[str, object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    shard = make_shard(3, 30)  # 27 images: the last batch is smaller
    trainer = make_trainer(**train)
    training = replace(whole_model(tiny_net), epochs=4)
    rng = replace(RNG, first_epoch=2)
    result = trainer.train(training, shard, rng)
    module, loss = train_with_torch(tiny_net, trainer, training, shard, rng)
    assert_close(without_key_bias(result.weights), without_key_bias(module.state_dict()))
    assert float(result.loss) == pytest.approx(loss, rel=1e-5)
    assert (result.samples, result.steps) == (27, 16)


def test_clip_bounds_the_norm_of_the_step(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    training = whole_model(tiny_net)
    result = make_trainer(**PLAIN_SGD, max_grad_norm=1e-2, batch_size=64).train(training, make_shard(0, 20), RNG)
    squares = [(result.weights[name] - training.weights[name]).double().square().sum() for name in training.weights]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(0.1 * 1e-2, rel=1e-3)


noted: list[set[str]] = []


def noting_loss(outputs: Outputs) -> Tensor:
    noted.append(set(outputs.weights))
    return cross_entropy(outputs)


def noting_step(view: StepView, batch: Samples) -> Tensors:
    noted.append(set(view.weights))
    return view.grad(noting_loss, batch)


def test_frozen_weights_are_unchanged_and_have_no_gradient(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    noted.clear()
    weights = tiny_net.initial_weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    training = LocalTraining(weights, tiny_net.parts.head, 2, noting_step)
    result = make_trainer(batch_size=8).train(training, make_shard(0, 20), RNG)
    head = set(tiny_net.parts.head)
    assert set(result.weights) == head
    assert noted == [head] * 2 * result.steps
    assert_same(weights, before)
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in weights.values())
    assert max_difference(result.weights, tiny_net.parts.head.take(before)) > 1e-4


def test_training_changes_neither_its_inputs_nor_the_net(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    training = whole_model(tiny_net)
    before = {name: tensor.clone() for name, tensor in training.weights.items()}
    result = make_trainer().train(training, make_shard(0, 20), RNG)
    assert_same(training.weights, before)
    assert_same(tiny_net.initial_weights(), before)
    assert max_difference(result.weights, before) > 1e-4
    input_pointers = {tensor.data_ptr() for tensor in training.weights.values()}
    assert not input_pointers & {tensor.data_ptr() for tensor in result.weights.values()}
    assert not any(tensor.requires_grad for tensor in result.weights.values())


@dataclass(frozen=True)
class ScaledHeadStep:
    """Scales the gradients of the head and sets all others to zero; adds up the squares of all before that."""

    factor: float

    @staticmethod
    def kept(weights: Tensors) -> dict[str, Tensor]:
        return {name: torch.zeros_like(weight) for name, weight in weights.items()} | {"samples": torch.zeros(())}

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        gradients = view.grad(cross_entropy, batch)
        view.count({name: gradient.square() for name, gradient in gradients.items()})
        view.count({"samples": view.map(lambda weight: (weight > 0).sum(), batch.sample_weight)})
        return {
            name: gradient * (self.factor if name.startswith("head.") else 0) for name, gradient in gradients.items()
        }


def test_the_gradients_that_a_step_returns_are_applied(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    shard = make_shard(0, 12)
    weights = tiny_net.initial_weights()
    training = LocalTraining(weights, tiny_net.parts.whole, 1, ScaledHeadStep(2), kept=ScaledHeadStep.kept(weights))
    result = make_trainer(**PLAIN_SGD).train(training, shard, RNG)
    gradients = expected_gradients(tiny_net, weights, shard, epoch_order(RNG, 0, 12))
    factor = {name: 0.2 if name.startswith("head.") else 0.0 for name in weights}
    assert_close(result.weights, {name: weights[name] - factor[name] * gradients[name] for name in weights}, 1e-7)
    assert torch.equal(result.weights["cls_token"], weights["cls_token"])
    assert result.steps == 1


def test_a_step_sees_gradients_before_they_are_clipped(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    stop = ScaledHeadStep(0)  # the weights stay the same at every step
    shard = make_shard(0, 20)
    weights = tiny_net.initial_weights()
    trainer = make_trainer(**PLAIN_SGD, max_grad_norm=1e-6, batch_size=8)
    training = LocalTraining(weights, tiny_net.parts.whole, 2, stop, kept=stop.kept(weights))
    result = trainer.train(training, shard, RNG)
    assert_same(result.weights, weights)
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for epoch in (0, 1):
        for index in torch.split(epoch_order(RNG, epoch, 20), 8):
            for name, gradient in expected_gradients(tiny_net, weights, shard, index).items():
                squares[name] += gradient.square()
    assert float(result.kept["samples"]) == 40
    assert_close({name: result.kept[name] for name in squares}, squares)
    assert float(squares["head.weight"].sum()) > 1e-3


def counting_step(view: StepView, batch: Samples) -> Tensors:
    gradients = view.grad(cross_entropy, batch)
    view.count({name: gradient.square() for name, gradient in gradients.items()})
    return gradients


def test_what_a_step_keeps_does_not_change_the_training(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    training = whole_model(tiny_net)
    zeros = {name: torch.zeros_like(weight) for name, weight in training.weights.items()}
    trainer = make_trainer(max_grad_norm=0.1)
    plain = trainer.train(training, make_shard(0, 20), RNG)
    counted = trainer.train(replace(training, step=counting_step, kept=zeros), make_shard(0, 20), RNG)
    assert_same(counted.weights, plain.weights)
    assert max_difference(counted.kept, zeros) > 0
    assert_same(zeros, {name: torch.zeros_like(tensor) for name, tensor in zeros.items()})
    assert plain.kept == {}


def test_client_without_images_takes_no_step(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    training = replace(whole_model(tiny_net), epochs=3)
    result = make_trainer(weight_decay=0.5).train(training, make_shard(4, 4), RNG)
    assert_same(result.weights, training.weights)
    assert (float(result.loss), result.samples, result.steps) == (0.0, 0, 0)


def test_mask_keeps_some_patches_and_the_class_token(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    run_block = FunctionalViT.block

    def record_tokens(self: FunctionalViT, weights: Tensors, index: int, inputs: Tensor) -> Tensor:
        if index == 0:
            tokens.append(inputs.shape[1])
        return run_block(self, weights, index, inputs)

    monkeypatch.setattr(FunctionalViT, "block", record_tokens)
    training = replace(whole_model(tiny_net), epochs=2)
    shard = make_shard(0, 20)
    masked = make_trainer(mask_ratio=0.5, batch_size=8).train(training, shard, RNG)
    assert tokens == [1 + 2] * 6  # two of four patches, in 2 epochs x 3 steps
    assert masked.steps == 6
    assert torch.isfinite(masked.loss)
    assert max_difference(masked.weights, training.weights) > 1e-4
    tokens.clear()
    unmasked = make_trainer(batch_size=8).train(training, shard, RNG)
    assert tokens == [1 + 4] * 6
    assert max_difference(masked.weights, unmasked.weights) > 1e-5


@pytest.mark.parametrize(
    "augment",
    [AugmentConfig(flip=True), AugmentConfig(crop=0.3), AugmentConfig(brightness=0.5)],
    ids=["flip", "crop", "brightness"],
)
def test_augmentation_changes_the_trained_weights(
    augment: AugmentConfig, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    training, shard = whole_model(tiny_net), make_shard(0, 20)
    plain = make_trainer().train(training, shard, RNG)
    augmented = make_trainer(augment).train(training, shard, RNG)
    assert max_difference(plain.weights, augmented.weights) > 1e-5


def test_training_does_not_depend_on_earlier_ones(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    training = replace(whole_model(tiny_net), epochs=2)
    augment = AugmentConfig(flip=True, crop=0.2, brightness=0.3)
    shards = {client: make_shard(10 * client, 10 * client + 9) for client in range(4)}

    def train(order: list[int]) -> dict[int, LocalResult]:
        trainer = make_trainer(augment, mask_ratio=0.25, batch_size=4, max_grad_norm=1.0)
        return {client: trainer.train(training, shards[client], replace(RNG, client=client)) for client in order}

    forward, backward, alone = train([0, 1, 2, 3]), train([3, 1, 0, 2]), train([2])
    torch.rand(100)  # draws from torch's global generator change nothing either
    for client in range(4):
        assert_same(forward[client].weights, backward[client].weights)
        assert torch.equal(forward[client].loss, backward[client].loss)
    assert_same(forward[2].weights, alone[2].weights)


@pytest.mark.parametrize(
    "other",
    [replace(RNG, seed=8), replace(RNG, round=4), replace(RNG, client=3), replace(RNG, first_epoch=1)],
    ids=["seed", "round", "client", "epoch"],
)
def test_another_rng_context_draws_other_numbers(
    other: RngContext, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    training = whole_model(tiny_net)
    trainer = make_trainer(**PLAIN_SGD, batch_size=4)  # with a constant learning rate, only the order can differ
    results = [trainer.train(training, make_shard(0, 20), rng) for rng in (RNG, other)]
    assert max_difference(results[0].weights, results[1].weights) > 1e-6
