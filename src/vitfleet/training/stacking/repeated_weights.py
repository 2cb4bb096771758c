"""The weights of clients, repeated for several parts of each: the parts become clients of one forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vitfleet.training.engine import StepEngine
from vitfleet.training.stacking.stack import Stack


def repeat_weights(
    engine: StepEngine,
    weights: Stack,
    leaves: Mapping[str, Tensor],
    parts: int,
    stacked: bool,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return all weights with a leading axis of clients times parts, and among them new leaves of those that train.

    Parameters
    ----------
    weights, leaves
        All weights, and those of them that train.
    stacked
        Whether the weights have an axis of clients; if not, they are those of one client.
    gradient_dtype
        The type in which gradients are stored; ``None``: that of the weights.
    """
    axis = 1 if stacked else 0

    def repeat(name: str, tensor: Tensor) -> Tensor:
        """Give every part the weights of its client. A weight that is shared by all clients stays shared."""
        if stacked and name not in weights.stacked_names:
            return tensor
        repeated = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], parts, *tensor.shape[axis:])
        return repeated.flatten(0, 1) if stacked else repeated

    def repeat_leaf(name: str, leaf: Tensor) -> Tensor:
        """Repeat a weight that trains. Matrices are not copied: see :mod:`vitfleet.models.forward.stacked_ops`."""
        if leaf.dim() - axis == 2 and engine.net.stacking == "tensor operations" and not engine.compiled:
            matrices = leaf if stacked else leaf.unsqueeze(0)
            return _in_product_type(engine, matrices, gradient_dtype).unsqueeze(1).expand(-1, parts, -1, -1)
        return repeat(name, leaf).contiguous()

    repeated_leaves = {name: repeat_leaf(name, leaf.detach()).requires_grad_() for name, leaf in leaves.items()}
    frozen = {
        name: repeat(name, tensor) if stacked else tensor
        for name, tensor in weights.tensors.items()
        if name not in leaves
    }
    return {**frozen, **repeated_leaves}, repeated_leaves


def _in_product_type(engine: StepEngine, matrices: Tensor, gradient_dtype: torch.dtype | None) -> Tensor:
    """Return matrices in the type in which their products are computed, if their gradients are stored in it.

    Products convert them to it anyway, and then the gradients need no conversion.
    """
    computed_in_it = gradient_dtype == torch.bfloat16 and engine.machine.bf16 and matrices.dtype == torch.float32
    return matrices.to(gradient_dtype) if computed_in_it else matrices


def repeat_constants(constants: Stack, parts: int) -> Stack:
    """Return constants in which every part has those of its client."""
    tensors = {
        name: tensor.repeat_interleave(parts, dim=0) if name in constants.stacked_names else tensor
        for name, tensor in constants.tensors.items()
    }
    return Stack(tensors, constants.stacked_names)


def repeat_given(given: tuple[Any, ...], parts: int, stacked: bool, shared: Collection[int]) -> tuple[Any, ...]:
    """Return arguments of a loss of which every part has those of its client.

    Parameters
    ----------
    shared
        Identities of tensors that all clients share, and so all parts.
    """

    def repeat(tensor: Tensor) -> Tensor:
        if id(tensor) in shared:
            return tensor
        return tensor.repeat_interleave(parts, dim=0) if stacked else tensor.expand(parts, *tensor.shape)

    repeated: tuple[Any, ...] = tree_map_only(Tensor, repeat, given)
    return repeated


def by_part(
    gradients: Mapping[str, Tensor], leaves: Mapping[str, Tensor], parts: int, stacked: bool
) -> dict[str, Tensor]:
    """Return the gradients of repeated leaves in the shapes of the leaves, with an axis of parts after the clients'."""
    axis = 1 if stacked else 0
    return {
        name: gradient.reshape(*leaves[name].shape[:axis], parts, *leaves[name].shape[axis:])
        for name, gradient in gradients.items()
    }
