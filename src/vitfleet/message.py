"""What travels and what is kept: named tensors and numbers, never objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
Number: TypeAlias = int | float | list[int] | list[float]
Numbers: TypeAlias = Mapping[str, Number]

MUCH = 0.2  # of a piece of memory: then it is looked at as a whole


@dataclass(frozen=True)
class Payload:
    """Named tensors and numbers: the one shape of everything that is sent or stored."""

    tensors: Tensors = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    def to(self, device: torch.device) -> Self:
        """Return the payload with its tensors on a device. The parts of a state stay where they are."""
        return replace(self, tensors=to_device(self.tensors, device))


@dataclass(frozen=True)
class Message(Payload):
    """What travels between server and client."""


@dataclass(frozen=True)
class State(Payload):
    """What a server or a client keeps from one round to the next.

    Attributes
    ----------
    parts
        Parts of a server's state that change now and then, such as what it keeps of each client: a checkpoint
        writes those that are no longer the same object as before.
    """

    parts: Mapping[str, State] = field(default_factory=dict)


def to_device(tensors: Tensors, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors on a device. A tensor that is already there is not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number of these tensors is infinite or none at all.

    A sum goes through memory once, at its speed, and what is not finite shows in it; a sum that is merely too large is
    looked at again, number by number.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        return True
    if floating[0].is_cuda:  # in few launches; on a CPU it would be slower than the sums
        sums = torch.stack([norm.float() for norm in torch._foreach_norm(_pieces(floating), 1)])
    else:
        sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in floating])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in floating)


def _pieces(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors that hold all the numbers of these, and maybe others: what lies in one piece, as one tensor."""
    lying: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lying.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    found: list[Tensor] = []
    for some in lying.values():
        storage = some[0].untyped_storage()
        if len(some) > 1 and sum(tensor.nbytes for tensor in some) >= MUCH * storage.nbytes():
            found.append(some[0].as_strided((storage.nbytes() // some[0].element_size(),), (1,), 0))
        else:
            found.extend(some)
    return found
