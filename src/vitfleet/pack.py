"""Many tensors in one piece of memory: one copy where there would be hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitfleet.message import Tensors

ALIGNED = 256  # bytes: a kernel may round otherwise where a tensor does not lie as one of its own would


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
        row = _put_together(some) if row is None else row
        pieces = torch.split(row if move is None else move(row), [_room(tensor) for tensor in some.values()])
        for (name, tensor), piece in zip(some.items(), pieces, strict=True):
            found[name] = piece[: tensor.numel()].view(tensor.shape)
    return {name: found[name] for name in tensors}


def _room(tensor: Tensor) -> int:
    """Return the numbers that a tensor takes up, those between it and the next among them."""
    return -(-tensor.nbytes // ALIGNED) * ALIGNED // tensor.element_size()


def _put_together(tensors: Tensors) -> Tensor:
    first, *_ = tensors.values()
    nothing = first.new_zeros(ALIGNED // first.element_size())
    parts = [(tensor.flatten(), nothing[: _room(tensor) - tensor.numel()]) for tensor in tensors.values()]
    return torch.cat([one for pair in parts for one in pair])


def _piece(tensors: Tensors) -> Tensor | None:
    """Return the memory in which these tensors lie one after the other, if they do."""
    first, *_ = tensors.values()
    start, end = first.untyped_storage().data_ptr(), 0
    for tensor in tensors.values():
        if tensor.untyped_storage().data_ptr() != start or tensor.storage_offset() != end or not tensor.is_contiguous():
            return None
        end += _room(tensor)
    if first.untyped_storage().nbytes() < end * first.element_size():
        return None
    return first.as_strided((end,), (1,), 0)
