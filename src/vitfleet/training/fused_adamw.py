"""AdamW for the stacked weights of many clients, on a GPU, in one launch a tensor.

What torch's fused kernel does for one client after the other: each has its own count of steps, and may have none to
take. Needs Triton: import this where there is a GPU.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 1024


def adamw(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    taken: Tensor,
    active: Tensor,
    rate: Tensor,
    *,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """Take a step in place, for those clients that have one.

    Parameters
    ----------
    weight, first, second
        The weights and their moments, in float32, ``[clients, …]``, contiguous.
    gradient
        The same shape, each client's contiguous; the clients' may be rows of something larger.
    taken
        How many steps each client has taken, with this one; in float32, as ``active`` and ``rate``.
    active
        Who has a step to take: where it is 0, nothing changes.
    rate
        The learning rate, on the device.
    """
    lies = gradient[0].is_contiguous() and all(one.is_contiguous() for one in (weight, first, second))
    if not lies or any(one.shape != weight.shape for one in (gradient, first, second)):
        raise ValueError("weights, gradients, and moments must be contiguous and of one shape")
    clients = weight.shape[0]
    count = weight.numel() // max(1, clients)
    with torch.cuda.device_of(weight):  # type: ignore[no-untyped-call]
        _step[(triton.cdiv(count, BLOCK), clients)](
            weight,
            gradient,
            first,
            second,
            taken,
            active,
            rate,
            gradient.stride(0),
            count,
            1 - betas[0],
            1 - betas[1],
            math.log(betas[0]),
            math.log(betas[1]),
            epsilon,
            decay,
            block=BLOCK,
            num_warps=4,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    first,
    second,
    taken,
    active,
    rate,
    stride,
    count,
    fresh_first,
    fresh_second,
    log_first,
    log_second,
    epsilon,
    decay,
    block: tl.constexpr,
):
    client = tl.program_id(1)
    places = tl.program_id(0) * block + tl.arange(0, block)
    here = places < tl.where(tl.load(active + client) == 0, 0, count)
    spots = client.to(tl.int64) * count + places
    steps = tl.maximum(tl.load(taken + client), 1.0)  # a client that never acted: its 0 would divide
    size = tl.load(rate)

    w = tl.load(weight + spots, mask=here)
    g = tl.load(gradient + client.to(tl.int64) * stride + places, mask=here).to(tl.float32)
    m = tl.load(first + spots, mask=here)
    v = tl.load(second + spots, mask=here)
    w -= size * decay * w
    m += fresh_first * (g - m)
    v += fresh_second * (g * g - v)
    spread = tl.sqrt(v) / tl.sqrt(_complement(steps * log_second)) + epsilon
    w -= size / _complement(steps * log_first) * m / spread
    tl.store(weight + spots, w, mask=here)
    tl.store(first + spots, m, mask=here)
    tl.store(second + spots, v, mask=here)


@triton.jit
def _complement(power):  # type: ignore[no-untyped-def]
    """Return 1 - e^power, for a power below 0; as a series where the difference would lose digits."""
    series = 1 + power / 2 * (1 + power / 3 * (1 + power / 4 * (1 + power / 5 * (1 + power / 6))))
    return tl.where(power > -0.1, -power * series, 1.0 - tl.exp(power))
