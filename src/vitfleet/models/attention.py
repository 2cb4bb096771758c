"""Attention over short sequences, on a GPU, from packed queries, keys, and values.

A ViT's tokens are few: all keys of a head fit in one program, so that a softmax sees its whole row, nothing is carried
from tile to tile, and the way back needs no more than what the way there was given. Needs Triton: import this where
there is a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

MOST_TOKENS = 128
WIDTHS = (16, 32, 64)


class Plan(NamedTuple):
    """How a program goes through one head of one image; sizes of tiles are powers of two, at least 16."""

    rows: int  # queries at a time
    warps: int
    main: int  # keys in the first tile
    rest: int  # keys in the second, or 0: 65 tokens are a tile of 64 and one of 16, not one of 128
    num_tasks: int = 2  # how far ahead queries are fetched, plus one


def suits(tokens: int, width: int) -> bool:
    """Whether `attend` takes heads of this width over so many tokens."""
    return 1 <= tokens <= MOST_TOKENS and width in WIDTHS


def attend(qkv: Tensor) -> Tensor:
    """Mix values by how well queries and keys agree.

    Parameters
    ----------
    qkv
        ``[batch, tokens, 3, heads, width]``.

    Returns
    -------
    Tensor
        ``[batch, tokens, heads, width]``.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3 or not suits(qkv.shape[1], qkv.shape[4]):
        raise ValueError(f"no [batch, tokens, 3, heads, width] of a size that suits: {list(qkv.shape)}")
    mixed: Tensor = _attend(qkv)
    return mixed


@torch.library.custom_op("vitfleet::attend", mutates_args=())
def _attend(qkv: Tensor) -> Tensor:
    return mix(qkv, plan(qkv.shape[1], qkv.shape[4], qkv.dtype))


@torch.library.custom_op("vitfleet::attend_backward", mutates_args=())
def _attend_backward(gradient: Tensor, qkv: Tensor) -> Tensor:
    return mix_backward(gradient, qkv, plan_backward(qkv.shape[1], qkv.shape[4], qkv.dtype))


@_attend.register_fake
def _(qkv: Tensor) -> Tensor:
    batch, tokens, _, heads, width = qkv.shape
    return qkv.new_empty(batch, tokens, heads, width)


@_attend_backward.register_fake
def _(gradient: Tensor, qkv: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> Tensor:
    derived: Tensor = _attend_backward(gradient, *ctx.saved_tensors)
    return derived


_attend.register_autograd(_differentiate, setup_context=_keep)


def plan(tokens: int, width: int, dtype: torch.dtype) -> Plan:
    """Return how to go forward: what was fastest on an H200 in half precision."""
    tiles = _tiles(tokens)
    if dtype == torch.float32:
        return Plan(16, 8, *tiles)
    return Plan(64, 4, *tiles) if width == 64 and tokens > 32 else Plan(32, 1, *tiles)


def plan_backward(tokens: int, width: int, dtype: torch.dtype) -> Plan:
    """Return how to go backward, likewise; the gradients of all keys and values stay in registers."""
    tiles = _tiles(tokens)
    if dtype == torch.float32:
        return Plan(16, 8, *tiles)
    if tokens <= 64:
        return Plan(tiles[0], tiles[0] // 16, *tiles)  # all at once
    return Plan(16, 1, *tiles, num_tasks=1) if width <= 32 and tokens <= 96 else Plan(16, 4, *tiles)


def _tiles(tokens: int) -> tuple[int, int]:
    """Return one tile that holds all keys, or two where they are less together."""
    whole = max(16, _power(tokens))
    main = whole // 2
    rest = max(16, _power(tokens - main)) if tokens > main else 0
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)


def _power(number: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def mix(qkv: Tensor, plan: Plan) -> Tensor:
    """Go forward as planned."""
    batch, tokens, _, heads, width = qkv.shape
    qkv = qkv.contiguous()
    mixed = qkv.new_empty(batch, tokens, heads, width)
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        _mix[(batch * heads,)](qkv, mixed, heads, tokens, width, **_sizes(plan))
    return mixed


def mix_backward(gradient: Tensor, qkv: Tensor, plan: Plan) -> Tensor:
    """Go backward as planned: from the gradient of what came out to that of what went in."""
    batch, tokens, _, heads, width = qkv.shape
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    derived = torch.empty_like(qkv)
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        _mix_backward[(batch * heads,)](gradient, qkv, derived, heads, tokens, width, **_sizes(plan))
    return derived


def _sizes(plan: Plan) -> dict[str, int]:
    return {
        "rows": plan.rows,
        "main": plan.main,
        "rest": plan.rest,
        "num_warps": plan.warps,
        "num_stages": plan.num_tasks,
    }


# In the kernels, a tile is [tokens, width] of one head, with zeros where there are no more tokens: such a row has a
# gradient of zero, and adds nothing to any key's or value's. "ieee" keeps float32 from being rounded to TF32.


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    qkv,
    mixed,
    heads,
    tokens: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    main: tl.constexpr,
    rest: tl.constexpr,
):
    image = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    step = heads * width
    qkv += image * tokens * 3 * step + head * width
    mixed += image * tokens * step + head * width
    scale = 1.4426950408889634 * width**-0.5  # of powers of two, not of e

    keys = _load(qkv + step, 0, 3 * step, tokens, main, width)
    values = _load(qkv + 2 * step, 0, 3 * step, tokens, main, width)
    if rest:
        more_keys = _load(qkv + step, main, 3 * step, tokens, rest, width)
        more_values = _load(qkv + 2 * step, main, 3 * step, tokens, rest, width)

    for start in range(0, tokens, rows):
        queries = _load(qkv, start, 3 * step, tokens, rows, width)
        scores = _agree(queries, keys, scale, 0, tokens, main)
        top = tl.max(scores, 1)
        if rest:
            more_scores = _agree(queries, more_keys, scale, main, tokens, rest)
            top = tl.maximum(top, tl.max(more_scores, 1))
        shares = tl.exp2(scores - top[:, None])
        whole = tl.sum(shares, 1)
        out = tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        if rest:
            more_shares = tl.exp2(more_scores - top[:, None])
            whole += tl.sum(more_shares, 1)
            out += tl.dot(more_shares.to(values.dtype), more_values, input_precision="ieee")
        _store(mixed, out / whole[:, None], start, step, tokens, rows, width)


@triton.jit  # type: ignore[untyped-decorator]
def _mix_backward(  # type: ignore[no-untyped-def]
    gradient,
    qkv,
    derived,
    heads,
    tokens: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    main: tl.constexpr,
    rest: tl.constexpr,
):
    image = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    step = heads * width
    gradient += image * tokens * step + head * width
    qkv += image * tokens * 3 * step + head * width
    derived += image * tokens * 3 * step + head * width
    scale = width**-0.5
    binary = 1.4426950408889634 * scale  # of powers of two, not of e

    keys = _load(qkv + step, 0, 3 * step, tokens, main, width)
    values = _load(qkv + 2 * step, 0, 3 * step, tokens, main, width)
    to_keys = tl.full((main, width), 0.0, tl.float32)
    to_values = tl.full((main, width), 0.0, tl.float32)
    if rest:
        more_keys = _load(qkv + step, main, 3 * step, tokens, rest, width)
        more_values = _load(qkv + 2 * step, main, 3 * step, tokens, rest, width)
        to_more_keys = tl.full((rest, width), 0.0, tl.float32)
        to_more_values = tl.full((rest, width), 0.0, tl.float32)

    for start in range(0, tokens, rows):
        queries = _load(qkv, start, 3 * step, tokens, rows, width)
        inward = _load(gradient, start, step, tokens, rows, width)

        scores = _agree(queries, keys, binary, 0, tokens, main)
        top = tl.max(scores, 1)
        if rest:
            more_scores = _agree(queries, more_keys, binary, main, tokens, rest)
            top = tl.maximum(top, tl.max(more_scores, 1))
        shares = tl.exp2(scores - top[:, None])
        whole = tl.sum(shares, 1)
        if rest:
            more_shares = tl.exp2(more_scores - top[:, None])
            whole += tl.sum(more_shares, 1)
        part = 1.0 / whole
        shares *= part[:, None]
        to_shares = tl.dot(inward, tl.trans(values), input_precision="ieee")
        mean = tl.sum(shares * to_shares, 1)
        if rest:
            more_shares *= part[:, None]
            to_more_shares = tl.dot(inward, tl.trans(more_values), input_precision="ieee")
            mean += tl.sum(more_shares * to_more_shares, 1)

        to_scores = (shares * (to_shares - mean[:, None])).to(keys.dtype)
        to_queries = tl.dot(to_scores, keys, input_precision="ieee")
        to_keys += tl.dot(tl.trans(to_scores), queries, input_precision="ieee")
        to_values += tl.dot(tl.trans(shares.to(keys.dtype)), inward, input_precision="ieee")
        if rest:
            to_more_scores = (more_shares * (to_more_shares - mean[:, None])).to(keys.dtype)
            to_queries += tl.dot(to_more_scores, more_keys, input_precision="ieee")
            to_more_keys += tl.dot(tl.trans(to_more_scores), queries, input_precision="ieee")
            to_more_values += tl.dot(tl.trans(more_shares.to(keys.dtype)), inward, input_precision="ieee")
        _store(derived, to_queries * scale, start, 3 * step, tokens, rows, width)

    _store(derived + step, to_keys * scale, 0, 3 * step, tokens, main, width)
    _store(derived + 2 * step, to_values, 0, 3 * step, tokens, main, width)
    if rest:
        _store(derived + step, to_more_keys * scale, main, 3 * step, tokens, rest, width)
        _store(derived + 2 * step, to_more_values, main, 3 * step, tokens, rest, width)


@triton.jit  # type: ignore[untyped-decorator]
def _agree(  # type: ignore[no-untyped-def]
    queries,
    keys,
    scale,
    first,
    tokens: tl.constexpr,
    count: tl.constexpr,
):
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    places = first + tl.arange(0, count)
    return tl.where(places[None, :] < tokens, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    source,
    first,
    step,
    tokens: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
):
    places = first + tl.arange(0, count)
    spots = places[:, None] * step + tl.arange(0, width)[None, :]
    return tl.load(source + spots, mask=places[:, None] < tokens, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    target,
    tile,
    first,
    step,
    tokens: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
):
    places = first + tl.arange(0, count)
    spots = places[:, None] * step + tl.arange(0, width)[None, :]
    tl.store(target + spots, tile.to(target.dtype.element_ty), mask=places[:, None] < tokens)
