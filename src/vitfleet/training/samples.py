"""What passes through a model in a step, and what comes out of it: samples, outputs, losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.training.stacking.stack import register_fields


@register_fields
@dataclass(frozen=True)
class Samples:
    """Samples that pass through the model together: a batch, what is drawn from a set, or parts of a set.

    Attributes
    ----------
    labels
        ``[batch]``.
    sample_weight
        Weight of each sample in the mean, ``[batch]``. They sum to one; padding has weight 0.
    positions
        Positions of the samples in the client's shard, or in the set, ``[batch]``.
    images
        Stored pixels, uint8 ``[batch, channels, height, width]``.
    features
        In a training on features: the tokens that enter the model at the split.
    shift, flip, brightness, keep
        How each image is augmented, and which of its patches are kept; ``None``: not at all, all of them.
    stored
        What a set stores with its samples, such as logits.
    """

    labels: Tensor
    sample_weight: Tensor
    positions: Tensor
    images: Tensor | None = None
    features: Tensor | None = None
    shift: Tensor | None = None
    flip: Tensor | None = None
    brightness: Tensor | None = None
    keep: Tensor | None = None
    stored: Tensors = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Samples:
        """Return the samples with a function applied to every tensor."""
        tensors = {name: function(tensor) for name, tensor in self._tensors()}
        stored = {name: function(tensor) for name, tensor in self.stored.items()}
        return replace(self, **tensors, stored=stored)

    def append(self, other: Samples, axis: int) -> Samples:
        """Return these samples, then others with the same tensors; what is stored with them is left out."""
        tensors = {name: torch.cat([mine, getattr(other, name)], dim=axis) for name, mine in self._tensors()}
        return replace(self, **tensors, stored={})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        values = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "stored"]
        return [(name, tensor) for name, tensor in values if tensor is not None]


class Parts(NamedTuple):
    """Parts of a set of stored samples: one per earlier task, for example.

    Attributes
    ----------
    samples
        ``[parts, samples, …]``, padded.
    widths
        How many samples of each part are computed, padding included, known on the host.
    present
        Which parts have samples, ``[parts]``.
    """

    samples: Samples
    widths: tuple[int, ...]
    present: Tensor


@register_fields
@dataclass(frozen=True)
class Outputs:
    """The model's outputs for some samples: what a loss sees, of one client.

    Attributes
    ----------
    logits, labels, sample_weight, positions
        Logits ``[batch, classes]``, and what is known of the samples: see :class:`Samples`. Where the task of an image
        is known, the logits of other tasks' classes are −∞.
    weights
        The values, at which they were computed, of what trains; empty where parts or single samples are computed.
    constants
        The constants of the training.
    epoch
        The number of the epoch, from 0, a scalar.
    features
        The tokens at the split, if there is one, ``[batch, tokens, width]``.
    representation
        The input of the head, ``[batch, width]``, if it was asked for.
    auxiliary
        The model's outputs besides logits, if it has any.
    stored
        What a set stores with its samples.
    """

    logits: Tensor
    labels: Tensor
    sample_weight: Tensor
    positions: Tensor
    weights: Tensors
    constants: Tensors
    epoch: Tensor
    features: Tensor | None = None
    representation: Tensor | None = None
    auxiliary: Tensor | None = None
    stored: Tensors = field(default_factory=dict)


#: A loss of one client: of the outputs for each group of samples, then of whatever else is given. It returns a scalar.
Loss: TypeAlias = Callable[..., Tensor]


def cross_entropy(outputs: Outputs) -> Tensor:
    """Return the mean cross-entropy, in which each sample has its weight: padding has none."""
    losses = F.cross_entropy(outputs.logits.float(), outputs.labels, reduction="none")
    return torch.dot(losses, outputs.sample_weight)


def mask_other_tasks(logits: Tensor, labels: Tensor, class_to_task: Tensor | None) -> Tensor:
    """Return logits in which the classes of all tasks but the sample's own are −∞.

    Parameters
    ----------
    class_to_task
        The task of each class, ``[classes]``; ``None``: nothing is masked.
    """
    if class_to_task is None:
        return logits
    return logits.masked_fill(class_to_task != class_to_task[labels].unsqueeze(-1), -torch.inf)
