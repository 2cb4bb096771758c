"""The game of two players: on a toy problem against autograd, and stacked and captured on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig
from vitfleet.data.images import ImageSet
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.methods.continual.replay.bcn import GameStep, unit_per_image
from vitfleet.methods.continual.replay.experience_replay import REPLAY
from vitfleet.models.net import Net
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalResult, LocalTraining, SampleSet
from vitfleet.training.passes import Pass
from vitfleet.training.stacking.inputs import ClientTraining, RngContext

GAME = GameStep(beta=0.9, epsilon=0.3, ascent_steps=1, descent_rate=0.05, descent_steps=1)
GAMES = [GAME, replace(GAME, ascent_steps=3, descent_steps=2)]


@dataclass(frozen=True)
class Toy:
    """Logistic regression of few samples; images are ``[samples, 1, 1, 3]``."""

    new_images: Tensor
    images: Tensor
    labels: Tensor

    @classmethod
    def make(cls, seed: int) -> Toy:
        random = torch.Generator().manual_seed(seed)
        images = torch.randn(2, 6, 1, 1, 3, generator=random, dtype=torch.float64)
        labels = torch.randint(0, 2, (6,), generator=random).double()
        return cls(images[0], images[1], labels)

    def loss(self, images: Tensor, weights: Tensors) -> Tensor:
        scores = images.flatten(1) @ weights["w"] + weights["b"]
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, self.labels)

    def new(self, weights: Tensors) -> Tensor:
        return self.loss(self.new_images, weights)

    def memory(self, weights: Tensors, perturbation: Tensor) -> Tensor:
        return self.loss(self.images + perturbation, weights)

    def play(self, game: GameStep, weights: Tensors) -> tuple[Tensor, Tensors]:
        view: Any = ToyView(self, weights)
        gradients = game(view, view.batch)
        return view.value, gradients


class ToyView:
    """What a step sees of the toy problem; samples are their name."""

    batch = "batch"

    def __init__(self, toy: Toy, weights: Tensors) -> None:
        self.toy, self.weights = toy, weights
        self.value = torch.zeros(())

    def drawn(self, name: str) -> str:
        return name

    def zero_perturbation(self, samples: str) -> Tensor:
        return torch.zeros_like(self.toy.images)

    def report_mean(self, value: Tensor) -> None:
        self.value = value

    def value_and_grad(
        self,
        loss: object,
        samples: str,
        perturbation: Tensor | None = None,
        input_gradient: bool = False,
        at: Tensors | None = None,
    ) -> Pass:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in (at or self.weights).items()}
        shift = (self.zero_perturbation(samples) if perturbation is None else perturbation.clone()).requires_grad_()
        value = self.toy.new(leaves) if samples == self.batch else self.toy.memory(leaves, shift)
        *gradients, of_input = torch.autograd.grad(value, [*leaves.values(), shift], allow_unused=True)
        found = of_input if input_gradient else None
        return Pass(dict(zip(leaves, gradients, strict=True)), value.detach(), (), found)

    def grad(self, loss: object, samples: str, at: Tensors) -> Tensors:
        return self.value_and_grad(loss, samples, at=at).gradients

    def input_grad(self, loss: object, samples: str, perturbation: Tensor) -> Tensor:
        found = self.value_and_grad(loss, samples, perturbation, input_gradient=True).input_gradient
        assert found is not None
        return found


def start() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64), "b": torch.tensor(0.2, dtype=torch.float64)}


def gradient_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient


@pytest.mark.parametrize("game", GAMES, ids=["one step", "several steps"])
def test_value_and_gradient_are_those_of_autograd_by_hand(game: GameStep) -> None:
    toy, weights = Toy.make(0), start()
    shifts = torch.zeros_like(toy.images)
    for _ in range(game.ascent_steps):
        gradient = gradient_of(lambda shift: toy.memory(weights, shift), shifts)
        for sample in range(6):
            shifts[sample] += game.epsilon * gradient[sample] / gradient[sample].norm()
    zero, moved = torch.zeros_like(shifts), weights
    for _ in range(game.descent_steps):
        w, b = moved["w"], moved["b"]
        by_w = gradient_of(lambda each, b=b: toy.memory({"w": each, "b": b}, zero), w)  # type: ignore[misc]
        by_b = gradient_of(lambda each, w=w: toy.memory({"w": w, "b": each}, zero), b)  # type: ignore[misc]
        moved = {"w": w - game.descent_rate * by_w, "b": b - game.descent_rate * by_b}
    displacement = {name: moved[name] - weights[name] for name in weights}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    resting = toy.memory(leaves, zero)
    raised = toy.memory(leaves, shifts) - resting
    lowered = toy.memory({name: leaves[name] + displacement[name] for name in leaves}, zero) - resting
    assert float(raised.detach()) > 0 > float(lowered.detach()), "one player raises the loss, the other lowers it"
    h = game.beta * toy.new(leaves) + resting + raised + lowered
    expected = dict(zip(leaves, torch.autograd.grad(h, list(leaves.values())), strict=True))
    value, gradients = toy.play(game, weights)
    torch.testing.assert_close(value, h.detach())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)


@pytest.mark.parametrize("game", GAMES, ids=["one step", "several steps"])
def test_the_games_value_decreases_along_its_gradient(game: GameStep) -> None:
    toy, weights, values = Toy.make(1), start(), []
    for _ in range(60):
        value, gradients = toy.play(game, weights)
        values.append(float(value))
        weights = {name: tensor - 0.2 * gradients[name] for name, tensor in weights.items()}
    assert all(later < earlier for earlier, later in pairwise(values))
    assert values[-1] < 0.8 * values[0]


def test_an_image_without_gradient_is_not_perturbed() -> None:
    gradient = torch.zeros(2, 1, 2, 2)
    gradient[1] = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    torch.testing.assert_close(unit_per_image(gradient)[1], gradient[1] / 5)
    assert not unit_per_image(gradient)[0].any()


def assert_close(results: list[LocalResult], expected: list[LocalResult]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert result.steps == reference.steps
        torch.testing.assert_close(result.loss, reference.loss, rtol=1e-5, atol=1e-6)
        for name, tensor in reference.weights.items():
            distance = float((result.weights[name] - tensor).norm())
            assert distance <= 1e-4 * float(tensor.norm()) + 1e-6, name


@pytest.mark.parametrize(("game", "mask_ratio"), [(GAMES[0], 0.5), (GAMES[1], 0.0)], ids=["one step", "several steps"])
def test_stacked_and_captured_clients_play_as_each_would_alone(
    game: GameStep,
    mask_ratio: float,
    captured: list[CudaGraphRunner],
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    augment = AugmentConfig(crop=0.25, flip=True, brightness=0.4)
    trainer = make_trainer(augment, batch_size=8, mask_ratio=mask_ratio, optimizer="sgd", lr=0.05)
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(
        trainer,
        preprocess=Preprocess(trainer.preprocess.image_size, mean, std),
        class_to_task=torch.tensor([0, 0, 1, 1, 1]),
    )
    graphed = replace(trainer, machine=replace(trainer.machine, graphs=True))
    weights = {name: tensor.double() for name, tensor in tiny_net.initial_weights().items()}
    group = []
    for client, (size, stored) in enumerate(((20, 3), (9, 17), (15, 8))):
        drawn = SampleSet(tiny_images.images[None, :stored], tiny_images.labels[None, :stored], (stored,), draws=2)
        training = LocalTraining(weights, tiny_net.parts.whole, 1, game, sets={REPLAY: drawn})
        group.append(ClientTraining(training, make_shard(client, client + size), RngContext(7, 3, client)))
    alone = [trainer.train(each.training, each.shard, each.rng) for each in group]
    assert_close(trainer.train_together(group), alone)
    assert_close(graphed.train_together(group), alone)
    assert captured
