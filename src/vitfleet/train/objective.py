"""What a method asks of a trainer.

A method states its objective and hands it over; it never writes the loop. Everything in an objective is a
pure function of tensors, so a trainer is free to run one client, or many stacked on a leading axis, step
by step or captured in a graph, without any method noticing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.features import FeatureSet
from vitfleet.message import Tensors
from vitfleet.models.anatomy import Selection


@dataclass(frozen=True)
class Step:
    """One step as an objective sees it.

    Attributes
    ----------
    logits, labels
        The model's answers and the truth, ``[batch, classes]`` and ``[batch]``.
    share
        Each sample's share of the batch's mean, ``[batch]``, summing to one; a padded sample has none.
    weights
        The weights that train, as they are at this step.
    constants
        Tensors the method fixed for this training (an anchor, an importance).
    positions, epoch
        Which of the client's samples these are, ``[batch]``, and the epoch they are visited in, from 0.
    features
        The tokens at the objective's split, if it has one, ``[batch, tokens, width]``.
    """

    logits: Tensor
    labels: Tensor
    share: Tensor
    weights: Tensors
    constants: Tensors
    positions: Tensor
    epoch: int
    features: Tensor | None = None


Loss: TypeAlias = Callable[[Step], Tensor]
Transform: TypeAlias = Callable[[Tensors, Step], Tensors]


class Observer(Protocol):
    """Watches the gradients of a training and sums up what it sees, on the device, without a host sync."""

    def start(self, weights: Tensors) -> Tensors:
        """Return the empty sum."""
        ...

    def see(self, sums: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Return the sum with one more step in it."""
        ...


def cross_entropy(step: Step) -> Tensor:
    """Mean cross-entropy of the batch."""
    losses = F.cross_entropy(step.logits.float(), step.labels, reduction="none")
    return torch.dot(losses, step.share)


@dataclass(frozen=True)
class Objective:
    """What a client optimises.

    Attributes
    ----------
    trains
        The weights that train; no gradient and no optimiser state exist for the others.
    loss
        What is minimised.
    transform
        Turns the step's gradients into those that are applied; ``None`` leaves them.
    observer
        Watches the gradients, before they are transformed.
    route
        The blocks that are run, in this order, where it is not all of them.
    split
        The block before which the model is parted: what enters it are the step's features.
    """

    trains: Selection
    loss: Loss = cross_entropy
    transform: Transform | None = None
    observer: Observer | None = None
    route: tuple[int, ...] | None = None
    split: int | None = None


@dataclass(frozen=True)
class Fit:
    """A training that a method asks for.

    Attributes
    ----------
    weights
        The whole model's, those that train and those that do not.
    features
        What to train on instead of images: tokens that enter the model at the objective's split.
    """

    weights: Tensors
    objective: Objective
    epochs: int
    constants: Tensors = field(default_factory=dict)
    features: FeatureSet | None = None


@dataclass(frozen=True)
class Fitted:
    """What came of it.

    Attributes
    ----------
    weights
        The weights that trained (and the buffers among the selection), new tensors.
    loss
        Mean training loss over all samples and epochs, a scalar on the device.
    samples, steps
        Samples of the client, and optimiser steps taken.
    observed
        What the objective's observer summed up.
    """

    weights: Tensors
    loss: Tensor
    samples: int
    steps: int
    observed: Tensors
