"""What a group of clients is given for a training, as one set of tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.images import Shard
from vitfleet.models.net import Net
from vitfleet.train.objective import EpisodicMemory, Fit
from vitfleet.train.stack import Stack, alone, stack

STORED_AT_ONCE = 8
SPARE = 1.2  # a captured step that computes on a little more padding is better than a capture


@dataclass(frozen=True)
class RngContext:
    """Where in a run a training happens: what its randomness is addressed by."""

    seed: int
    round: int
    client: int
    first_epoch: int = 0


@dataclass(frozen=True)
class ClientFit:
    """A training, whose images, and where in the run."""

    fit: Fit
    shard: Shard
    rng: RngContext

    def __len__(self) -> int:
        return len(self.shard) if self.fit.features is None else len(self.fit.features)


@dataclass
class CohortInputs:
    """What a group of clients is given, as one set of tensors.

    Attributes
    ----------
    widths
        How many samples of each of the memory's parts are computed on: see :func:`memory_widths`.
    """

    weights: Stack
    constants: Stack
    observer_state: Stack
    reference_weights: Stack
    memory: Stack
    widths: tuple[int, ...]

    @property
    def parts(self) -> tuple[Stack, ...]:
        """Return what it consists of."""
        return self.weights, self.constants, self.observer_state, self.reference_weights, self.memory

    def first(self, count: int) -> CohortInputs:
        """Return what the first so many of the clients are given: the same tensors, not copies."""
        weights, constants, observer_state, reference_weights, memory = (part.first(count) for part in self.parts)
        return CohortInputs(weights, constants, observer_state, reference_weights, memory, self.widths)

    def apart(self, trains: Collection[str]) -> CohortInputs:
        """Return it with tensors that nobody else holds, for others to be written into.

        What trains and what is stacked was made for this group; the rest is still the clients' or the server's own.
        """

        def copied(part: Stack, made: Collection[str]) -> Stack:
            others = {name: one.detach().clone() for name, one in part.tensors.items() if name not in made}
            return Stack({**part.tensors, **others}, part.stacked)

        weights = copied(self.weights, {*self.weights.stacked, *trains})
        constants, observer_state, reference_weights, memory = (copied(part, part.stacked) for part in self.parts[1:])
        return CohortInputs(weights, constants, observer_state, reference_weights, memory, self.widths)

    def all(self) -> list[Tensor]:
        """Return every tensor."""
        return [tensor for part in self.parts for tensor in part.tensors.values()]

    def form(self) -> list[tuple[str, bool, torch.Size, torch.dtype]]:
        """Return what must agree for one group to take another's place."""
        return [
            (name, name in part.stacked, tensor.shape, tensor.dtype)
            for part in self.parts
            for name, tensor in part.tensors.items()
        ]

    def covers(self, other: CohortInputs) -> bool:
        """Whether what is computed on of this one's memory is as much as the other needs, and not much more."""
        wider = all(own >= needed for own, needed in zip(self.widths, other.widths, strict=True))
        return wider and sum(self.widths) <= SPARE * sum(other.widths)


def stack_inputs(group: Sequence[ClientFit], net: Net) -> CohortInputs:
    """Stack what the clients of a group are given; one client's tensors get no axis."""
    fits = [one.fit for one in group]
    trains = net.anatomy.trainable(fits[0].objective.trainable)
    widths = memory_widths([fit.memory for fit in fits if fit.memory is not None])
    memories = [{} if fit.memory is None else _as_wide(fit.memory, widths) for fit in fits]
    if len(group) == 1:
        fit = fits[0]
        # Running statistics are written in place by the forward pass, sums by observers: never somebody else's.
        buffers = {name: one.clone() for name, one in fit.weights.items() if name not in net.anatomy.parameters}
        leaves = {name: fit.weights[name].detach().clone() for name in trains}
        observer_state = {name: one.clone() for name, one in fit.observer_state.items()}
        reference_weights = (
            {}
            if fit.reference_weights is None
            else {name: fit.reference_weights[name].detach().clone() for name in trains}
        )
        return CohortInputs(
            alone({**fit.weights, **buffers, **leaves}),
            alone(dict(fit.constants)),
            alone(observer_state),
            alone(reference_weights),
            alone(memories[0]),
            widths,
        )
    leaves_of = stack([{name: fit.weights[name].detach() for name in trains} for fit in fits], share=False)
    frozen = stack([{name: one for name, one in fit.weights.items() if name not in leaves_of.stacked} for fit in fits])
    return CohortInputs(
        Stack({**frozen.tensors, **leaves_of.tensors}, frozen.stacked | leaves_of.stacked),
        stack([fit.constants for fit in fits]),
        stack([fit.observer_state for fit in fits], share=False),
        stack(
            [{} if fit.reference_weights is None else trains.take(fit.reference_weights) for fit in fits], share=False
        ),
        stack(memories, share=False),
        widths,
    )


def memory_widths(memories: Sequence[EpisodicMemory]) -> tuple[int, ...]:
    """Return how many samples of each of the memories' parts are computed on, padded ones among them.

    As many as the largest part of that place has, and a multiple of some, so that shapes recur from round to round.
    """
    columns = zip_longest(*(memory.sizes for memory in memories), fillvalue=0)
    return tuple(max(1, -(-max(column) // STORED_AT_ONCE)) * STORED_AT_ONCE for column in columns)


def _as_wide(memory: EpisodicMemory, widths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a memory's tensors, its parts as wide as the widest is computed."""
    missing = max(widths, default=0) - memory.sample_weight.shape[1]
    return {
        "images": F.pad(memory.images, (0, 0, 0, 0, 0, 0, 0, missing)),
        "labels": F.pad(memory.labels, (0, missing)),
        "sample_weight": F.pad(memory.sample_weight, (0, missing)),
    }
