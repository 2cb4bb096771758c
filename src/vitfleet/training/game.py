"""A two-player game in every step, on stored samples: one player perturbs the images, the other moves the weights.

With the loss J_new of the batch and the loss J of the replayed samples x at the weights θ, a step minimises

    H(θ) = β J_new(θ) + J(x, θ) + [J(x + Δx, θ) − J(x, θ)] + [J(x, θ + Δθ) − J(x, θ)].

Player 1 maximises J over Δx, by some steps of gradient ascent; player 2 minimises it over Δθ, by some steps of gradient
descent of a copy of θ. The gradient of H is taken with both displacements held constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.training.gradients import client_gradients
from vitfleet.training.objective import Loss, Step

MIN_NORM = 1e-12  # of the gradient of an image; one without gradient is not perturbed


@dataclass(frozen=True)
class SequentialGame:
    """The loss H of an objective. Without replayed samples it is ``loss``.

    Attributes
    ----------
    loss
        J, of the batch and of the replayed samples.
    beta
        β, the weight of the batch's loss.
    epsilon, ascent_steps
        Player 1: the length of each step, for each image, in the model's normalised input, and the number of steps.
    descent_rate, descent_steps
        Player 2: the learning rate and the number of steps.
    """

    loss: Loss
    beta: float
    epsilon: float
    ascent_steps: int
    descent_rate: float
    descent_steps: int

    def __call__(self, step: Step) -> Tensor:
        """Return J of a step."""
        return self.loss(step)

    @property
    def memory_passes(self) -> int:
        """How often the replayed samples pass through the model: the first steps of both players share one."""
        return self.ascent_steps + self.descent_steps + 1


MemoryLoss = Callable[[Tensors, Tensor], Tensor]


def game_gradients(
    game: SequentialGame, new: Tensor, memory: MemoryLoss, leaves: Mapping[str, Tensor], origin: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return H and its gradient, of one client or of each of several.

    Parameters
    ----------
    new
        J_new, ``[clients]`` or a scalar.
    memory
        J as a function of the weights that train and of the images' perturbation, in the form of ``new``.
    leaves
        The weights that train.
    origin
        A perturbation of zeros, ``[…, channels, height, width]``.
    """
    total = {name: game.beta * gradient for name, gradient in client_gradients(new, leaves).items()}

    def add(gradients: Tensors, factor: float = 1.0) -> None:
        torch._foreach_add_(list(total.values()), list(gradients.values()), alpha=factor)

    names, at_origin = list(leaves), origin.detach().requires_grad_()
    resting = memory(leaves, at_origin)
    ascent, *descent = torch.autograd.grad(
        resting.sum(), [at_origin, *leaves.values()], allow_unused=True, materialize_grads=True
    )
    gradients = dict(zip(names, descent, strict=True))
    add(gradients, -1.0)  # J occurs once with a plus and twice with a minus
    perturbed = memory(leaves, _ascend(game, memory, leaves, at_origin, ascent))
    add(client_gradients(perturbed, leaves))
    displaced = _descend(game, memory, leaves, origin, gradients)
    moved = memory(displaced, origin)
    add(client_gradients(moved, displaced))
    value = game.beta * new + resting + (perturbed - resting) + (moved - resting)
    return value.detach(), total


def _ascend(
    game: SequentialGame, memory: MemoryLoss, leaves: Mapping[str, Tensor], origin: Tensor, gradient: Tensor
) -> Tensor:
    """Return Δx after player 1's steps, the first of which follows a given gradient."""
    fixed = {name: leaf.detach() for name, leaf in leaves.items()}
    perturbation = (origin + game.epsilon * unit_per_image(gradient)).detach()
    for _ in range(game.ascent_steps - 1):
        perturbation.requires_grad_()
        (gradient,) = torch.autograd.grad(memory(fixed, perturbation).sum(), perturbation)
        perturbation = (perturbation + game.epsilon * unit_per_image(gradient)).detach()
    return perturbation


def _descend(
    game: SequentialGame, memory: MemoryLoss, leaves: Mapping[str, Tensor], origin: Tensor, gradients: Tensors
) -> dict[str, Tensor]:
    """Return θ + Δθ after player 2's steps, the first of which follows given gradients."""

    def step(weights: Mapping[str, Tensor], gradients: Tensors) -> dict[str, Tensor]:
        return {
            name: (weight.detach() - game.descent_rate * gradients[name]).requires_grad_()
            for name, weight in weights.items()
        }

    displaced = step(leaves, gradients)
    for _ in range(game.descent_steps - 1):
        displaced = step(displaced, client_gradients(memory(displaced, origin), displaced))
    return displaced


def unit_per_image(gradient: Tensor) -> Tensor:
    """Return the gradient of each image, ``[…, channels, height, width]``, scaled to length 1."""
    lengths: Tensor = torch.linalg.vector_norm(gradient, dim=(-3, -2, -1), keepdim=True)
    return gradient / lengths.clamp(min=MIN_NORM)
