"""Tensors of several clients as one set: stacked on a leading axis, or shared by all clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree

from vitfleet.message import Tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """Named tensors of several clients. Stacked tensors have a leading axis of clients, all others are shared."""

    tensors: dict[str, Tensor]
    stacked_names: frozenset[str]

    def first(self, count: int) -> Stack:
        """Return the tensors of the first ``count`` clients: views, not copies."""
        tensors = {
            name: tensor.detach()[:count] if name in self.stacked_names else tensor
            for name, tensor in self.tensors.items()
        }
        return Stack(tensors, self.stacked_names)


def unstacked(tensors: dict[str, Tensor]) -> Stack:
    """Return the tensors of a single client, without an axis of clients."""
    return Stack(tensors, frozenset())


def stack(clients: Sequence[Tensors], share: bool = True) -> Stack:
    """Stack the tensors of several clients, which have the same names.

    Tensors of unequal shapes are padded with zeros at their ends. With ``share`` a tensor that is the same object for
    all clients is kept once, without an axis of clients.
    """
    tensors: dict[str, Tensor] = {}
    stacked_names: set[str] = set()
    for name, first in clients[0].items():
        column = [client[name] for client in clients]
        if share and all(tensor is first for tensor in column):
            tensors[name] = first
        else:
            tensors[name] = torch.stack(_pad_to_largest(column))
            stacked_names.add(name)
    return Stack(tensors, frozenset(stacked_names))


def _pad_to_largest(tensors: list[Tensor]) -> list[Tensor]:
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return tensors
    largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [target - size for size, target in zip(tensor.shape, largest, strict=True)]
        # F.pad takes the last dimension first, with both of its sides.
        padded.append(F.pad(tensor, [width for end in reversed(missing) for width in (0, end)]))
    return padded


def unpad(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of one client without its padding, in the shape of ``like``."""
    for dim, size in enumerate(like.shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def rows_at(tensor: Tensor, positions: Tensor, stacked: bool) -> Tensor:
    """Return the rows at these positions; where clients are stacked, each client's own."""
    if not stacked:
        return tensor[positions]
    clients = torch.arange(positions.shape[0], device=positions.device).unsqueeze(-1)
    return tensor[clients, positions]


def register_fields(cls: type[T]) -> type[T]:
    """Let functions that are mapped over clients take and return instances of a dataclass."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    _pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, name) for name in names], None),
        lambda values, _: cls(**dict(zip(names, values, strict=True))),
    )
    return cls


def vmap_over_clients(function: Callable[..., T], arguments: tuple[Any, ...], shared: Collection[int]) -> T:
    """Return a function of one client's tensors, applied to each client's.

    The arguments are tensors with a leading axis of clients, in any structure of tuples, lists, dictionaries and
    registered classes. ``shared`` are the identities (``id``) of tensors that all clients share, without such an axis.
    """
    leaves, structure = _pytree.tree_flatten(arguments)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    tensors = [leaf for leaf, tensor in zip(leaves, is_tensor, strict=True) if tensor]

    def of_one_client(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        own = [next(remaining) if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]
        return function(*_pytree.tree_unflatten(own, structure))

    in_dims = tuple(None if id(tensor) in shared else 0 for tensor in tensors)
    mapped: T = torch.vmap(of_one_client, in_dims=in_dims)(*tensors)
    return mapped
