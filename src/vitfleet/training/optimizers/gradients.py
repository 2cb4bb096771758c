"""Gradients of the losses of one client or of several stacked clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vitfleet.message import Tensors

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def client_gradients(losses: Tensor, leaves: Mapping[str, Tensor], retain_graph: bool = False) -> dict[str, Tensor]:
    """Return the gradient of each client's loss with respect to that client's weights.

    One backward pass serves all clients, because no client's loss depends on the weights of another.

    Parameters
    ----------
    retain_graph
        Whether another backward pass through the same forward pass follows.
    """
    gradients = torch.autograd.grad(
        losses.sum(), list(leaves.values()), retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    # A fused optimiser reads memory in order, and batched matrix products leave their gradients transposed.
    return {name: gradient.contiguous() for name, gradient in zip(leaves, gradients, strict=True)}


def clip_gradients(gradients: Tensors, max_norm: float, stacked: bool) -> dict[str, Tensor]:
    """Scale each client's gradient down to a norm, as ``torch.nn.utils.clip_grad_norm_`` does for one model."""

    def clip(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
        factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + CLIP_EPSILON)).clamp(max=1.0)
        return {name: gradient * factor for name, gradient in gradients.items()}

    clip_all: Callable[[dict[str, Tensor]], dict[str, Tensor]] = torch.vmap(clip) if stacked else clip
    return clip_all(dict(gradients))
