"""Composed weights: trained through their composition, stacked, captured and scored as one client alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import ModelConfig
from vitfleet.data.images import Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.methods.continual.decomposition import ComposedSelection
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.local_training import EpisodicMemory
from vitfleet.training.stack_inputs import ClientFit, RngContext
from vitfleet.training.step import Fit, Objective
from vitfleet.training.step_runner import CudaGraphRunner
from vitfleet.training.trainer import Trainer, preprocess_for

SIZES = (20, 11, 36, 3)
PLAIN_SGD: dict[str, object] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.05}


@dataclass(frozen=True)
class Scaled:
    """A weight is a trained number times itself, and a constant."""

    name: str

    def __call__(self, trained: Tensors, constants: Tensors) -> Tensors:
        return {self.name: trained["scale"] * trained[self.name] + constants["shift"]}


def scaled_name(net: Net) -> str:
    return next(name for name in net.anatomy.blocks[0] if name.endswith("qkv.weight"))


def scaled_fit(net: Net, seed: int, epochs: int = 2) -> Fit:
    name, random = scaled_name(net), torch.Generator().manual_seed(seed)
    weights = {
        key: tensor.double() + 0.05 * torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        for key, tensor in net.initial_weights().items()
    }
    shift = 0.1 * torch.randn(weights[name].shape, generator=random, dtype=torch.float64)
    trainable = ComposedSelection((*net.anatomy.whole, "scale"), Scaled(name))
    scale = torch.tensor(0.5 + 0.1 * seed, dtype=torch.float64)
    return Fit({**weights, "scale": scale}, Objective(trainable), epochs, {"shift": shift}, score_samples=True)


def in_double(trainer: Trainer) -> Trainer:
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    return replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))


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
    shard, fit = make_shard(0, 12), scaled_fit(net, 1, epochs=1)
    trainer = make_trainer(batch_size=16, **PLAIN_SGD)
    trainer = in_double(replace(trainer, net=net, preprocess=preprocess_for(net, torch.device("cpu"))))
    result = trainer.fit(fit, shard, RngContext(0, 1, 0))
    name = scaled_name(net)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in fit.weights.items()}
    model = {key: tensor for key, tensor in leaves.items() if key != "scale"}
    model[name] = leaves["scale"] * leaves[name] + fit.constants["shift"]
    loss = F.cross_entropy(logits_of(net, model, shard), shard.labels)
    for key, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(result.weights[key], fit.weights[key] - 0.05 * gradient)
    after = {key: tensor for key, tensor in result.weights.items() if key != "scale"}
    after[name] = result.weights["scale"] * result.weights[name] + fit.constants["shift"]
    torch.testing.assert_close(result.sample_logits.double(), logits_of(net, after, shard), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("train", [{}, {**PLAIN_SGD, "clip": 0.1}], ids=str)
def test_stacked_and_captured_as_alone(
    train: dict[str, object],
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = in_double(make_trainer(batch_size=8, **train))
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    for round in (1, 2):
        group = [
            ClientFit(scaled_fit(tiny_net, 10 * round + client), make_shard(0, size), RngContext(7, round, client))
            for client, size in enumerate(SIZES)
        ]
        alone = [eager.fit(client_fit.fit, client_fit.shard, client_fit.rng) for client_fit in group]
        for trainer in (eager, graphed):
            for result, expected in zip(trainer.fit_cohort(group), alone, strict=True):
                for name, tensor in expected.weights.items():
                    torch.testing.assert_close(result.weights[name], tensor, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(result.sample_losses, expected.sample_losses, rtol=1e-4, atol=1e-5)
    assert len(set(map(id, captured))) == 1, "the captured step serves the second group"


def test_composed_weights_have_no_memory(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    images = torch.zeros(1, 8, 1, 8, 8, dtype=torch.uint8)
    memory = EpisodicMemory(images, torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8) / 8, (8,))
    fit = replace(scaled_fit(tiny_net, 0), memory=memory)
    with pytest.raises(ValueError, match="a fit has a memory and composed weights"):
        make_trainer().fit(fit, make_shard(0, 8), RngContext(0, 1, 0))
