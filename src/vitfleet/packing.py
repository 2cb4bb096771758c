"""Packing of many tensors in one block of memory, which can then be copied at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vitfleet.message import Tensors

ALIGNMENT = 256  # bytes, as of separate tensors: kernels may round differently for other alignments


def pack_tensors(tensors: Tensors, allocate: Callable[[int, torch.dtype], Tensor] | None = None) -> dict[str, Tensor]:
    """Return copies of the tensors as views of one new block of memory per data type and device.

    By default the block is on the tensors' own device. ``allocate`` returns a block of a number of elements on any
    other: tensors are copied into it without waiting for the copy to end, and without memory on their own device.
    """
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor.contiguous()
    packed: dict[str, Tensor] = {}
    for (dtype, _), group in groups.items():
        *offsets, length = _offsets(group)
        block = _concatenate(group, [*offsets, length]) if allocate is None else allocate(length, dtype)
        for (name, tensor), offset in zip(group.items(), offsets, strict=True):
            packed[name] = block.as_strided(tensor.shape, tensor.stride(), offset)
        if allocate is None:
            continue
        if (source := _find_block(group, offsets, length)) is not None:
            block.copy_(source, non_blocking=True)
        else:
            for name, tensor in group.items():
                packed[name].copy_(tensor, non_blocking=True)
    return {name: packed[name] for name in tensors}


def _offsets(tensors: Tensors) -> list[int]:
    """Return the offset of each tensor in a block, in elements, and the length of the block."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT // tensor.element_size() for tensor in tensors.values()]
    return [0, *accumulate(sizes)]


def _concatenate(tensors: Tensors, bounds: list[int]) -> Tensor:
    """Return a block of all tensors, with zeros in between for the alignment."""
    first, *_ = tensors.values()
    zeros = first.new_zeros(ALIGNMENT // first.element_size())
    parts: list[Tensor] = []
    for tensor, (start, end) in zip(tensors.values(), pairwise(bounds), strict=True):
        parts.append(tensor.view(-1))
        if padding := end - start - tensor.numel():
            parts.append(zeros[:padding])
    return torch.cat(parts)


def _find_block(tensors: Tensors, offsets: list[int], length: int) -> Tensor | None:
    """Return the block in which the tensors are packed already; ``None`` if they are not."""
    first, *_ = tensors.values()
    storage = first.untyped_storage()
    address = storage.data_ptr()
    for tensor, offset in zip(tensors.values(), offsets, strict=True):
        if tensor.storage_offset() != offset or tensor.untyped_storage().data_ptr() != address:
            return None
    return first.as_strided((length,), (1,), 0) if storage.nbytes() >= length * first.element_size() else None
