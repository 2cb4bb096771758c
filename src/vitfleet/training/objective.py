"""What a method asks of a trainer.

A method states its objective and hands it over; it never writes the loop. Everything in an objective is a
pure function of tensors, so a trainer is free to run one client, or many stacked on a leading axis, step
by step or captured in a graph, without any method noticing. Objectives are compared by value: clients whose
objectives are equal can be trained together, so what differs between clients belongs into a fit's tensors.
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
        Which of the client's samples these are, ``[batch]``, and the epoch they are visited in, from 0, a scalar.
    features
        The tokens at the objective's split, if it has one, ``[batch, tokens, width]``.
    """

    logits: Tensor
    labels: Tensor
    sample_weight: Tensor
    weights: Tensors
    constants: Tensors
    positions: Tensor
    epoch: Tensor
    features: Tensor | None = None


Loss: TypeAlias = Callable[[Step], Tensor]


@dataclass(frozen=True)
class ReferenceGradients:
    """Gradients that a step's transform sees besides the step's own, one a row.

    Attributes
    ----------
    gradients
        Of each weight that trains, ``[references, …]``.
    present
        Which rows are real, ``[references]``; the others are zero.
    """

    gradients: Tensors
    present: Tensor


class GradientTransform(Protocol):
    """Turns a step's gradients into those that are applied.

    Written for one client, as tensor operations without a look at their values, so that it can be lifted over many.
    """

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of what it counts; each becomes a scalar in what was observed, summed over the steps."""
        ...

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients to apply, and this step's counts."""
        ...


class ReferenceSelector(Protocol):
    """Chooses which of a memory's parts are worth a gradient, where there are more than can be afforded."""

    @property
    def k(self) -> int:
        """How many are chosen."""
        ...

    @property
    def every(self) -> int:
        """How many steps of an epoch a choice serves."""
        ...

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        """Return the places of the chosen ``k`` references, given the gradients of all of them."""
        ...


@dataclass(frozen=True)
class EpisodicMemory:
    """Stored samples in several parts (old tasks), each of which gives one reference gradient at the current weights.

    Attributes
    ----------
    images, labels
        uint8 ``[parts, samples, channels, side, side]`` and ``[parts, samples]``, padded to the largest part.
    share
        Each sample's share of its part's mean loss, ``[parts, samples]``; a padded sample has none.
    sizes
        The samples of each part, known on the host. The largest come first, so that of several clients the parts of one
        place are about as large, and little is computed on padding.
    """

    images: Tensor
    labels: Tensor
    sample_weight: Tensor
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors."""
        return {"images": self.images, "labels": self.labels, "sample_weight": self.sample_weight}


class Observer(Protocol):
    """Watches the gradients of a training and sums up what it sees, on the device, without a host sync."""

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Return the sums with one more step in them; they may be changed in place.

        A sample without a share is padding, and so is a step in which nobody has one: its gradients are those of
        nothing and must leave no trace.
        """
        ...


def cross_entropy(step: Step) -> Tensor:
    """Mean cross-entropy of the batch."""
    losses = F.cross_entropy(step.logits.float(), step.labels, reduction="none")
    return torch.dot(losses, step.sample_weight)


def mask_other_tasks(logits: Tensor, labels: Tensor, tasks: Tensor | None) -> Tensor:
    """Return logits in which only the classes of each sample's own task can win.

    Parameters
    ----------
    tasks
        The task of each class, ``[classes]``; ``None``: a sample may be of any class.
    """
    if tasks is None:
        return logits
    return logits.masked_fill(tasks != tasks[labels].unsqueeze(-1), -torch.inf)


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
    chooser
        Chooses among the memory's parts where it holds more than the transform shall see; ``None`` takes them all.
    observer
        Watches the gradients, before they are transformed.
    depth
        Blocks of the client's model, where it is not all of them.
    split
        The block before which the model is parted: what enters it are the step's features.
    """

    trainable: Selection
    loss: Loss = cross_entropy
    transform: GradientTransform | None = None
    selector: ReferenceSelector | None = None
    observer: Observer | None = None
    depth: int | None = None
    split: int | None = None


@dataclass(frozen=True)
class Fit:
    """A training that a method asks for.

    Attributes
    ----------
    weights
        The whole model's, those that train and those that do not.
    constants
        Tensors that loss and transform may look at.
    sums
        What the objective's observer starts from. Clients may differ in their shapes: trained together, each is
        padded with zeros at its ends, and cut back afterwards.
    features
        What to train on instead of images: tokens that enter the model at the objective's split.
    memory
        Stored samples whose gradients, at the current weights, are references of the transform.
    elsewhere
        Other values of the weights that train: the step's own loss has a gradient there too, which is the
        transform's last reference.
    score
        Whether to measure every sample's loss under the trained weights at the end.
    """

    weights: Tensors
    objective: Objective
    epochs: int
    constants: Tensors = field(default_factory=dict)
    observer_state: Tensors = field(default_factory=dict)
    features: FeatureSet | None = None
    memory: EpisodicMemory | None = None
    reference_weights: Tensors | None = None
    score_samples: bool = False


@dataclass(frozen=True)
class FitResult:
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
        What the objective's observer and transform summed up.
    losses
        Each of the client's samples' cross-entropy under the new weights, whole and unaltered, in the shard's
        order, ``[samples]``; empty unless it was asked for.
    """

    weights: Tensors
    loss: Tensor
    samples: int
    steps: int
    observed: Tensors
    sample_losses: Tensor
