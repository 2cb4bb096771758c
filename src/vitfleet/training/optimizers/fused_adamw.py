"""AdamW for the stacked weights of several clients on a GPU, with one kernel launch per tensor.

It computes what torch's fused kernel computes for one client after the other. Every client has its own step count, and
may skip the step. This module needs Triton: import it only where there is a GPU.
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
    first_moment: Tensor,
    second_moment: Tensor,
    step_counts: Tensor,
    active: Tensor,
    lr: Tensor,
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """Take a step in place, for the clients that are ``active``: 1 for each that takes the step, else 0, ``[clients]``.

    All tensors are float32 and on the device. Weights and moments, ``[clients, …]``, are contiguous. So is each
    client's gradient, but those of two clients may be apart in memory. ``step_counts``, ``[clients]``, include this
    step.
    """
    contiguous = gradient[0].is_contiguous() and all(
        tensor.is_contiguous() for tensor in (weight, first_moment, second_moment)
    )
    if not contiguous or any(tensor.shape != weight.shape for tensor in (gradient, first_moment, second_moment)):
        raise ValueError("weights, gradients, and moments must be contiguous and of one shape")
    clients = weight.shape[0]
    count = weight.numel() // max(1, clients)
    with torch.cuda.device_of(weight):  # type: ignore[no-untyped-call]
        _adamw_kernel[(triton.cdiv(count, BLOCK), clients)](
            weight,
            gradient,
            first_moment,
            second_moment,
            step_counts,
            active,
            lr,
            gradient.stride(0),
            count,
            1 - betas[0],
            1 - betas[1],
            math.log(betas[0]),
            math.log(betas[1]),
            epsilon,
            weight_decay,
            block=BLOCK,
            num_warps=4,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    first_moment,
    second_moment,
    step_counts,
    active,
    lr,
    gradient_stride,
    count,
    one_minus_beta1,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    epsilon,
    weight_decay,
    block: tl.constexpr,
):
    client = tl.program_id(1)
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < tl.where(tl.load(active + client) == 0, 0, count)
    client_offsets = client.to(tl.int64) * count + offsets
    steps = tl.maximum(tl.load(step_counts + client), 1.0)  # 0, of a client that was never active, would divide by 0
    rate = tl.load(lr)

    w = tl.load(weight + client_offsets, mask=mask)
    g = tl.load(gradient + client.to(tl.int64) * gradient_stride + offsets, mask=mask).to(tl.float32)
    m = tl.load(first_moment + client_offsets, mask=mask)
    v = tl.load(second_moment + client_offsets, mask=mask)
    w -= rate * weight_decay * w
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g * g - v)
    denominator = tl.sqrt(v) / tl.sqrt(_one_minus_exp(steps * log_beta2)) + epsilon
    w -= rate / _one_minus_exp(steps * log_beta1) * m / denominator
    tl.store(weight + client_offsets, w, mask=mask)
    tl.store(first_moment + client_offsets, m, mask=mask)
    tl.store(second_moment + client_offsets, v, mask=mask)


@triton.jit
def _one_minus_exp(power):  # type: ignore[no-untyped-def]
    """Return 1 - e^power for a negative power; as a series where the difference would lose digits."""
    series = 1 + power / 2 * (1 + power / 3 * (1 + power / 4 * (1 + power / 5 * (1 + power / 6))))
    return tl.where(power > -0.1, -power * series, 1.0 - tl.exp(power))
