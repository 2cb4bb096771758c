"""Composed weights: trained through their composition, stacked and captured as one client alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from clients_alone import check_every_way, in_double, make_group
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import ModelConfig
from vitfleet.data.images import Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.models.zoo import build_model
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.step import StepView
from vitfleet.training.trainer import preprocess_for

PLAIN_SGD: dict[str, object] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.05}


@dataclass(frozen=True)
class ScaledStep:
    """A weight is a trained number times itself, and a constant."""

    name: str

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch, compose=self.compose)

    def compose(self, trained: Tensors, constants: Tensors) -> Tensors:
        return {self.name: trained["scale"] * trained[self.name] + constants["shift"]}


def scaled_name(net: Net) -> str:
    return next(name for name in net.parts.blocks[0] if name.endswith("qkv.weight"))


def scaled_training(net: Net, seed: int, epochs: int = 2) -> LocalTraining:
    name, random = scaled_name(net), torch.Generator().manual_seed(seed)
    weights = {
        key: tensor.double() + 0.05 * torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        for key, tensor in net.initial_weights().items()
    }
    shift = 0.1 * torch.randn(weights[name].shape, generator=random, dtype=torch.float64)
    weights["scale"] = torch.tensor(0.5 + 0.1 * seed, dtype=torch.float64)
    trainable = Selection((*net.parts.whole, "scale"))
    return LocalTraining(weights, trainable, epochs, ScaledStep(name), constants={"shift": shift})


def logits_of(net: Net, weights: Tensors, shard: Shard) -> Tensor:
    mean, std = (torch.tensor(numbers).reshape(-1, 1, 1).double() for numbers in (net.mean, net.std))
    pixels = (shard.images.images[shard.index].double() / 255 - mean) / std
    logits: Tensor = functional_call(net.module.vit, dict(weights), (pixels,))
    return logits


@pytest.mark.parametrize("family", ["vit", "cait"])
def test_a_step_follows_the_gradient_through_the_composition(
    family: str, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Also where timm's own module is called, which does not take tensors that it does not have."""
    cait = ModelConfig(name="cait_xxs24_224", image_size=8, patch_size=4, depth=1)
    net = tiny_net if family == "vit" else build_model(cait, 5, 1, 8, 0)
    shard, training = make_shard(0, 12), scaled_training(net, 1, epochs=1)
    trainer = make_trainer(batch_size=16, **PLAIN_SGD)
    trainer = in_double(replace(trainer, net=net, preprocess=preprocess_for(net, torch.device("cpu"))))
    result = trainer.train(training, shard, RngContext(0, 1, 0))
    name = scaled_name(net)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in training.weights.items()}
    model = {key: tensor for key, tensor in leaves.items() if key != "scale"}
    model[name] = leaves["scale"] * leaves[name] + training.constants["shift"]
    loss = F.cross_entropy(logits_of(net, model, shard), shard.labels)
    torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-6, atol=0)
    for key, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(result.weights[key], training.weights[key] - 0.05 * gradient)
    assert not torch.equal(result.weights["scale"], training.weights["scale"])


@pytest.mark.parametrize("train", [{}, {**PLAIN_SGD, "max_grad_norm": 0.1}], ids=str)
def test_stacked_and_captured_as_alone(
    train: dict[str, object], tiny_net: Net, captured: list[object], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = in_double(make_trainer(batch_size=8, **train))
    for round in (1, 2):
        trainings = [scaled_training(tiny_net, 10 * round + client) for client in range(4)]
        check_every_way(trainer, make_group(trainings, make_shard, round))
    assert len(set(map(id, captured))) == 2, "the captured steps, of stacked clients and of one, serve the second group"
