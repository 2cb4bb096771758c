"""Gradient projection against quadprog and closed forms; the same lifted over clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import quadprog
import torch
from gradient_problems import all_present, problem
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.methods.continual.gradients.projection import (
    COUNTED_STEPS,
    References,
    project,
    solve_dual,
    to_chunks,
)

Floats = NDArray[np.float64]
COUNTED = [metric.name for metric in COUNTED_STEPS]


class Projected(NamedTuple):
    """A projected gradient, a single vector, and the counts of its step."""

    vector: Tensor
    rotated: Tensor
    degenerate: Tensor
    unsolved: Tensor


def row_projected(
    gradient: Tensor, rows: Tensor, present: Tensor | None = None, margin: float | Tensor = 0.0
) -> Projected:
    """Project a vector; all references are present where nothing else is said."""
    present = all_present(rows) if present is None else present
    projected, counts = project({"w": gradient}, References({"w": rows}, present), margin=margin)
    return Projected(projected["w"], counts["rotated"], counts["degenerate"], counts["unsolved"])


def as_floats(*counts: Tensor) -> list[float]:
    return [float(count) for count in counts]


def by_quadprog(gradient: Tensor, rows: Tensor) -> Floats:
    """Solve the primal: min ½‖g − g'‖² subject to G g' ≥ 0."""
    g, constraints = gradient.double().numpy(), rows.double().numpy().T
    solution: Floats = quadprog.solve_qp(np.eye(len(g)), g, constraints, np.zeros(len(rows)))[0]
    return solution


def test_projection_equals_quadprog_on_200_random_problems() -> None:
    rotated = 0
    for seed in range(200):
        gradient, rows = problem(seed, k=1 + seed % 10)
        found = row_projected(gradient, rows)
        np.testing.assert_allclose(found.vector.numpy(), by_quadprog(gradient, rows), atol=1e-6)
        assert found.unsolved == 0
        rotated += int(found.rotated)
    assert 100 < rotated < 200, "some gradients are rotated, some need not be"


@pytest.mark.parametrize("k", [1, 4, 10, 49])
def test_solve_dual_satisfies_the_optimality_conditions_to_1e_8(k: int) -> None:
    for seed in range(20):
        gradient, rows = problem(1000 + seed, k, size=80)
        chunks = to_chunks({"w": rows}, {"w": gradient[None]})
        products = (chunks @ chunks.mT).sum(0)
        gram, slack, size = products[:-1, :-1], products[:-1, -1], products[-1, -1]
        solution = solve_dual(gram, slack, size)
        # The Karush-Kuhn-Tucker conditions, for rows and gradient of unit length.
        lengths = gram.diagonal().sqrt()
        values = (gram @ solution.v + slack) / lengths / size.sqrt()
        assert bool(solution.solved)
        assert float(solution.v.min()) >= 0
        assert float(values.min()) > -1e-8
        assert float((values * solution.v * lengths / size.sqrt()).abs().max()) < 1e-8


def test_projection_with_more_constraints_than_dimensions() -> None:
    for seed in range(50):
        gradient, rows = problem(2000 + seed, k=8, size=3)
        found = row_projected(gradient, rows)
        np.testing.assert_allclose(found.vector.numpy(), by_quadprog(gradient, rows), atol=1e-6)
        assert found.unsolved == 0


def test_projection_with_one_constraint_is_the_closed_form() -> None:
    for seed in range(20):
        gradient, rows = problem(seed, k=1, size=7)
        reference = rows[0]
        expected = gradient - torch.clamp(gradient @ reference, max=0) / (reference @ reference) * reference
        found = row_projected(gradient, rows)
        torch.testing.assert_close(found.vector, expected)
        assert bool(found.rotated) == bool(gradient @ reference < 0)


def test_projection_keeps_a_gradient_without_violations_bit_for_bit() -> None:
    rows = torch.eye(3, 5)
    gradient = torch.rand(5)
    found = row_projected(gradient, rows)
    assert torch.equal(found.vector, gradient)
    assert as_floats(found.rotated, found.degenerate, found.unsolved) == [0, 0, 0]


def test_projection_treats_all_tensors_as_one_vector() -> None:
    gradient, rows = problem(7, k=5, size=24)
    whole = row_projected(gradient, rows).vector
    parts = {"a": gradient[:6].reshape(2, 3), "b": gradient[6:]}
    references = {"a": rows[:, :6].reshape(5, 2, 3), "b": rows[:, 6:]}
    projected, _ = project(parts, References(references, all_present(rows)))
    assert projected["a"].shape == (2, 3)
    torch.testing.assert_close(torch.cat([projected["a"].flatten(), projected["b"]]), whole)


def test_projection_ignores_absent_references() -> None:
    gradient, rows = problem(3, k=6, size=20)
    present = torch.tensor([True, False, True, True, False, True])
    alone = row_projected(gradient, rows[present])
    among = row_projected(gradient, rows, present)
    torch.testing.assert_close(among.vector, alone.vector)
    assert among.degenerate == 0
    unconstrained = row_projected(gradient, rows, torch.zeros(6, dtype=torch.bool))
    assert torch.equal(unconstrained.vector, gradient)


def test_projection_keeps_a_zero_gradient_and_flags_it() -> None:
    found = row_projected(torch.zeros(4), torch.rand(3, 4))
    assert torch.equal(found.vector, torch.zeros(4))
    assert as_floats(found.rotated, found.degenerate, found.unsolved) == [0, 1, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_projection_flags_a_reference_that_is_not_finite(value: float) -> None:
    gradient = torch.tensor([1.0, 2.0])
    rows = torch.tensor([[1.0, 0.0], [value, 1.0]])  # nothing is violated: it would not be noticed
    assert as_floats(row_projected(gradient, rows).unsolved) == [1]
    absent = row_projected(gradient, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False]))
    assert as_floats(absent.unsolved) == [0]


def test_projection_ignores_a_zero_reference_and_flags_it() -> None:
    gradient, rows = problem(5, k=3, size=9)
    with_zero = torch.cat([rows, torch.zeros(1, 9, dtype=rows.dtype)])
    found = row_projected(gradient, with_zero)
    torch.testing.assert_close(found.vector, row_projected(gradient, rows).vector)
    assert as_floats(found.degenerate, found.unsolved) == [1, 0]


@pytest.mark.parametrize(
    "make_dependent",
    [
        lambda rows: rows[:1],
        lambda rows: 1e3 * rows[:1],
        lambda rows: -rows[:1],
        lambda rows: rows[:1] + rows[1:2],
    ],
    ids=["same", "longer", "opposite", "sum"],
)
def test_projection_solves_dependent_references_and_flags_them(
    make_dependent: Callable[[Tensor], Tensor],
) -> None:
    rows = torch.eye(2, 6, dtype=torch.float64)
    gradient = torch.tensor([-1.0, -2.0, 0.5, 0.0, 1.0, -1.0], dtype=torch.float64)
    dependent = torch.cat([rows, make_dependent(rows)])
    found = row_projected(gradient, dependent)
    np.testing.assert_allclose(found.vector.numpy(), [0, 0, 0.5, 0, 1, -1], atol=1e-12)
    assert as_floats(found.rotated, found.degenerate, found.unsolved) == [1, 1, 0]


def test_projection_is_zero_if_every_direction_is_excluded() -> None:
    """An optimiser that normalises its steps would magnify rounding errors: they are set to zero."""
    rows = torch.tensor([[1.0, 0.1], [0.3, 1.0]])
    gradient = -(0.7 * rows[0] + 1.9 * rows[1])
    found = row_projected(gradient, rows)
    assert torch.equal(found.vector, torch.zeros(2))
    assert as_floats(found.rotated, found.degenerate) == [1, 1]


def test_margin_is_the_lower_bound_of_every_multiplier() -> None:
    gradient, rows = problem(11, k=4, size=12)
    assert bool((rows @ gradient < 0).any())
    found = row_projected(gradient, rows, margin=0.5)
    # The problem as GEM states it: min ½ vᵀGGᵀv + gᵀGᵀv subject to v ≥ 0.5.
    gram, slack = (rows @ rows.T).numpy(), (rows @ gradient).numpy()
    v = quadprog.solve_qp(gram, -slack, np.eye(4), np.full(4, 0.5))[0]
    np.testing.assert_allclose(found.vector.numpy(), gradient.numpy() + rows.numpy().T @ v, atol=1e-9)
    free = torch.ones(12, dtype=torch.float64)
    kept = row_projected(free, torch.eye(4, 12, dtype=torch.float64), margin=0.5)
    assert torch.equal(kept.vector, free), "the margin counts only if a constraint is violated"


def test_margin_equals_gems_own_problem_on_100_random_problems() -> None:
    """GEM's equation 11 with its margin, as its paper and quadprog state it; one margin for all, or one for each."""
    rotated = 0
    for seed in range(100):
        k = 1 + seed % 8
        gradient, rows = problem(500 + seed, k, size=40)
        random = np.random.default_rng(seed)
        margins = torch.from_numpy(random.uniform(0, 1, size=k)) if seed % 2 else torch.full((k,), 0.5).double()
        found = row_projected(gradient, rows, margin=margins if seed % 2 else float(margins[0]))
        gram, slack = (rows @ rows.T).numpy(), (rows @ gradient).numpy()
        v = quadprog.solve_qp(gram, -slack, np.eye(k), margins.numpy())[0] if (slack < 0).any() else np.zeros(k)
        np.testing.assert_allclose(found.vector.numpy(), gradient.numpy() + rows.numpy().T @ v, rtol=1e-9, atol=1e-9)
        assert found.unsolved == 0
        rotated += int(found.rotated)
    assert 40 < rotated < 100


@pytest.mark.parametrize("k", [1, 3, 10])
def test_projections_are_the_same_lifted_over_clients(k: int) -> None:
    problems = [problem(seed, k, size=30, dtype=torch.float32) for seed in range(16)]
    gradients, rows = (torch.stack(column) for column in zip(*problems, strict=True))
    present = torch.rand(16, k, generator=torch.Generator().manual_seed(0)) < 0.8
    lifted = torch.vmap(row_projected)(gradients, rows, present)
    alone = [row_projected(*arguments) for arguments in zip(gradients, rows, present, strict=True)]
    for together, single in zip(lifted, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(single))


def test_the_steps_of_a_projection_are_counted() -> None:
    gradient, rows = problem(3, k=4, size=9, dtype=torch.float32)
    applied, counts = project({"w": gradient}, References({"w": rows}, all_present(rows)))
    np.testing.assert_allclose(applied["w"].numpy(), by_quadprog(gradient, rows), atol=1e-5)
    assert list(counts) == COUNTED
    assert {name: float(count) for name, count in counts.items()} == {
        "integrated": 1,
        "rotated": 1,
        "degenerate": 0,
        "unsolved": 0,
    }
    unchanged, counts = project({"w": gradient}, References({"w": rows}, ~all_present(rows)))
    assert torch.equal(unchanged["w"], gradient)
    assert {name: float(count) for name, count in counts.items()} == dict.fromkeys(COUNTED, 0), "no reference"


def test_many_float32_parameters_have_no_obtuse_angle_after_the_projection() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 50_000, generator=random) + 0.5 * torch.randn(50_000, generator=random)
    gradient = torch.randn(50_000, generator=random) * 1e-4 - 1e-3 * rows.mean(0)
    found = row_projected(gradient, rows)
    cosines = (rows.double() @ found.vector.double()) / rows.double().norm(dim=1) / found.vector.double().norm()
    assert float(cosines.min()) >= -1e-6
    assert as_floats(found.rotated, found.unsolved) == [1, 0]
