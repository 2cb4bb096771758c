"""What travels and what is kept: named tensors and numbers, never objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
Number: TypeAlias = int | float | list[int] | list[float]
Numbers: TypeAlias = Mapping[str, Number]


@dataclass(frozen=True)
class Named:
    """Named tensors and numbers: the one shape of everything that is sent or stored."""

    tensors: Tensors = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Message(Named):
    """What travels between server and client."""


@dataclass(frozen=True)
class State(Named):
    """What a server or a client keeps from one round to the next.

    Attributes
    ----------
    parts
        Parts of a server's state that change now and then, such as what it keeps of each client: a checkpoint
        writes those that are no longer the same object as before.
    """

    parts: Mapping[str, State] = field(default_factory=dict)
