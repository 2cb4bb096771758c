"""Many tensors in one piece of memory: one copy where there would be hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitfleet.message import Tensors


def in_one_piece(tensors: Tensors, move: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Return the tensors as views of one new piece of memory, or one for each type and device that they have.

    Parameters
    ----------
    move
        Takes such a piece elsewhere; tensors that lie in one already are not put together first.
    """
    alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    found: dict[str, Tensor] = {}
    for some in alike.values():
        row = _piece(some) if move is not None else None
        row = torch.cat([tensor.flatten() for tensor in some.values()]) if row is None else row
        pieces = torch.split(row if move is None else move(row), [tensor.numel() for tensor in some.values()])
        found |= {name: piece.view(some[name].shape) for name, piece in zip(some, pieces, strict=True)}
    return {name: found[name] for name in tensors}


def _piece(tensors: Tensors) -> Tensor | None:
    """Return the memory in which these tensors lie one after the other, if they do."""
    first, *_ = tensors.values()
    start, end = first.untyped_storage().data_ptr(), 0
    for tensor in tensors.values():
        if tensor.untyped_storage().data_ptr() != start or tensor.storage_offset() != end or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    return first.as_strided((end,), (1,), 0)
