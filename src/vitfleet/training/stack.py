"""Tensors of several clients as one set: stacked on a leading axis, or shared by all clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.training.objective import Step


@dataclass(frozen=True)
class Stack:
    """Named tensors of several clients.

    Attributes
    ----------
    tensors
        A stacked tensor has a leading axis of clients. A shared tensor has none.
    stacked_names
        The names of the stacked tensors.
    """

    tensors: dict[str, Tensor]
    stacked_names: frozenset[str]

    @property
    def in_dims(self) -> dict[str, int | None]:
        """Return the axis of clients of each tensor, for ``torch.vmap``."""
        return {name: 0 if name in self.stacked_names else None for name in self.tensors}

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

    Tensors of unequal shapes are padded with zeros at their ends.

    Parameters
    ----------
    share
        Whether a tensor is kept once, without an axis of clients, if it is the same object for all clients.
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


def lift(function: Callable[..., Any], stacked: bool, constants: Stack, *in_dims: object) -> Callable[..., Any]:
    """Return a function of one client's step as a function of the stacked step of all clients.

    Parameters
    ----------
    function
        Its last argument is a :class:`~vitfleet.training.objective.Step`.
    stacked
        Whether the step has an axis of clients. If not, the function is returned as it is.
    constants
        The constants of the step: some may be shared by all clients.
    in_dims
        The axes of clients of the arguments before the step, for ``torch.vmap``.
    """
    if not stacked:
        return function

    def function_of_fields(*arguments: Any) -> Any:
        *others, fields = arguments
        return function(*others, Step(**fields))

    def lifted(*arguments: Any) -> Any:
        *others, step = arguments
        fields = {name: value for name, value in vars(step).items() if value is not None}
        step_dims = _step_in_dims(fields, constants)
        return torch.vmap(function_of_fields, in_dims=(*in_dims, step_dims))(*others, fields)

    return lifted


def _step_in_dims(fields: dict[str, Any], constants: Stack) -> dict[str, Any]:
    """Return the axes of clients of a step's fields."""
    in_dims: dict[str, Any] = {name: 0 for name in fields}
    in_dims["weights"] = {name: 0 for name in fields["weights"]}
    in_dims["constants"] = constants.in_dims
    in_dims["epoch"] = None
    return in_dims
