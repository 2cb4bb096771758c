"""More references than parameters: where every direction is excluded, the applied gradient is exactly zero.

4,000 seeded problems, compared with SciPy's non-negative least squares in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from vitfleet.methods.continual.gradients.projection import References, project

Floats = NDArray[np.float64]
SHAPES = ((2, 1), (5, 2), (8, 3), (14, 4), (9, 6), (11, 8), (22, 9), (24, 11))  # references, parameters
CASES = 500  # of each shape


def crowded_problem(seed: int, k: int, width: int) -> tuple[Floats, Floats]:
    """Return a gradient and more references than it has numbers: random, of unequal lengths, or near copies."""
    random = np.random.default_rng([seed, k, width])
    rows = random.normal(size=(k, width)) + random.uniform(0, 2) * random.normal(size=width)
    if seed % 3 == 0:
        rows *= 10 ** random.uniform(-3, 3, size=(k, 1))
    if seed % 3 == 1:
        copied = random.integers(0, max(1, k // 2), size=k)
        rows = rows[copied] + 10 ** random.uniform(-8, -1) * random.normal(size=(k, width))
    return random.normal(size=width) - random.uniform(0, 3) * rows.mean(axis=0), rows


def by_nnls(gradient: Floats, rows: Floats) -> Floats:
    """Return g' = g + Gᵀv of the v ≥ 0 for which it is shortest: the dual of the projection."""
    unit_rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    v, _ = nnls(unit_rows.T, -gradient, maxiter=10_000)
    return np.asarray(gradient + unit_rows.T @ v, dtype=np.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_of_which_nothing_remains_is_exactly_zero(dtype: torch.dtype) -> None:
    vanished = 0
    for k, width in SHAPES:
        problems = [crowded_problem(seed, k, width) for seed in range(CASES)]
        gradients, rows = (torch.tensor(np.stack(column), dtype=dtype) for column in zip(*problems, strict=True))
        projected, degenerate = torch.vmap(row_projected)(gradients, rows)
        for case in range(CASES):
            applied, g, constraints = (one[case].double().numpy() for one in (projected, gradients, rows))
            expected, length = by_nnls(g, constraints), float(np.linalg.norm(g))
            if np.linalg.norm(expected) < 1e-9 * length:
                vanished += 1
                assert not applied.any(), (k, width, case)
                assert degenerate[case] == 1
                continue
            np.testing.assert_allclose(applied, expected, atol=2e-6 * length, err_msg=str((k, width, case)))
            cosines = constraints @ applied / np.linalg.norm(constraints, axis=1) / np.linalg.norm(applied)
            assert cosines.min() >= -1e-6, (k, width, case)
    assert vanished > len(SHAPES) * CASES / 4, "they are no exception among such problems"


def row_projected(gradient: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    projected, counts = project({"w": gradient}, References({"w": rows}, torch.ones(len(rows), dtype=torch.bool)))
    return projected["w"], counts["degenerate"]
