"""Many tensors in one piece of memory: one copy where there would be hundreds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from vitfleet.message import Tensors

ALIGNED = 256  # bytes: a kernel may round otherwise where a tensor does not lie as one of its own would


def pack_tensors(tensors: Tensors, make: Callable[[int, torch.dtype], Tensor] | None = None) -> dict[str, Tensor]:
    """Return the tensors as views of one new piece of memory, or one for each type and device that they have.

    Parameters
    ----------
    make
        Makes a piece of so many numbers elsewhere, into which they are copied, without waiting for it; by default the
        piece lies where they do. Nothing is made where they are: it may be full there.
    """
    alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), {})[name] = tensor.contiguous()
    found: dict[str, Tensor] = {}
    for (dtype, _), some in alike.items():
        starts = _starts(some)
        row = _put_together(some, starts) if make is None else make(starts[-1], dtype)
        for (name, tensor), start in zip(some.items(), starts, strict=False):  # the last start is the end
            found[name] = row.as_strided(tensor.shape, tensor.stride(), start)
        if make is not None:
            _copy(some, starts, row, found)
    return {name: found[name] for name in tensors}


def _copy(tensors: Tensors, starts: list[int], row: Tensor, places: Tensors) -> None:
    piece = _piece(tensors, starts)
    if piece is not None:
        row.copy_(piece, non_blocking=True)
        return
    for name, tensor in tensors.items():
        places[name].copy_(tensor, non_blocking=True)


def _starts(tensors: Tensors) -> list[int]:
    """Return where each tensor begins, in numbers, and where the last one's room ends."""
    return [
        0,
        *accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED // tensor.element_size() for tensor in tensors.values()),
    ]


def _put_together(tensors: Tensors, starts: list[int]) -> Tensor:
    first, *_ = tensors.values()
    nothing = first.new_zeros(ALIGNED // first.element_size())
    parts: list[Tensor] = []
    for tensor, start, end in zip(tensors.values(), starts, starts[1:], strict=False):
        parts.append(tensor.view(-1))
        if gap := end - start - tensor.numel():
            parts.append(nothing[:gap])
    return torch.cat(parts)


def _piece(tensors: Tensors, starts: list[int]) -> Tensor | None:
    """Return the memory in which these tensors lie one after the other, if they do."""
    first, *_ = tensors.values()
    storage = first.untyped_storage()
    memory, end = storage.data_ptr(), starts[-1]
    for tensor, start in zip(tensors.values(), starts, strict=False):
        if tensor.storage_offset() != start or tensor.untyped_storage().data_ptr() != memory:
            return None
    return first.as_strided((end,), (1,), 0) if storage.nbytes() >= end * first.element_size() else None
