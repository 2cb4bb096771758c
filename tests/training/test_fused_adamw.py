"""The kernel for many clients' AdamW takes torch's steps, each client its own."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton")
# The interpreter must be asked for before Triton is imported, and torchvision has done so by now.
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU, or with TRITON_INTERPRET=1", allow_module_level=True)

from vitfleet.config.schema import TrainConfig  # noqa: E402
from vitfleet.training.fused_adamw import adamw  # noqa: E402
from vitfleet.training.optim import Optimizer  # noqa: E402

RATE, DECAY, EPSILON = 3e-3, 0.05, 1e-8
PATTERNS = ([1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 1, 1])
SHAPES = [(5,), (7, 9), (40, 64)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.95)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_client_takes_torchs_steps(shape: tuple[int, ...], dtype: torch.dtype, betas: tuple[float, float]) -> None:
    weight = draw(3, *shape, seed=0)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    taken = torch.zeros(3, device=DEVICE)
    rate = torch.tensor(RATE, device=DEVICE)
    true = [one.clone().requires_grad_() for one in weight.unbind()]
    optimizers = [torch.optim.AdamW([one], RATE, betas, EPSILON, DECAY) for one in true]

    for seed, pattern in enumerate(PATTERNS, start=1):
        row = draw(3, 11 + math.prod(shape), seed=seed).to(dtype) * 10.0 ** (seed - 4)
        gradient = row[:, 11:].view(3, *shape)  # as a transform leaves it: a piece of all there is
        active = torch.tensor(pattern, device=DEVICE, dtype=torch.float32)
        taken += active
        before = [one.clone() for one in (weight, first, second)]
        adamw(weight, gradient, first, second, taken, active, rate, betas=betas, epsilon=EPSILON, decay=DECAY)
        for client, acts in enumerate(pattern):
            if acts:
                true[client].grad = gradient[client].float()
                optimizers[client].step()
            else:
                for now, then in zip((weight, first, second), before, strict=True):
                    assert torch.equal(now[client], then[client])

    for client, (one, optimizer) in enumerate(zip(true, optimizers, strict=True)):
        state = optimizer.state[one]
        torch.testing.assert_close(weight[client], one.detach(), rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(first[client], state["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second[client], state["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_a_late_step_is_torchs() -> None:
    weight, gradient, first = (draw(1, 8, seed=seed) for seed in range(3))
    second = draw(1, 8, seed=3).square()
    true = weight[0].clone().requires_grad_()
    optimizer = torch.optim.AdamW([true], RATE, weight_decay=DECAY)
    true.grad = gradient[0].clone()
    for count in (1.0, 99.0, 150.0, 4000.0):
        step = torch.tensor(count - 1)
        optimizer.state[true] = {"step": step, "exp_avg": first[0].clone(), "exp_avg_sq": second[0].clone()}
        optimizer.step()
        one = torch.ones(1, device=DEVICE)
        rate = torch.tensor(RATE, device=DEVICE)
        moments = first.clone(), second.clone()
        adamw(weight, gradient, *moments, count * one, one, rate, betas=(0.9, 0.999), epsilon=EPSILON, decay=DECAY)
        torch.testing.assert_close(weight[0], true.detach(), rtol=1e-6, atol=1e-6)


def test_it_refuses_what_does_not_lie_alike() -> None:
    weight, vector, rate = draw(2, 3, 4, seed=0), torch.ones(2, device=DEVICE), torch.ones((), device=DEVICE)
    turned = draw(2, 4, 3, seed=1).mT
    with pytest.raises(ValueError, match="contiguous"):
        adamw(weight, turned, weight, weight, vector, vector, rate, betas=(0.9, 0.99), epsilon=EPSILON, decay=DECAY)


def test_a_cohorts_optimiser_takes_it() -> None:
    config = TrainConfig(optimizer="adamw", weight_decay=DECAY)
    start = {name: draw(3, *shape, seed=seed) for seed, (name, shape) in enumerate((("a", (4, 3)), ("b", (5,))))}
    found = []
    for kernels in (True, False):
        leaves = {name: one.clone() for name, one in start.items()}
        optimizer = Optimizer(config, leaves, 3, kernels)
        optimizer.restart(RATE)
        for seed, count in enumerate((3, 3, 2, 1, 3)):
            gradients = {name: draw(*one.shape, seed=10 + seed)[:count] for name, one in leaves.items()}
            optimizer.first(count).step(gradients, None)
            skips = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
            optimizer.step({name: draw(*one.shape, seed=20 + seed) for name, one in leaves.items()}, skips)
        found.append(leaves)
    for name in start:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=2e-6, atol=2e-7)
        assert not torch.equal(found[0][name], start[name])
