"""BCN: Raghavan and Balaprakash, "Formalizing the Generalization-Forgetting Trade-off in Continual Learning", 2021.

Balanced continual learning (arXiv 2109.14035; FedViT's paper calls it BCN), inside federated averaging. A step is a
game of two players on samples x of earlier tasks: one perturbs them to raise their loss J (lack of generalisation), the
other moves a copy of the weights θ to lower it (forgetting). θ then descends along the gradient of

    H = β J_new + J(x, θ) + [J(x′, θ) − J(x, θ)] + [J(x, θ′) − J(x, θ)].

Player 1 maximises J over x′, by some steps of gradient ascent; player 2 minimises it over θ′, by some steps of gradient
descent. Decisions:

- x′ = x + ε g/‖g‖ with the gradient g of each image's loss, in the model's normalised input; θ′ = θ − η ∇J(x, θ).
- x′ − x and θ′ − θ are constants when H is differentiated: ∇H = β∇J_new + ∇J(x′, θ) + ∇J(x, θ′) − ∇J(x, θ). (The
  authors' code does not differentiate J(x, θ′) at all. With one step each the memory's gradients then cancel.)
- Defaults are the authors' for CIFAR-100: β = 0.99, ε = 1e-3, η = 1e-5, one step each, as many samples of the memory as
  of the batch. The samples are those of earlier tasks; the authors' code draws from the batch too.
- In a client's first task there is no memory: it minimises J_new.
- What is stored, and how samples are drawn, is as in
  :mod:`~vitfleet.methods.continual.replay.experience_replay`. The body is shared; heads are local by default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Tensors
from vitfleet.methods.base import Work
from vitfleet.methods.continual.replay.experience_replay import REPLAY, ReplayMethod, ReplayParams
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import Step, StepView

MIN_NORM = 1e-12  # of the gradient of an image; one without gradient is not perturbed


class BcnParams(ReplayParams):
    """Two players perturb stored samples and weights; the step balances them (balanced continual learning, BCN)."""

    beta: float = Field(0.99, ge=0, description="weight β of the batch's loss")
    epsilon: float = Field(
        1e-3, ge=0, description="length ε of a step that perturbs a stored sample, in the model's normalised input"
    )
    ascent_steps: int = Field(1, ge=1, le=100, description="steps that perturb the stored samples of a training step")
    descent_rate: float = Field(1e-5, ge=0, description="learning rate η of the copy of the weights")
    descent_steps: int = Field(1, ge=1, le=100, description="steps of the copy of the weights in a training step")


@register_method("bcn", BcnParams, title="BCN")
class Bcn(ReplayMethod[BcnParams]):
    """Balanced continual learning."""

    @classmethod
    def declared_work(cls, params: BcnParams, config: Config) -> Work:
        """Return the work with the passes of stored samples that the two players make."""
        passes = 1 + params.ascent_steps + params.descent_steps
        return replace(super().declared_work(params, config), passes=passes)

    @property
    def replay_step(self) -> Step:
        """The game of two players in every step."""
        params = self.params
        return GameStep(params.beta, params.epsilon, params.ascent_steps, params.descent_rate, params.descent_steps)


@dataclass(frozen=True)
class GameStep:
    """Follows the gradient of H, in which both displacements are constants."""

    beta: float
    epsilon: float  # player 1: the length of each step, for each image, in the model's normalised input
    ascent_steps: int
    descent_rate: float  # player 2
    descent_steps: int

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return β∇J_new + ∇J(x′, θ) + ∇J(x, θ′) − ∇J(x, θ)."""
        new = view.value_and_grad(cross_entropy, batch)
        memory, weights = view.drawn(REPLAY), view.weights
        origin = view.zero_perturbation(memory)
        resting = view.value_and_grad(cross_entropy, memory, perturbation=origin, input_gradient=True)
        assert resting.input_gradient is not None
        perturbation = origin + self.epsilon * unit_per_image(resting.input_gradient)
        for _ in range(self.ascent_steps - 1):
            gradient = view.input_grad(cross_entropy, memory, perturbation=perturbation)
            perturbation = perturbation + self.epsilon * unit_per_image(gradient)
        perturbed = view.value_and_grad(cross_entropy, memory, perturbation=perturbation)
        displaced = self.descend(weights, resting.gradients)
        for _ in range(self.descent_steps - 1):
            displaced = self.descend(displaced, view.grad(cross_entropy, memory, at=displaced))
        moved = view.value_and_grad(cross_entropy, memory, at=displaced)
        view.report_mean(
            self.beta * new.losses
            + resting.losses
            + (perturbed.losses - resting.losses)
            + (moved.losses - resting.losses)
        )
        total = {name: self.beta * gradient for name, gradient in new.gradients.items()}
        # J(x, θ) occurs once with a plus and twice with a minus.
        for gradients, sign in ((resting.gradients, -1.0), (perturbed.gradients, 1.0), (moved.gradients, 1.0)):
            torch._foreach_add_(list(total.values()), list(gradients.values()), alpha=sign)
        return total

    def descend(self, weights: Tensors, gradients: Tensors) -> Tensors:
        """Return θ′ after one step of gradient descent."""
        return {name: weight - self.descent_rate * gradients[name] for name, weight in weights.items()}


def unit_per_image(gradient: Tensor) -> Tensor:
    """Return the gradient of each image, ``[…, channels, height, width]``, scaled to length 1."""
    lengths: Tensor = torch.linalg.vector_norm(gradient, dim=(-3, -2, -1), keepdim=True)
    return gradient / lengths.clamp(min=MIN_NORM)
