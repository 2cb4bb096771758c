"""Several clients' tensors as one: stacked on a leading axis, or shared where they are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.train.objective import Step


@dataclass(frozen=True)
class Stack:
    """Named tensors of several clients.

    Attributes
    ----------
    tensors
        Those of all clients on a leading axis; those that are the same for all, as they are.
    own
        The names of the ones with an axis.
    """

    tensors: dict[str, Tensor]
    stacked: frozenset[str]

    @property
    def axes(self) -> dict[str, int | None]:
        """Return the clients' axis of each, as ``torch.vmap`` wants to be told."""
        return {name: 0 if name in self.stacked else None for name in self.tensors}

    def first(self, count: int) -> Stack:
        """Return those of the first so many clients: the same tensors, not copies."""
        some = {name: one.detach()[:count] if name in self.stacked else one for name, one in self.tensors.items()}
        return Stack(some, self.stacked)


def alone(tensors: dict[str, Tensor]) -> Stack:
    """Return one client's tensors, which have no axis."""
    return Stack(tensors, frozenset())


def stack(clients: Sequence[Tensors], share: bool = True) -> Stack:
    """Stack the tensors of several clients, which have the same names.

    Parameters
    ----------
    share
        Whether a tensor that all clients were given is kept once.

    Of unequal shapes, each is padded with zeros at its ends.
    """
    tensors: dict[str, Tensor] = {}
    own: set[str] = set()
    for name, first in clients[0].items():
        column = [client[name] for client in clients]
        if share and all(one is first for one in column):
            tensors[name] = first
        else:
            tensors[name] = torch.stack(_padded(column))
            own.add(name)
    return Stack(tensors, frozenset(own))


def _padded(column: list[Tensor]) -> list[Tensor]:
    if all(one.shape == column[0].shape for one in column):
        return column
    largest = [max(sizes) for sizes in zip(*(one.shape for one in column), strict=True)]
    ends = [[end - own for own, end in zip(one.shape, largest, strict=True)] for one in column]
    # F.pad wants the last dimension first, and both its sides.
    return [
        F.pad(one, [side for end in reversed(missing) for side in (0, end)])
        for one, missing in zip(column, ends, strict=True)
    ]


def unpad(stacked: Tensor, like: Tensor) -> Tensor:
    """Return one client's tensor without its padding."""
    for dim, size in enumerate(like.shape):
        stacked = stacked.narrow(dim, 0, size)
    return stacked


def lift(function: Callable[..., Any], many: bool, constants: Stack, *others: object) -> Callable[..., Any]:
    """Return a function of one client's step as a function of all clients' together.

    Parameters
    ----------
    others
        The clients' axes of the arguments before the step.
    """
    if not many:
        return function
    axes = StepAxes(constants)

    def flat(*arguments: Any) -> Any:
        *before, fields = arguments
        return function(*before, axes.step(fields))

    def lifted(*arguments: Any) -> Any:
        *before, step = arguments
        fields = axes.fields(step)
        return torch.vmap(flat, in_dims=(*others, axes.of(fields)))(*before, fields)

    return lifted


@dataclass(frozen=True)
class StepAxes:
    """A step as ``torch.vmap`` can take it apart: a dictionary, and which of it has an axis of clients."""

    constants: Stack

    def fields(self, step: Step) -> dict[str, Any]:
        """Return a step's fields that are there."""
        return {name: value for name, value in vars(step).items() if value is not None}

    def of(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the axes of these fields."""
        axes: dict[str, Any] = {name: 0 for name in fields}
        axes["weights"] = {name: 0 for name in fields["weights"]}
        axes["constants"] = self.constants.axes
        axes["epoch"] = None
        return axes

    def step(self, fields: dict[str, Any]) -> Step:
        """Return the step of one client."""
        return Step(**fields)
