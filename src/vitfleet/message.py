"""Messages and states: named tensors and numbers, never other objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
Number: TypeAlias = int | float | list[int] | list[float]
Numbers: TypeAlias = Mapping[str, Number]

MIN_COVERED_FRACTION = 0.2  # of a storage: if its tensors cover less, they are checked one by one


@dataclass(frozen=True)
class Payload:
    """Named tensors and numbers. Everything that is sent or stored is a payload."""

    tensors: Tensors = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without those of a state's parts."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device) -> Self:
        """Return the payload with its tensors on a device. The parts of a state stay where they are."""
        return replace(self, tensors=to_device(self.tensors, device))


@dataclass(frozen=True)
class Message(Payload):
    """A payload that is sent between server and client."""


@dataclass(frozen=True)
class State(Payload):
    """A payload that the server or a client keeps between rounds.

    Its ``parts`` are those of a server's state that rarely change, such as the features of each client. A checkpoint
    writes a part only if it is another object than at the last checkpoint.
    """

    parts: Mapping[str, State] = field(default_factory=dict)


def label_dtype(num_classes: int) -> torch.dtype:
    """Return the smallest integer type in which classes are sent and stored."""
    return torch.int16 if num_classes <= torch.iinfo(torch.int16).max + 1 else torch.int32


def to_device(tensors: Tensors, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors on a device. A tensor that is already there is not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def add_prefix(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors under names with a prefix."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def with_prefix(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, under the names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def add_numbers(prefix: str, groups: Mapping[int, Tensors]) -> dict[str, Tensor]:
    """Return the tensors of numbered groups under names with a prefix and the group's number."""
    return {
        f"{prefix}{number:04d}.{name}": tensor for number, group in groups.items() for name, tensor in group.items()
    }


def with_numbers(tensors: Tensors, prefix: str) -> dict[int, dict[str, Tensor]]:
    """Return the groups of tensors whose names have a prefix and a number, by number, in rising order."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in with_prefix(tensors, prefix).items():
        number, own_name = name.split(".", 1)
        groups.setdefault(int(number), {})[own_name] = tensor
    return dict(sorted(groups.items()))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers of these tensors are finite.

    A sum reads the memory once, and it is not finite if any number is not. Only if a sum is not finite, every number is
    checked, because a sum of finite numbers can overflow.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        return True
    if floating[0].is_cuda:  # needs few kernel launches; on a CPU it would be slower than the sums
        sums = torch.stack([norm.float() for norm in torch._foreach_norm(_merge_by_storage(floating), 1)])
    else:
        sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in floating])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in floating)


def _merge_by_storage(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors that contain all numbers of these: tensors of one storage become one tensor of that storage.

    The merged tensor can contain other numbers too, but a storage of which the tensors cover little is not merged.
    """
    by_storage: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    merged: list[Tensor] = []
    for views in by_storage.values():
        storage = views[0].untyped_storage()
        if len(views) > 1 and sum(view.nbytes for view in views) >= MIN_COVERED_FRACTION * storage.nbytes():
            merged.append(views[0].as_strided((storage.nbytes() // views[0].element_size(),), (1,), 0))
        else:
            merged.extend(views)
    return merged
