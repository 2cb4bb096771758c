"""Tensor operations whose weights are shared by all clients or have a leading axis of clients.

With a shared weight the inputs of all clients pass through it as one batch. With one weight per client the operation
is one batched product. A matrix may also have a second axis of parts: the parts of a client share its weight, and
only their gradients differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``inputs · weightᵀ + bias``; weight and bias are shared or per client, independently.

    The weight is ``[out, in]``, ``[clients, out, in]``, or ``[clients, parts, out, in]`` where the parts of a client
    have the same weight: an expanded tensor. The inputs then have a leading axis of clients times parts.
    """
    if weight.dim() == 2:
        if bias is None or bias.dim() == 1:
            return F.linear(inputs, weight, bias)
        outputs = F.linear(inputs, weight)
    else:
        rows = inputs.flatten(1, -2)
        autocast = not rows.is_meta and torch.is_autocast_enabled(rows.device.type)
        dtype = torch.get_autocast_dtype(rows.device.type) if autocast else rows.dtype
        product: Tensor
        if weight.dim() == 4:
            product = _ProductPerPart.apply(rows.to(dtype), weight)  # type: ignore[no-untyped-call]
        else:
            weight = weight.to(dtype) if autocast else weight
            product = _BatchedProduct.apply(rows.to(dtype), weight)  # type: ignore[no-untyped-call]
        outputs = product.reshape(*inputs.shape[:-1], weight.shape[-2])
    return outputs if bias is None else outputs + broadcast_channels(bias, outputs).to(outputs.dtype)


class _BatchedProduct(torch.autograd.Function):
    """``rows · weightᵀ`` per client, with a weight gradient in the memory layout of the weight.

    Autograd would return it transposed, but a fused optimiser reads memory linearly.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.bmm(rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad
        return (
            torch.bmm(grad_output, weight) if needs_rows else None,
            torch.bmm(grad_output.mT, rows) if needs_weight else None,
        )


class _ProductPerPart(torch.autograd.Function):
    """``rows · weightᵀ``, where parts share the weight of their client, with a weight gradient for each part.

    The weight is read once per client, and converted once. As one weight per part it would be copied as often as there
    are parts.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        shared = weight[:, 0].to(rows.dtype)
        ctx.save_for_backward(rows, shared)
        return torch.bmm(_join_parts(rows, shared), shared.mT).view(*rows.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, shared = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad
        grad_rows = grad_weight = None
        if needs_rows:
            grad_rows = torch.bmm(_join_parts(grad_output, shared), shared).view(rows.shape)
        if needs_weight:
            grad_weight = torch.bmm(grad_output.mT, rows).view(len(shared), -1, *shared.shape[1:])
        return grad_rows, grad_weight


def _join_parts(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``[clients · parts, rows, …]`` as ``[clients, parts · rows, …]``."""
    return rows.reshape(len(weight), -1, rows.shape[-1])


def layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise the last axis; weight and bias are shared or per client."""
    if weight.dim() == 1 and (bias is None or bias.dim() == 1):
        return F.layer_norm(inputs, weight.shape, weight, bias, eps)
    normed = F.layer_norm(inputs, weight.shape[-1:], eps=eps) * broadcast_channels(weight, inputs)
    return normed if bias is None else normed + broadcast_channels(bias, inputs)


def broadcast_channels(vector: Tensor, inputs: Tensor) -> Tensor:
    """Return a per-channel weight in a shape that broadcasts over inputs; per client, over that client's inputs."""
    return vector if vector.dim() == 1 else vector.view(vector.shape[0], *(1,) * (inputs.dim() - 2), -1)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return scaled dot-product attention without a fused kernel; all ``[batch, heads, tokens, head_dim]``.

    The bias is added to the scores, the scale is 1 / √head_dim by default.
    """
    scores: Tensor = (queries * (queries.shape[-1] ** -0.5 if scale is None else scale)) @ keys.mT
    scores = scores if bias is None else scores + bias
    return scores.softmax(dim=-1) @ values


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut images into patches, row by row: ``[…, patches, channels · patch_size²]``."""
    *lead, channels, height, width = images.shape
    grid = images.reshape(-1, channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(*lead, -1, channels * patch_size * patch_size)


def kept_patches(images: Tensor, patch_size: int, keep: Tensor) -> Tensor:
    """Cut only some of the patches out of images: those at the positions ``keep``, ``[…, kept]``."""
    *lead, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    grid = images.reshape(-1, channels, rows, patch_size, columns, patch_size).permute(0, 2, 4, 1, 3, 5)
    kept = keep.reshape(len(grid), -1)
    image = torch.arange(len(grid), device=keep.device).unsqueeze(-1)
    return grid[image, kept // columns, kept % columns].reshape(*lead, kept.shape[-1], -1)


def gather_tokens(tokens: Tensor, keep: Tensor) -> Tensor:
    """Return the tokens at the kept positions ``[…, batch, kept]``."""
    return tokens.gather(-2, keep.unsqueeze(-1).expand(*keep.shape, tokens.shape[-1]))


def insert_prompts(tokens: Tensor, prompts: Tensor, num_prefix_tokens: int, num_replaced: int) -> Tensor:
    """Insert prompts after the prefix tokens, in the place of the ``num_replaced`` prompts of the previous block."""
    rows = (prompts if prompts.dim() == 2 else prompts.unsqueeze(1)).expand(*tokens.shape[:-2], -1, -1)
    return torch.cat([tokens[..., :num_prefix_tokens, :], rows, tokens[..., num_prefix_tokens + num_replaced :, :]], -2)
