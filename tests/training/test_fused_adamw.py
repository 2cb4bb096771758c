"""The Triton kernel of AdamW for stacked clients takes the steps of torch's optimiser, for each client separately."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton")
# The interpreter has to be requested before Triton is imported, and torchvision has imported it by now.
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU, or with TRITON_INTERPRET=1", allow_module_level=True)

from vitfleet.config.schema import TrainConfig  # noqa: E402
from vitfleet.training.optimizers.fused_adamw import adamw  # noqa: E402
from vitfleet.training.optimizers.optimizer import Optimizer  # noqa: E402

RATE, DECAY, EPSILON = 3e-3, 0.05, 1e-8
PATTERNS = ([1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 1, 1])
SHAPES = [(5,), (7, 9), (40, 64)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.95)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adamw_kernel_steps_every_client_as_torch_does(
    shape: tuple[int, ...], dtype: torch.dtype, betas: tuple[float, float]
) -> None:
    weight = draw(3, *shape, seed=0)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    step_counts = torch.zeros(3, device=DEVICE)
    lr = torch.tensor(RATE, device=DEVICE)
    expected = [row.clone().requires_grad_() for row in weight.unbind()]
    optimizers = [torch.optim.AdamW([row], RATE, betas, EPSILON, DECAY) for row in expected]

    for seed, pattern in enumerate(PATTERNS, start=1):
        row = draw(3, 11 + math.prod(shape), seed=seed).to(dtype) * 10.0 ** (seed - 4)
        gradient = row[:, 11:].view(3, *shape)  # a view of a larger row, as a gradient transform returns it
        active = torch.tensor(pattern, device=DEVICE, dtype=torch.float32)
        step_counts += active
        before = [tensor.clone() for tensor in (weight, first, second)]
        adamw(
            weight, gradient, first, second, step_counts, active, lr,
            betas=betas, epsilon=EPSILON, weight_decay=DECAY,
        )  # fmt: skip
        for client, is_active in enumerate(pattern):
            if is_active:
                expected[client].grad = gradient[client].float()
                optimizers[client].step()
            else:
                for now, then in zip((weight, first, second), before, strict=True):
                    assert torch.equal(now[client], then[client])

    for client, (row, optimizer) in enumerate(zip(expected, optimizers, strict=True)):
        state = optimizer.state[row]
        torch.testing.assert_close(weight[client], row.detach(), rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(first[client], state["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second[client], state["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_adamw_kernel_takes_late_steps_as_torch_does() -> None:
    weight, gradient, first = (draw(1, 8, seed=seed) for seed in range(3))
    second = draw(1, 8, seed=3).square()
    expected = weight[0].clone().requires_grad_()
    optimizer = torch.optim.AdamW([expected], RATE, weight_decay=DECAY)
    expected.grad = gradient[0].clone()
    for count in (1.0, 99.0, 150.0, 4000.0):
        step = torch.tensor(count - 1)
        optimizer.state[expected] = {"step": step, "exp_avg": first[0].clone(), "exp_avg_sq": second[0].clone()}
        optimizer.step()
        active = torch.ones(1, device=DEVICE)
        lr = torch.tensor(RATE, device=DEVICE)
        moments = first.clone(), second.clone()
        betas = (0.9, 0.999)
        adamw(weight, gradient, *moments, count * active, active, lr, betas=betas, epsilon=EPSILON, weight_decay=DECAY)
        torch.testing.assert_close(weight[0], expected.detach(), rtol=1e-6, atol=1e-6)


def test_adamw_kernel_rejects_gradients_that_are_not_contiguous() -> None:
    weight, vector, lr = draw(2, 3, 4, seed=0), torch.ones(2, device=DEVICE), torch.ones((), device=DEVICE)
    transposed = draw(2, 4, 3, seed=1).mT
    with pytest.raises(ValueError, match="contiguous"):
        adamw(
            weight, transposed, weight, weight, vector, vector, lr,
            betas=(0.9, 0.99), epsilon=EPSILON, weight_decay=DECAY,
        )  # fmt: skip


def test_optimizer_with_kernel_steps_as_without() -> None:
    config = TrainConfig(optimizer="adamw", weight_decay=DECAY)
    start = {name: draw(3, *shape, seed=seed) for seed, (name, shape) in enumerate((("a", (4, 3)), ("b", (5,))))}
    outcomes = []
    for kernels in (True, False):
        leaves = {name: tensor.clone() for name, tensor in start.items()}
        optimizer = Optimizer(config, leaves, 3, kernels)
        optimizer.restart(RATE)
        for seed, count in enumerate((3, 3, 2, 1, 3)):
            gradients = {name: draw(*leaf.shape, seed=10 + seed)[:count] for name, leaf in leaves.items()}
            optimizer.first(count).step(gradients, None)
            active = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
            optimizer.step({name: draw(*leaf.shape, seed=20 + seed) for name, leaf in leaves.items()}, active)
        outcomes.append(leaves)
    for name in start:
        torch.testing.assert_close(outcomes[0][name], outcomes[1][name], rtol=2e-6, atol=2e-7)
        assert not torch.equal(outcomes[0][name], start[name])
