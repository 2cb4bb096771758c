"""Attention over short sequences on a GPU, from packed queries, keys and values.

A ViT has few tokens: all keys of a head fit in one program. The softmax is computed over a whole row at once, nothing
is carried from tile to tile, and the backward pass needs only the inputs of the forward pass. This module needs
Triton: import it only if there is a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitfleet.models.forward.short_attention import backward_kernel, forward_kernel

MAX_TOKENS = 128
HEAD_DIMS = (16, 32, 64)


class LaunchConfig(NamedTuple):
    """How one program processes one head of one image. Tile sizes are powers of two, at least 16.

    Attributes
    ----------
    query_rows
        Queries processed at a time.
    num_warps
        Warps per program.
    main_keys, rest_keys
        Keys in the first and in the second tile; 0 if there is one tile. 65 tokens are a tile of 64 and one of 16
        instead of one of 128.
    num_stages
        Depth of the software pipeline that loads queries.
    """

    query_rows: int
    num_warps: int
    main_keys: int
    rest_keys: int
    num_stages: int = 2


def is_supported(tokens: int, head_dim: int) -> bool:
    """Whether :func:`short_attention` supports this number of tokens and width of a head."""
    return 1 <= tokens <= MAX_TOKENS and head_dim in HEAD_DIMS


def short_attention(qkv: Tensor) -> Tensor:
    """Return scaled dot-product attention.

    Parameters
    ----------
    qkv
        ``[batch, tokens, 3, heads, head_dim]``.

    Returns
    -------
    Tensor
        ``[batch, tokens, heads, head_dim]``.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3 or not is_supported(qkv.shape[1], qkv.shape[4]):
        raise ValueError(f"not [batch, tokens, 3, heads, head_dim] of a supported size: {list(qkv.shape)}")
    output: Tensor = _forward_op(qkv)
    return output


@torch.library.custom_op("vitfleet::short_attention", mutates_args=())
def _forward_op(qkv: Tensor) -> Tensor:
    return launch_forward(qkv, forward_config(qkv.shape[1], qkv.shape[4], qkv.dtype))


@torch.library.custom_op("vitfleet::short_attention_backward", mutates_args=())
def _backward_op(grad_output: Tensor, qkv: Tensor) -> Tensor:
    return launch_backward(grad_output, qkv, backward_config(qkv.shape[1], qkv.shape[4], qkv.dtype))


@_forward_op.register_fake
def _(qkv: Tensor) -> Tensor:
    batch, tokens, _, heads, head_dim = qkv.shape
    return qkv.new_empty(batch, tokens, heads, head_dim)


@_backward_op.register_fake
def _(grad_output: Tensor, qkv: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save_inputs(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_output: Tensor) -> Tensor:
    grad_qkv: Tensor = _backward_op(grad_output, *ctx.saved_tensors)
    return grad_qkv


_forward_op.register_autograd(_differentiate, setup_context=_save_inputs)


def forward_config(tokens: int, head_dim: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration of the forward pass that was fastest on an H200 in half precision."""
    tiles = _key_tiles(tokens)
    if dtype == torch.float32:
        return LaunchConfig(16, 8, *tiles)
    return LaunchConfig(64, 4, *tiles) if head_dim == 64 and tokens > 32 else LaunchConfig(32, 1, *tiles)


def backward_config(tokens: int, head_dim: int, dtype: torch.dtype) -> LaunchConfig:
    """Return that of the backward pass; the gradients of all keys and values stay in registers."""
    tiles = _key_tiles(tokens)
    if dtype == torch.float32:
        return LaunchConfig(16, 8, *tiles)
    if tokens <= 64:
        return LaunchConfig(tiles[0], tiles[0] // 16, *tiles)  # all queries at once
    narrow = head_dim <= 32 and tokens <= 96
    return LaunchConfig(16, 1, *tiles, num_stages=1) if narrow else LaunchConfig(16, 4, *tiles)


def _key_tiles(tokens: int) -> tuple[int, int]:
    """Return the size of one tile for all keys, or of two tiles if they are smaller together."""
    whole = max(16, _next_power_of_two(tokens))
    main = whole // 2
    rest = max(16, _next_power_of_two(tokens - main)) if tokens > main else 0
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)


def _next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least this number."""
    return 1 << (number - 1).bit_length()


def launch_forward(qkv: Tensor, config: LaunchConfig) -> Tensor:
    """Run the forward kernel."""
    batch, tokens, _, heads, head_dim = qkv.shape
    qkv = qkv.contiguous()
    output = qkv.new_empty(batch, tokens, heads, head_dim)
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        forward_kernel[(batch * heads,)](qkv, output, heads, tokens, head_dim, **config._asdict())
    return output


def launch_backward(grad_output: Tensor, qkv: Tensor, config: LaunchConfig) -> Tensor:
    """Run the backward kernel: from the gradient of the output to that of the inputs."""
    batch, tokens, _, heads, head_dim = qkv.shape
    qkv, grad_output = qkv.contiguous(), grad_output.contiguous()
    grad_qkv = torch.empty_like(qkv)
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        backward_kernel[(batch * heads,)](grad_output, qkv, grad_qkv, heads, tokens, head_dim, **config._asdict())
    return grad_qkv
