"""The tensors of a training: of one client, or of a group of clients as one set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.images import Shard
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.stacking.stack import Stack, stack, unpad, unstacked
from vitfleet.training.views.frozen import VIEWS

SERVER_CLIENT = -2  # the client number in the random addresses of the server's own trainings
PART_WIDTH_MULTIPLE = 8  # samples
DRAWN_MULTIPLE = 64  # samples; the size of a set that is drawn from is rounded up, so that shapes recur
MAX_WIDTH_RATIO = 1.2  # a captured step is reused up to this much padding: capturing another one costs more


@dataclass(frozen=True)
class RngContext:
    """The part of a random address that all draws of one training share."""

    seed: int
    round: int
    client: int
    first_epoch: int = 0  # trainings of one client and round have different epochs: no two share their random numbers


@dataclass(frozen=True)
class ClientTraining:
    """A :class:`~vitfleet.training.local_training.LocalTraining` with the client's images and its random address."""

    training: LocalTraining
    shard: Shard
    rng: RngContext

    def __len__(self) -> int:
        features = self.training.features
        return len(self.shard) if features is None else len(features)


@dataclass
class StackInputs:
    """The tensors of the trainings of a group."""

    weights: Stack
    constants: Stack
    kept: Stack
    scratch: Stack
    views: Stack  # cached views, if the clients train on these; no step changes them
    sets: dict[str, Stack]  # stored samples, padded to common sizes; padding has no weight and is never drawn
    widths: dict[str, tuple[int, ...]]  # of each set, how many samples of each part are computed, with padding

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        for group in (*self._copied, self.kept, self.scratch, self.views):
            yield from group.tensors.values()

    def first(self, count: int) -> StackInputs:
        """Return the inputs of the first ``count`` clients: views, not copies."""
        return self._map(lambda stack: stack.first(count))

    def with_own_tensors(self, trainable: Collection[str]) -> StackInputs:
        """Return the inputs with copies of all tensors that belong to a client or to the server.

        Other inputs can then be written into them. Trainable and stacked tensors were made for this group and are not
        copied again.
        """

        def copy_others(stack: Stack) -> Stack:
            made_here = stack.stacked_names | set(trainable) if stack is self.weights else stack.stacked_names
            copies = {name: tensor.detach().clone() for name, tensor in stack.tensors.items() if name not in made_here}
            return Stack({**stack.tensors, **copies}, stack.stacked_names)

        return self._map(copy_others)

    def _map(self, function: Callable[[Stack], Stack]) -> StackInputs:
        return StackInputs(
            function(self.weights),
            function(self.constants),
            function(self.kept),
            function(self.scratch),
            function(self.views),
            {name: function(stored) for name, stored in self.sets.items()},
            self.widths,
        )

    @torch.no_grad()
    def copy_from(self, other: StackInputs) -> None:
        """Write other inputs into these tensors; they must have the same signature and be covered by these."""
        for name, source in other.kept.tensors.items():
            target = self.kept.tensors[name]
            if target.shape != source.shape:
                target.zero_()
            unpad(target, like=source).copy_(source)
        for name, source in other.views.tensors.items():  # what is padding is never read
            unpad(self.views.tensors[name], like=source).copy_(source)
        if self.scratch.tensors:
            torch._foreach_zero_(list(self.scratch.tensors.values()))
        for mine, others in zip(self._copied, other._copied, strict=True):
            if mine.tensors:
                torch._foreach_copy_(list(mine.tensors.values()), list(others.tensors.values()))

    def signature(self) -> list[tuple[str, bool, torch.Size | int, torch.dtype]]:
        """Return what must be equal for the tensors of one group to be copied into those of another."""
        fixed = [
            (name, name in stack.stacked_names, tensor.shape, tensor.dtype)
            for stack in (*self._copied, self.scratch)
            for name, tensor in stack.tensors.items()
        ]
        padded = [
            (name, name in stack.stacked_names, tensor.dim(), tensor.dtype)
            for stack in (self.kept, self.views)
            for name, tensor in stack.tensors.items()
        ]
        return [*fixed, *padded]

    def covers(self, other: StackInputs) -> bool:
        """Whether other inputs fit into these: kept tensors, views, and the parts of sets without too much padding."""
        mine_by_name = {**self.kept.tensors, **self.views.tensors}
        for name, tensor in {**other.kept.tensors, **other.views.tensors}.items():
            mine = mine_by_name[name].shape
            if any(size < needed for size, needed in zip(mine, tensor.shape, strict=True)):
                return False
        return all(_widths_cover(widths, other.widths[name]) for name, widths in self.widths.items())

    @property
    def _copied(self) -> tuple[Stack, ...]:
        """The stacks whose tensors have the same shapes in all groups that they are copied from."""
        return self.weights, self.constants, *self.sets.values()


def _widths_cover(widths: Sequence[int], needed: Sequence[int]) -> bool:
    sufficient = all(width >= need for width, need in zip(widths, needed, strict=True))
    return sufficient and sum(widths) <= MAX_WIDTH_RATIO * sum(needed)


def stack_inputs(group: Sequence[ClientTraining], device: torch.device) -> StackInputs:
    """Stack the tensors of a group. The tensors of a single client get no axis of clients."""
    trainings = [client.training for client in group]
    first = trainings[0]
    sets = {name: [training.sets[name] for training in trainings] for name in first.sets}
    widths = {name: part_widths(stored) for name, stored in sets.items()}
    padded = {name: [_set_tensors(samples, stored) for samples in stored] for name, stored in sets.items()}
    scratch = {name: torch.zeros(like.shape, dtype=like.dtype, device=device) for name, like in first.scratch.items()}
    # What training changes in place: the weights that train, and the running statistics among the selected weights.
    selected = first.trainable
    if len(trainings) == 1:
        leaves = {name: first.weights[name].detach().clone() for name in selected}
        return StackInputs(
            weights=unstacked({**first.weights, **leaves}),
            constants=unstacked(dict(first.constants)),
            kept=unstacked({name: tensor.clone() for name, tensor in first.kept.items()}),
            scratch=unstacked(scratch),
            views=unstacked(_view_tensors(first)),
            sets={name: unstacked(tensors) for name, (tensors,) in padded.items()},
            widths=widths,
        )
    stacked = stack(
        [{name: training.weights[name].detach() for name in selected} for training in trainings], share=False
    )
    others = [name for name in first.weights if name not in stacked.stacked_names]
    frozen = stack([{name: training.weights[name] for name in others} for training in trainings])
    return StackInputs(
        weights=Stack({**frozen.tensors, **stacked.tensors}, frozen.stacked_names | stacked.stacked_names),
        constants=stack([training.constants for training in trainings]),
        kept=stack([training.kept for training in trainings], share=False),
        scratch=_stacked_scratch(trainings, device),
        views=stack([_view_tensors(training) for training in trainings], share=False),
        sets={name: stack(tensors, share=False) for name, tensors in padded.items()},
        widths=widths,
    )


def _stacked_scratch(trainings: Sequence[LocalTraining], device: torch.device) -> Stack:
    """Return zeros of the largest shapes that any client needs."""
    tensors = {}
    for name, like in trainings[0].scratch.items():
        shapes = [training.scratch[name].shape for training in trainings]
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        tensors[name] = torch.zeros(len(trainings), *largest, dtype=like.dtype, device=device)
    return Stack(tensors, frozenset(tensors))


def _view_tensors(training: LocalTraining) -> dict[str, Tensor]:
    """Return the cached views of a client, if it trains on these."""
    return {} if training.views is None else {VIEWS: training.views.values}


def part_widths(sets: Sequence[SampleSet]) -> tuple[int, ...]:
    """Return how many samples of each part of clients' sets are computed, with padding.

    It is the size of the largest of the clients' parts at that position, rounded up, so that shapes recur from round
    to round. Sets that are drawn from have no parts.
    """
    if sets[0].draws:
        return ()
    sizes_per_part = zip_longest(*(samples.sizes for samples in sets), fillvalue=0)
    return tuple(max(1, -(-max(sizes) // PART_WIDTH_MULTIPLE)) * PART_WIDTH_MULTIPLE for sizes in sizes_per_part)


def _set_tensors(samples: SampleSet, group: Sequence[SampleSet]) -> dict[str, Tensor]:
    """Return the tensors of a client's set, padded to the largest of a group."""
    tensors = samples.tensors()
    if samples.draws:
        size = max(other.labels.shape[1] for other in group)
        size = -(-size // DRAWN_MULTIPLE) * DRAWN_MULTIPLE
        tensors.pop("keep", None)
    else:
        size = max(part_widths(group), default=0)
        tensors["sample_weight"] = samples.sample_weight()
    missing = size - samples.labels.shape[1]
    return {name: F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing)) for name, tensor in tensors.items()}


def trained_tensors(net: Net, selection: Selection) -> tuple[str, ...]:
    """Return what an optimiser trains of a selection: all but buffers, of the model or of one beside it."""
    return tuple(
        name
        for name in selection
        if (base := name.rpartition("/")[2]) in net.parts.parameters or base not in net.parts.shapes
    )
