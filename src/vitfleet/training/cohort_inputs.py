"""The inputs of a training: for one client, and for a group of clients as one set of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.images import Shard
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.memories import EpisodicMemory, ReplayBuffer, Teachers
from vitfleet.training.objective import Fit
from vitfleet.training.stack import Stack, stack, unpad, unstacked

SERVER_CLIENT = -2  # the client number in the random addresses of the server's own trainings
PART_WIDTH_MULTIPLE = 8  # samples
BUFFER_MULTIPLE = 64  # samples; the size of a replay buffer is rounded up, so that shapes recur
MAX_WIDTH_RATIO = 1.2  # a captured step is reused up to this much padding: capturing another one costs more


@dataclass(frozen=True)
class RngContext:
    """The part of a random address that all draws of one training share.

    Attributes
    ----------
    first_epoch
        The epoch number of the training's first epoch. Trainings of the same client and round have different epochs,
        so that no two share their random numbers.
    """

    seed: int
    round: int
    client: int
    first_epoch: int = 0


@dataclass(frozen=True)
class ClientFit:
    """A :class:`~vitfleet.training.objective.Fit` with the client's images and its random address."""

    fit: Fit
    shard: Shard
    rng: RngContext

    def __len__(self) -> int:
        return len(self.shard) if self.fit.features is None else len(self.fit.features)


@dataclass
class CohortInputs:
    """The tensors of all fits of a group.

    Attributes
    ----------
    part_widths
        How many samples of each part of the memories are computed, with padding: see :func:`memory_widths`. A teacher
        is a part of one sample.
    replay
        The replay buffers, padded to a common size. Padding is never drawn.
    """

    weights: Stack
    constants: Stack
    observer_state: Stack
    reference_weights: Stack
    companion_weights: Stack
    memory: Stack
    replay: Stack
    part_widths: tuple[int, ...]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        for group in (*self._fixed_stacks, self.observer_state):
            yield from group.tensors.values()

    def first(self, count: int) -> CohortInputs:
        """Return the inputs of the first ``count`` clients: views, not copies."""
        return self._map(lambda stack: stack.first(count))

    def with_own_tensors(self, trainable: Collection[str]) -> CohortInputs:
        """Return the inputs with copies of all tensors that belong to a client or to the server.

        Other inputs can then be written into them. Trainable and stacked tensors were made for this group and are not
        copied again.
        """

        def copy_others(stack: Stack) -> Stack:
            made_here = stack.stacked_names | set(trainable) if stack is self.weights else stack.stacked_names
            copies = {name: tensor.detach().clone() for name, tensor in stack.tensors.items() if name not in made_here}
            return Stack({**stack.tensors, **copies}, stack.stacked_names)

        return self._map(copy_others)

    def _map(self, function: Callable[[Stack], Stack]) -> CohortInputs:
        return CohortInputs(
            weights=function(self.weights),
            constants=function(self.constants),
            observer_state=function(self.observer_state),
            reference_weights=function(self.reference_weights),
            companion_weights=function(self.companion_weights),
            memory=function(self.memory),
            replay=function(self.replay),
            part_widths=self.part_widths,
        )

    @torch.no_grad()
    def copy_from(self, other: CohortInputs) -> None:
        """Write other inputs into these tensors; they must have the same signature and be covered by these."""
        for name, source in other.observer_state.tensors.items():
            target = self.observer_state.tensors[name]
            if target.shape != source.shape:
                target.zero_()
            unpad(target, like=source).copy_(source)
        for mine, others in zip(self._fixed_stacks, other._fixed_stacks, strict=True):
            if mine.tensors:
                torch._foreach_copy_(list(mine.tensors.values()), list(others.tensors.values()))

    def signature(self) -> list[tuple[str, bool, torch.Size | int, torch.dtype]]:
        """Return what must be equal for the tensors of one group to be copied into those of another."""
        fixed = [
            (name, name in stack.stacked_names, tensor.shape, tensor.dtype)
            for stack in self._fixed_stacks
            for name, tensor in stack.tensors.items()
        ]
        observed = self.observer_state
        padded = [
            (name, name in observed.stacked_names, tensor.dim(), tensor.dtype)
            for name, tensor in observed.tensors.items()
        ]
        return [*fixed, *padded]

    def covers(self, other: CohortInputs) -> bool:
        """Whether other inputs fit into these: the observer's state, and the memory without too much padding."""
        for name, tensor in other.observer_state.tensors.items():
            mine = self.observer_state.tensors[name].shape
            if any(size < needed for size, needed in zip(mine, tensor.shape, strict=True)):
                return False
        sufficient = all(width >= needed for width, needed in zip(self.part_widths, other.part_widths, strict=True))
        return sufficient and sum(self.part_widths) <= MAX_WIDTH_RATIO * sum(other.part_widths)

    @property
    def _fixed_stacks(self) -> tuple[Stack, ...]:
        """All stacks but the observer's state, whose tensors may be padded."""
        references = self.reference_weights, self.companion_weights
        return self.weights, self.constants, *references, self.memory, self.replay


def stack_inputs(group: Sequence[ClientFit], net: Net, mask_ratio: float) -> CohortInputs:
    """Stack the tensors of a group. The tensors of a single client get no axis of clients.

    Parameters
    ----------
    mask_ratio
        Fraction of the patches that are dropped, for memories that are masked.
    """
    fits = [client_fit.fit for client_fit in group]
    widths = memory_widths([fit.memory for fit in fits if fit.memory is not None])
    num_kept = net.num_kept_patches(mask_ratio)
    memories = [_memory_tensors(client_fit, widths, net.num_patches, num_kept) for client_fit in group]
    buffer_size = max(0 if fit.replay is None else len(fit.replay) for fit in fits)
    buffers = [{} if fit.replay is None else _pad_buffer(fit.replay, buffer_size) for fit in fits]
    if len(fits) == 1:
        return _single_inputs(fits[0], net, memories[0], widths, buffers[0])
    trainable = net.parts.trainable(fits[0].objective.trainable)
    # What training changes in place: the weights that train, and the running statistics among the selected weights.
    selected = fits[0].objective.trainable
    leaves = stack([{name: fit.weights[name].detach() for name in selected} for fit in fits], share=False)
    frozen = stack(
        [{name: tensor for name, tensor in fit.weights.items() if name not in leaves.stacked_names} for fit in fits]
    )
    reference_weights = [{} if fit.reference_weights is None else trainable.take(fit.reference_weights) for fit in fits]
    return CohortInputs(
        weights=Stack({**frozen.tensors, **leaves.tensors}, frozen.stacked_names | leaves.stacked_names),
        constants=stack([fit.constants for fit in fits]),
        observer_state=stack([fit.observer_state for fit in fits], share=False),
        reference_weights=stack(reference_weights, share=False),
        companion_weights=stack([_companion_weights(fit) for fit in fits], share=False),
        memory=stack(memories, share=False),
        replay=stack(buffers, share=False),
        part_widths=widths,
    )


def _single_inputs(
    fit: Fit, net: Net, memory: dict[str, Tensor], widths: tuple[int, ...], buffer: dict[str, Tensor]
) -> CohortInputs:
    """Return the inputs of a single client, with copies of everything that training changes in place."""
    trainable = net.parts.trainable(fit.objective.trainable)
    # The weights that train, and running statistics, which the forward pass writes in place.
    leaves = {name: fit.weights[name].detach().clone() for name in fit.objective.trainable}
    references = fit.reference_weights
    reference_weights = {} if references is None else {name: references[name].detach().clone() for name in trainable}
    return CohortInputs(
        weights=unstacked({**fit.weights, **leaves}),
        constants=unstacked(dict(fit.constants)),
        observer_state=unstacked({name: tensor.clone() for name, tensor in fit.observer_state.items()}),
        reference_weights=unstacked(reference_weights),
        companion_weights=unstacked({name: tensor.clone() for name, tensor in _companion_weights(fit).items()}),
        memory=unstacked(memory),
        replay=unstacked(buffer),
        part_widths=widths,
    )


def _companion_weights(fit: Fit) -> dict[str, Tensor]:
    if fit.companion_weights is None:
        return {}
    return {name: fit.companion_weights[name].detach() for name in fit.objective.trainable}


def memory_widths(memories: Sequence[EpisodicMemory | Teachers]) -> tuple[int, ...]:
    """Return how many samples of each part of the memories are computed, with padding.

    It is the size of the largest of the clients' parts at that position, rounded up, so that shapes recur from round
    to round.
    """
    sizes = [(1,) * len(memory) if isinstance(memory, Teachers) else memory.sizes for memory in memories]
    sizes_per_part = zip_longest(*sizes, fillvalue=0)
    return tuple(max(1, -(-max(sizes) // PART_WIDTH_MULTIPLE)) * PART_WIDTH_MULTIPLE for sizes in sizes_per_part)


def _memory_tensors(
    client_fit: ClientFit, widths: tuple[int, ...], num_patches: int, num_kept: int
) -> dict[str, Tensor]:
    """Return the tensors of a client's memory, padded to the largest width; if it is masked, with the kept patches."""
    memory = client_fit.fit.memory
    if memory is None:
        return {}
    if isinstance(memory, Teachers):
        return memory.tensors()
    missing = max(widths, default=0) - memory.sample_weight.shape[1]
    tensors = {
        "images": F.pad(memory.images, (0, 0, 0, 0, 0, 0, 0, missing)),
        "labels": F.pad(memory.labels, (0, missing)),
        "sample_weight": F.pad(memory.sample_weight, (0, missing)),
    }
    if client_fit.fit.objective.mask_memory and num_kept < num_patches:
        rng = client_fit.rng
        address = Address(rng.seed, Purpose.MEMORY_MASK, rng.round, rng.client)
        noise = address.generator().random((*memory.sample_weight.shape, num_patches), dtype=np.float32)
        keep = torch.from_numpy(noise.argsort(axis=-1, kind="stable")[..., :num_kept].copy())
        tensors["keep"] = F.pad(keep, (0, 0, 0, missing)).to(memory.images.device)
    return tensors


def _pad_buffer(buffer: ReplayBuffer, size: int) -> dict[str, Tensor]:
    """Return the tensors of a replay buffer, padded to at least ``size`` samples."""
    missing = -(-size // BUFFER_MULTIPLE) * BUFFER_MULTIPLE - len(buffer)
    return {
        name: F.pad(tensor, (*(0, 0) * (tensor.dim() - 1), 0, missing)) for name, tensor in buffer.tensors().items()
    }
