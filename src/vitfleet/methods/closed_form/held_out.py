"""Regularisation and temperature by images that clients hold out, where they are not chosen from the sums alone.

A client leaves a share of its images, drawn once, out of its first sums, and keeps their features. When it is asked
again, the server sends the heads of a few regularisations. The client answers how many of its held-out images each of
them classifies correctly and what their losses are at a few temperatures, and sends the sums of these images: the final
head is of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.head import HeadSolver
from vitfleet.message import Tensors
from vitfleet.methods.closed_form.solvers import Head, solve, temperature
from vitfleet.methods.closed_form.sums import Sums
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.randomness import Address, Purpose

WEIGHTS, BIASES = "weights", "biases"  # of the heads that are compared, ``[heads, classes, …]``
CORRECT, LOSSES = "correct", "losses"  # an answer
#: Temperatures that are compared, relative to what each head's sums say.
TEMPERATURES = tuple(2 ** (step / 2) for step in range(-3, 4))
MAX_LOSS = 20.0  # of an image; that of a class of which nobody else has images says nothing of the temperature
_CANDIDATES = {
    "ridge": (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
    "lda": (1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4),
    "means": (0.0,),
    "means-covariance": (1e-2, 0.1, 0.3, 1.0, 3.0),
}


def regularizations(solver: HeadSolver) -> Sequence[float]:
    """Return the regularisations that are compared."""
    return _CANDIDATES[solver.solver]


def split_images(samples: int, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """Return which of a client's images are kept, and which are held out: always the same ones, in rising order."""
    order = Address(seed, Purpose.HELD_OUT_IMAGES, client=client).generator().permutation(samples)
    held_out = round(share * samples)
    return torch.from_numpy(np.sort(order[held_out:])), torch.from_numpy(np.sort(order[:held_out]))


def solved_with(sums: Sums, solver: HeadSolver, regularization: float) -> Head:
    """Return the head with a regularisation, divided by the temperature that the sums tell."""
    solution = solve(sums, solver, regularization)
    return solution.head.divided_by(temperature(solution, sums))


def heads_to_compare(sums: Sums, solver: HeadSolver) -> dict[str, Tensor]:
    """Return the heads of all regularisations, on features as they are."""
    heads = [solved_with(sums, solver, value).folded() for value in regularizations(solver)]
    weights, biases = torch.stack([head.weight for head in heads]), torch.stack([head.bias for head in heads])
    return {WEIGHTS: weights.float(), BIASES: biases.float()}


def compare_heads(heads: Tensors, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return how many images each head classifies correctly, and the sums of their losses at each temperature."""
    logits = torch.einsum("hcd,nd->hnc", heads[WEIGHTS], features) + heads[BIASES][:, None]
    correct = (logits.argmax(dim=-1) == labels).sum(dim=1)
    losses = [
        F.cross_entropy((logits / factor).mT, labels.expand(logits.shape[:2]), reduction="none").clamp(max=MAX_LOSS)
        for factor in TEMPERATURES
    ]
    return {CORRECT: correct.to(torch.int32), LOSSES: torch.stack([loss.sum(dim=1) for loss in losses], dim=1)}


@dataclass(frozen=True)
class Answers:
    """What clients answered, summed.

    Attributes
    ----------
    correct, losses
        ``[heads]`` and ``[heads, temperatures]``, float64.
    """

    correct: Tensor
    losses: Tensor

    @classmethod
    def received(cls, tensors: Tensors, images: int, solver: HeadSolver, device: torch.device) -> Answers:
        """Return what a client answered of so many images.

        Raises
        ------
        RejectedUpdateError
            It cannot be an answer.
        """
        count = len(regularizations(solver))
        expected = {CORRECT: (torch.int32, (count,)), LOSSES: (torch.float32, (count, len(TEMPERATURES)))}
        for name, form in expected.items():
            if name not in tensors or (tensors[name].dtype, tuple(tensors[name].shape)) != form:
                raise RejectedUpdateError(f"its answer has no {name} of the type {form[0]} and the shape {form[1]}")
        correct, losses = tensors[CORRECT], tensors[LOSSES]
        if int(correct.min()) < 0 or int(correct.max()) > images:
            raise RejectedUpdateError(f"its answer counts correct images that are not between 0 and {images}")
        if not bool(((losses >= 0) & (losses <= 1.001 * MAX_LOSS * images)).all()):
            raise RejectedUpdateError(f"its answer has losses that are not between 0 and {MAX_LOSS:g} an image")
        return cls(correct.to(device).double(), losses.to(device).double())

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.correct + other.correct, self.losses + other.losses)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {CORRECT: self.correct, LOSSES: self.losses}

    def best(self, solver: HeadSolver) -> tuple[float, float]:
        """Return the regularisation with the most correct images, and the temperature of its least loss.

        Of equally good ones it is the one with the least loss; the temperature is relative to that of the sums.
        """
        least = self.losses.min(dim=1)
        order = sorted(
            range(len(self.correct)), key=lambda head: (-float(self.correct[head]), float(least.values[head]))
        )
        return regularizations(solver)[order[0]], TEMPERATURES[int(least.indices[order[0]])]
