"""Attention over short sequences on a GPU, from packed queries, keys and values.

A ViT has few tokens: all keys of a head fit in one program. The softmax is computed over a whole row at once, nothing
is carried from tile to tile, and the backward pass needs only the inputs of the forward pass. This module needs
Triton: import it only if there is a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

MAX_TOKENS = 128
HEAD_DIMS = (16, 32, 64)


class LaunchConfig(NamedTuple):
    """How one program processes one head of one image. Tile sizes are powers of two, at least 16."""

    query_rows: int  # queries processed at a time
    num_warps: int  # warps per program
    main_keys: int  # keys in the first tile: 65 tokens are a tile of 64 and one of 16 instead of one of 128
    rest_keys: int  # keys in the second tile; 0 if there is one tile
    num_stages: int = 2  # depth of the software pipeline that loads queries


def is_supported(tokens: int, head_dim: int) -> bool:
    """Whether :func:`short_attention` supports this number of tokens and width of a head."""
    return 1 <= tokens <= MAX_TOKENS and head_dim in HEAD_DIMS


def short_attention(qkv: Tensor) -> Tensor:
    """Return scaled dot-product attention, ``[batch, tokens, heads, head_dim]``; the input has 3 before the heads."""
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
    """Return the configuration of the backward pass; the gradients of all keys and values stay in registers."""
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


# The kernels. One program computes one head of one image. A tile is ``[tokens, head_dim]`` of one head, with zeros in
# the rows after the last token: such a row has a gradient of zero and adds nothing to the gradient of any key or value.
# "ieee" keeps float32 products from being rounded to TF32. Kernels cannot read globals that are not constexpr: log2(e),
# for exponentials of base 2, is written out in them.


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    qkv,
    output,
    heads,
    tokens: tl.constexpr,
    head_dim: tl.constexpr,
    query_rows: tl.constexpr,
    main_keys: tl.constexpr,
    rest_keys: tl.constexpr,
):
    """Write softmax(q·kᵀ / √head_dim)·v of one head, ``query_rows`` queries at a time."""
    image = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    stride = heads * head_dim
    qkv += image * tokens * 3 * stride + head * head_dim
    output += image * tokens * stride + head * head_dim
    scale = 1.4426950408889634 * head_dim**-0.5  # exponentials are of base 2

    keys, values = _load_keys_values(qkv, 0, stride, tokens, main_keys, head_dim)
    if rest_keys:
        keys_rest, values_rest = _load_keys_values(qkv, main_keys, stride, tokens, rest_keys, head_dim)

    for start in range(0, tokens, query_rows):
        queries = _load_tile(qkv, start, 3 * stride, tokens, query_rows, head_dim)
        scores = _scores(queries, keys, scale, 0, tokens, main_keys)
        row_max = tl.max(scores, 1)
        if rest_keys:
            scores_rest = _scores(queries, keys_rest, scale, main_keys, tokens, rest_keys)
            row_max = tl.maximum(row_max, tl.max(scores_rest, 1))
        probs = tl.exp2(scores - row_max[:, None])
        row_sum = tl.sum(probs, 1)
        acc = tl.dot(probs.to(values.dtype), values, input_precision="ieee")
        if rest_keys:
            probs_rest = tl.exp2(scores_rest - row_max[:, None])
            row_sum += tl.sum(probs_rest, 1)
            acc += tl.dot(probs_rest.to(values.dtype), values_rest, input_precision="ieee")
        _store_tile(output, acc / row_sum[:, None], start, stride, tokens, query_rows, head_dim)


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_output, qkv, grad_qkv, heads, tokens: tl.constexpr, head_dim: tl.constexpr,
    query_rows: tl.constexpr, main_keys: tl.constexpr, rest_keys: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k and v; the probabilities are computed again from the inputs."""
    image = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    stride = heads * head_dim
    grad_output += image * tokens * stride + head * head_dim
    qkv += image * tokens * 3 * stride + head * head_dim
    grad_qkv += image * tokens * 3 * stride + head * head_dim
    scale = head_dim**-0.5
    log2_scale = 1.4426950408889634 * scale  # exponentials are of base 2

    keys, values = _load_keys_values(qkv, 0, stride, tokens, main_keys, head_dim)
    grad_keys = tl.full((main_keys, head_dim), 0.0, tl.float32)
    grad_values = tl.full((main_keys, head_dim), 0.0, tl.float32)
    if rest_keys:
        keys_rest, values_rest = _load_keys_values(qkv, main_keys, stride, tokens, rest_keys, head_dim)
        grad_keys_rest = tl.full((rest_keys, head_dim), 0.0, tl.float32)
        grad_values_rest = tl.full((rest_keys, head_dim), 0.0, tl.float32)

    for start in range(0, tokens, query_rows):
        queries = _load_tile(qkv, start, 3 * stride, tokens, query_rows, head_dim)
        grad_rows = _load_tile(grad_output, start, stride, tokens, query_rows, head_dim)

        scores = _scores(queries, keys, log2_scale, 0, tokens, main_keys)
        row_max = tl.max(scores, 1)
        if rest_keys:
            scores_rest = _scores(queries, keys_rest, log2_scale, main_keys, tokens, rest_keys)
            row_max = tl.maximum(row_max, tl.max(scores_rest, 1))
        probs = tl.exp2(scores - row_max[:, None])
        row_sum = tl.sum(probs, 1)
        if rest_keys:
            probs_rest = tl.exp2(scores_rest - row_max[:, None])
            row_sum += tl.sum(probs_rest, 1)
        inverse_sum = 1.0 / row_sum
        probs *= inverse_sum[:, None]
        grad_probs = tl.dot(grad_rows, tl.trans(values), input_precision="ieee")
        delta = tl.sum(probs * grad_probs, 1)
        if rest_keys:
            probs_rest *= inverse_sum[:, None]
            grad_probs_rest = tl.dot(grad_rows, tl.trans(values_rest), input_precision="ieee")
            delta += tl.sum(probs_rest * grad_probs_rest, 1)

        grad_scores = (probs * (grad_probs - delta[:, None])).to(keys.dtype)
        grad_queries = tl.dot(grad_scores, keys, input_precision="ieee")
        grad_keys += tl.dot(tl.trans(grad_scores), queries, input_precision="ieee")
        grad_values += tl.dot(tl.trans(probs.to(keys.dtype)), grad_rows, input_precision="ieee")
        if rest_keys:
            grad_scores_rest = (probs_rest * (grad_probs_rest - delta[:, None])).to(keys.dtype)
            grad_queries += tl.dot(grad_scores_rest, keys_rest, input_precision="ieee")
            grad_keys_rest += tl.dot(tl.trans(grad_scores_rest), queries, input_precision="ieee")
            grad_values_rest += tl.dot(tl.trans(probs_rest.to(keys.dtype)), grad_rows, input_precision="ieee")
        _store_tile(grad_qkv, grad_queries * scale, start, 3 * stride, tokens, query_rows, head_dim)

    _store_keys_values(grad_qkv, grad_keys * scale, grad_values, 0, stride, tokens, main_keys, head_dim)
    if rest_keys:
        grad_keys_rest *= scale
        _store_keys_values(grad_qkv, grad_keys_rest, grad_values_rest, main_keys, stride, tokens, rest_keys, head_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    queries, keys, scale, first_key, tokens: tl.constexpr, count: tl.constexpr
):
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    key = first_key + tl.arange(0, count)
    return tl.where(key[None, :] < tokens, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _load_keys_values(  # type: ignore[no-untyped-def]
    qkv, first_row, stride, tokens: tl.constexpr, count: tl.constexpr, head_dim: tl.constexpr
):
    keys = _load_tile(qkv + stride, first_row, 3 * stride, tokens, count, head_dim)
    values = _load_tile(qkv + 2 * stride, first_row, 3 * stride, tokens, count, head_dim)
    return keys, values


@triton.jit  # type: ignore[untyped-decorator]
def _store_keys_values(  # type: ignore[no-untyped-def]
    qkv, keys, values, first_row, stride, tokens: tl.constexpr, count: tl.constexpr, head_dim: tl.constexpr
):
    _store_tile(qkv + stride, keys, first_row, 3 * stride, tokens, count, head_dim)
    _store_tile(qkv + 2 * stride, values, first_row, 3 * stride, tokens, count, head_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(  # type: ignore[no-untyped-def]
    source, first_row, stride, tokens: tl.constexpr, count: tl.constexpr, head_dim: tl.constexpr
):
    row = first_row + tl.arange(0, count)
    offsets = row[:, None] * stride + tl.arange(0, head_dim)[None, :]
    return tl.load(source + offsets, mask=row[:, None] < tokens, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(  # type: ignore[no-untyped-def]
    target, tile, first_row, stride, tokens: tl.constexpr, count: tl.constexpr, head_dim: tl.constexpr
):
    row = first_row + tl.arange(0, count)
    offsets = row[:, None] * stride + tl.arange(0, head_dim)[None, :]
    tl.store(target + offsets, tile.to(target.dtype.element_ty), mask=row[:, None] < tokens)
