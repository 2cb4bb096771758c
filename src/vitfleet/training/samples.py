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
    """Samples that pass through the model together: a batch, what is drawn from a set, or parts of a set."""

    labels: Tensor  # [batch]
    sample_weight: Tensor  # of each sample in the mean, [batch]; they sum to one; padding has weight 0
    positions: Tensor  # of the samples in the client's shard, or in the set, [batch]
    images: Tensor | None = None  # stored pixels, uint8 [batch, channels, height, width]
    features: Tensor | None = None  # in a training on features: the tokens that enter the model at the split
    views: Tensor | None = None  # what the frozen part makes of each image, in a training on cached views
    # How each image is augmented, and which of its patches are kept; None: not at all, all of them.
    shift: Tensor | None = None
    flip: Tensor | None = None
    brightness: Tensor | None = None
    keep: Tensor | None = None
    stored: Tensors = field(default_factory=dict)  # what a set stores with its samples, such as logits

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
    """Parts of a set of stored samples: one per earlier task, for example."""

    samples: Samples  # [parts, samples, …], padded
    widths: tuple[int, ...]  # how many samples of each part are computed, padding included, known on the host
    present: Tensor  # which parts have samples, [parts]


@register_fields
@dataclass(frozen=True)
class Outputs:
    """The model's outputs for some samples: what a loss sees, of one client."""

    logits: Tensor  # [batch, classes]; where the task of an image is known, those of other tasks' classes are −∞
    labels: Tensor  # this and the next two: see `Samples`
    sample_weight: Tensor
    positions: Tensor
    weights: Tensors  # what trains, at the values that were used; empty where parts or single samples are computed
    constants: Tensors  # of the training
    epoch: Tensor  # its number, from 0, a scalar
    features: Tensor | None = None  # the tokens at the split, if there is one, [batch, tokens, width]
    representation: Tensor | None = None  # the input of the head, [batch, width], if it was asked for
    auxiliary: Tensor | None = None  # the model's outputs besides logits, if it has any
    stored: Tensors = field(default_factory=dict)  # what a set stores with its samples


#: A loss of one client: of the outputs for each group of samples, then of whatever else is given. It returns a scalar.
Loss: TypeAlias = Callable[..., Tensor]


def cross_entropy(outputs: Outputs) -> Tensor:
    """Return the mean cross-entropy, in which each sample has its weight: padding has none."""
    losses = F.cross_entropy(outputs.logits.float(), outputs.labels, reduction="none")
    return torch.dot(losses, outputs.sample_weight)


def mask_other_tasks(logits: Tensor, labels: Tensor, class_to_task: Tensor | None) -> Tensor:
    """Return logits in which the classes of all tasks but the sample's own are −∞; unchanged without tasks."""
    if class_to_task is None:
        return logits
    return logits.masked_fill(class_to_task != class_to_task[labels].unsqueeze(-1), -torch.inf)
