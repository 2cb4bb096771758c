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
from vitfleet.train.objective import Fit, Memory
from vitfleet.train.stack import Stack, alone, stack

STORED_AT_ONCE = 8
SPARE = 1.2  # a captured step that computes on a little more padding is better than a capture


@dataclass(frozen=True)
class Place:
    """Where in a run a training happens: what its randomness is addressed by."""

    seed: int
    round: int
    client: int
    first_epoch: int = 0


@dataclass(frozen=True)
class Assignment:
    """A training, whose images, and where in the run."""

    fit: Fit
    shard: Shard
    place: Place

    def __len__(self) -> int:
        return len(self.shard) if self.fit.features is None else len(self.fit.features)


@dataclass
class Given:
    """What a group of clients is given, as one set of tensors.

    Attributes
    ----------
    widths
        How many samples of each of the memory's parts are computed on: see :func:`widths_of`.
    """

    weights: Stack
    constants: Stack
    sums: Stack
    elsewhere: Stack
    memory: Stack
    widths: tuple[int, ...]

    @property
    def parts(self) -> tuple[Stack, ...]:
        """Return what it consists of."""
        return self.weights, self.constants, self.sums, self.elsewhere, self.memory

    def first(self, count: int) -> Given:
        """Return what the first so many of the clients are given: the same tensors, not copies."""
        weights, constants, sums, elsewhere, memory = (part.first(count) for part in self.parts)
        return Given(weights, constants, sums, elsewhere, memory, self.widths)

    def apart(self, trains: Collection[str]) -> Given:
        """Return it with tensors that nobody else holds, for others to be written into.

        What trains and what is stacked was made for this group; the rest is still the clients' or the server's own.
        """

        def copied(part: Stack, made: Collection[str]) -> Stack:
            others = {name: one.detach().clone() for name, one in part.tensors.items() if name not in made}
            return Stack({**part.tensors, **others}, part.own)

        weights = copied(self.weights, {*self.weights.own, *trains})
        constants, sums, elsewhere, memory = (copied(part, part.own) for part in self.parts[1:])
        return Given(weights, constants, sums, elsewhere, memory, self.widths)

    def all(self) -> list[Tensor]:
        """Return every tensor."""
        return [tensor for part in self.parts for tensor in part.tensors.values()]

    def form(self) -> list[tuple[str, bool, torch.Size, torch.dtype]]:
        """Return what must agree for one group to take another's place."""
        return [
            (name, name in part.own, tensor.shape, tensor.dtype)
            for part in self.parts
            for name, tensor in part.tensors.items()
        ]

    def covers(self, other: Given) -> bool:
        """Whether what is computed on of this one's memory is as much as the other needs, and not much more."""
        wider = all(own >= needed for own, needed in zip(self.widths, other.widths, strict=True))
        return wider and sum(self.widths) <= SPARE * sum(other.widths)


def bring_together(group: Sequence[Assignment], net: Net) -> Given:
    """Stack what the clients of a group are given; one client's tensors get no axis."""
    fits = [one.fit for one in group]
    trains = net.anatomy.trainable(fits[0].objective.trains)
    widths = widths_of([fit.memory for fit in fits if fit.memory is not None])
    memories = [{} if fit.memory is None else _as_wide(fit.memory, widths) for fit in fits]
    if len(group) == 1:
        fit = fits[0]
        # Running statistics are written in place by the forward pass, sums by observers: never somebody else's.
        buffers = {name: one.clone() for name, one in fit.weights.items() if name not in net.anatomy.parameters}
        leaves = {name: fit.weights[name].detach().clone() for name in trains}
        sums = {name: one.clone() for name, one in fit.sums.items()}
        elsewhere = {} if fit.elsewhere is None else {name: fit.elsewhere[name].detach().clone() for name in trains}
        return Given(
            alone({**fit.weights, **buffers, **leaves}),
            alone(dict(fit.constants)),
            alone(sums),
            alone(elsewhere),
            alone(memories[0]),
            widths,
        )
    leaves_of = stack([{name: fit.weights[name].detach() for name in trains} for fit in fits], share=False)
    frozen = stack([{name: one for name, one in fit.weights.items() if name not in leaves_of.own} for fit in fits])
    return Given(
        Stack({**frozen.tensors, **leaves_of.tensors}, frozen.own | leaves_of.own),
        stack([fit.constants for fit in fits]),
        stack([fit.sums for fit in fits], share=False),
        stack([{} if fit.elsewhere is None else trains.take(fit.elsewhere) for fit in fits], share=False),
        stack(memories, share=False),
        widths,
    )


def widths_of(memories: Sequence[Memory]) -> tuple[int, ...]:
    """Return how many samples of each of the memories' parts are computed on, padded ones among them.

    As many as the largest part of that place has, and a multiple of some, so that shapes recur from round to round.
    """
    columns = zip_longest(*(memory.sizes for memory in memories), fillvalue=0)
    return tuple(max(1, -(-max(column) // STORED_AT_ONCE)) * STORED_AT_ONCE for column in columns)


def _as_wide(memory: Memory, widths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a memory's tensors, its parts as wide as the widest is computed."""
    missing = max(widths, default=0) - memory.share.shape[1]
    return {
        "images": F.pad(memory.images, (0, 0, 0, 0, 0, 0, 0, missing)),
        "labels": F.pad(memory.labels, (0, missing)),
        "share": F.pad(memory.share, (0, missing)),
    }
