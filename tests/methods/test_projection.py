"""Gradient projection against quadprog and closed forms, the ranking against SciPy; the same lifted over clients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import quadprog
import torch
from numpy.typing import NDArray
from scipy.stats import wasserstein_distance
from torch import Tensor

from vitfleet.methods.continual.projection import (
    COUNT_NAMES,
    OBTUSE,
    GradientIntegrator,
    GradientRotation,
    LargestAngle,
    MostDissimilar,
    cosines,
    has_obtuse_angle,
    inner_products,
    project_gradient,
    solve_dual,
    to_chunks,
    wasserstein_distances,
)
from vitfleet.training.step import ReferenceGradients, Step

Floats = NDArray[np.float64]


def problem(seed: int, k: int, size: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return a gradient and k references, correlated with each other, with some of which it has an obtuse angle."""
    random = np.random.default_rng(seed)
    width = size or int(random.integers(k, 60))
    rows = random.normal(size=(k, width)) + random.uniform(0, 2) * random.normal(size=width)
    gradient = random.normal(size=width) - random.uniform(0, 3) * rows.mean(axis=0)
    return torch.tensor(gradient, dtype=dtype), torch.tensor(rows, dtype=dtype)


def as_floats(*counts: Tensor) -> list[float]:
    return [float(count) for count in counts]


def all_present(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


def by_quadprog(gradient: Tensor, rows: Tensor) -> Floats:
    """Solve the primal: min ½‖g − g'‖² subject to G g' ≥ 0."""
    g, constraints = gradient.double().numpy(), rows.double().numpy().T
    solution: Floats = quadprog.solve_qp(np.eye(len(g)), g, constraints, np.zeros(len(rows)))[0]
    return solution


def test_project_gradient_equals_quadprog_on_200_random_problems() -> None:
    rotated = 0
    for seed in range(200):
        gradient, rows = problem(seed, k=1 + seed % 10)
        projected = project_gradient({"w": gradient}, {"w": rows}, all_present(rows))
        np.testing.assert_allclose(projected.gradients["w"].numpy(), by_quadprog(gradient, rows), atol=1e-6)
        assert projected.unsolved == 0
        rotated += int(projected.rotated)
    assert 100 < rotated < 200, "some gradients are rotated, some need not be"


@pytest.mark.parametrize("k", [1, 4, 10, 49])
def test_solve_dual_satisfies_the_optimality_conditions_to_1e_8(k: int) -> None:
    for seed in range(20):
        gradient, rows = problem(1000 + seed, k, size=80)
        gram, slack, size = inner_products(to_chunks({"w": rows}, {"w": gradient[None]}))
        solution = solve_dual(gram, slack, size)
        # The Karush-Kuhn-Tucker conditions, for rows and gradient of unit length.
        lengths = gram.diagonal().sqrt()
        values = (gram @ solution.v + slack) / lengths / size.sqrt()
        assert bool(solution.solved)
        assert float(solution.v.min()) >= 0
        assert float(values.min()) > -1e-8
        assert float((values * solution.v * lengths / size.sqrt()).abs().max()) < 1e-8


def test_project_gradient_with_more_constraints_than_dimensions() -> None:
    for seed in range(50):
        gradient, rows = problem(2000 + seed, k=8, size=3)
        projected = project_gradient({"w": gradient}, {"w": rows}, all_present(rows))
        np.testing.assert_allclose(projected.gradients["w"].numpy(), by_quadprog(gradient, rows), atol=1e-6)
        assert projected.unsolved == 0


def test_project_gradient_with_one_constraint_is_the_closed_form() -> None:
    for seed in range(20):
        gradient, rows = problem(seed, k=1, size=7)
        reference = rows[0]
        expected = gradient - torch.clamp(gradient @ reference, max=0) / (reference @ reference) * reference
        projected = project_gradient({"w": gradient}, {"w": rows}, all_present(rows))
        torch.testing.assert_close(projected.gradients["w"], expected)
        assert bool(projected.rotated) == bool(gradient @ reference < 0)


def test_project_gradient_keeps_a_gradient_without_violations_bit_for_bit() -> None:
    rows = torch.eye(3, 5)
    gradient = torch.rand(5)
    projected = project_gradient({"w": gradient}, {"w": rows}, all_present(rows))
    assert torch.equal(projected.gradients["w"], gradient)
    assert as_floats(projected.rotated, projected.degenerate, projected.unsolved) == [0, 0, 0]


def test_project_gradient_treats_all_tensors_as_one_vector() -> None:
    gradient, rows = problem(7, k=5, size=24)
    whole = project_gradient({"w": gradient}, {"w": rows}, all_present(rows)).gradients["w"]
    parts = {"a": gradient[:6].reshape(2, 3), "b": gradient[6:]}
    projected = project_gradient(
        parts, {"a": rows[:, :6].reshape(5, 2, 3), "b": rows[:, 6:]}, all_present(rows)
    ).gradients
    assert projected["a"].shape == (2, 3)
    torch.testing.assert_close(torch.cat([projected["a"].flatten(), projected["b"]]), whole)


def test_project_gradient_ignores_absent_references() -> None:
    gradient, rows = problem(3, k=6, size=20)
    present = torch.tensor([True, False, True, True, False, True])
    alone = project_gradient({"w": gradient}, {"w": rows[present]}, all_present(rows[present]))
    among = project_gradient({"w": gradient}, {"w": rows}, present)
    torch.testing.assert_close(among.gradients["w"], alone.gradients["w"])
    assert among.degenerate == 0
    unconstrained = project_gradient({"w": gradient}, {"w": rows}, torch.zeros(6, dtype=torch.bool))
    assert torch.equal(unconstrained.gradients["w"], gradient)


def test_project_gradient_keeps_a_zero_gradient_and_flags_it() -> None:
    projected = project_gradient({"w": torch.zeros(4)}, {"w": torch.rand(3, 4)}, torch.ones(3, dtype=torch.bool))
    assert torch.equal(projected.gradients["w"], torch.zeros(4))
    assert as_floats(projected.rotated, projected.degenerate, projected.unsolved) == [0, 1, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_project_gradient_flags_a_reference_that_is_not_finite(value: float) -> None:
    gradient = {"w": torch.tensor([1.0, 2.0])}
    references = {"w": torch.tensor([[1.0, 0.0], [value, 1.0]])}  # nothing is violated: it would not be noticed
    projected = project_gradient(gradient, references, torch.tensor([True, True]))
    assert as_floats(projected.unsolved) == [1]
    absent = project_gradient(gradient, {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}, torch.tensor([True, False]))
    assert as_floats(absent.unsolved) == [0]


def test_project_gradient_ignores_a_zero_reference_and_flags_it() -> None:
    gradient, rows = problem(5, k=3, size=9)
    with_zero = torch.cat([rows, torch.zeros(1, 9, dtype=rows.dtype)])
    projected = project_gradient({"w": gradient}, {"w": with_zero}, all_present(with_zero))
    torch.testing.assert_close(
        projected.gradients["w"], project_gradient({"w": gradient}, {"w": rows}, all_present(rows)).gradients["w"]
    )
    assert as_floats(projected.degenerate, projected.unsolved) == [1, 0]


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
def test_project_gradient_solves_dependent_references_and_flags_them(
    make_dependent: Callable[[Tensor], Tensor],
) -> None:
    rows = torch.eye(2, 6, dtype=torch.float64)
    gradient = torch.tensor([-1.0, -2.0, 0.5, 0.0, 1.0, -1.0], dtype=torch.float64)
    dependent = torch.cat([rows, make_dependent(rows)])
    projected = project_gradient({"w": gradient}, {"w": dependent}, all_present(dependent))
    np.testing.assert_allclose(projected.gradients["w"].numpy(), [0, 0, 0.5, 0, 1, -1], atol=1e-12)
    assert as_floats(projected.rotated, projected.degenerate, projected.unsolved) == [1, 1, 0]


def test_project_gradient_is_zero_if_every_direction_is_excluded() -> None:
    """An optimiser that normalises its steps would magnify rounding errors: they are set to zero."""
    rows = torch.tensor([[1.0, 0.1], [0.3, 1.0]])
    gradient = -(0.7 * rows[0] + 1.9 * rows[1])
    projected = project_gradient({"w": gradient}, {"w": rows}, all_present(rows))
    assert torch.equal(projected.gradients["w"], torch.zeros(2))
    assert as_floats(projected.rotated, projected.degenerate) == [1, 1]


def test_margin_is_the_lower_bound_of_every_multiplier() -> None:
    gradient, rows = problem(11, k=4, size=12)
    assert bool((rows @ gradient < 0).any())
    projected = project_gradient({"w": gradient}, {"w": rows}, all_present(rows), margin=0.5).gradients["w"].numpy()
    # The problem as GEM states it: min ½ vᵀGGᵀv + gᵀGᵀv subject to v ≥ 0.5.
    gram, slack = (rows @ rows.T).numpy(), (rows @ gradient).numpy()
    v = quadprog.solve_qp(gram, -slack, np.eye(4), np.full(4, 0.5))[0]
    np.testing.assert_allclose(projected, gradient.numpy() + rows.numpy().T @ v, atol=1e-9)
    free = torch.ones(12, dtype=torch.float64)
    kept = project_gradient({"w": free}, {"w": torch.eye(4, 12, dtype=torch.float64)}, all_present(rows), margin=0.5)
    assert torch.equal(kept.gradients["w"], free), "the margin counts only if a constraint is violated"


def test_margin_equals_gems_own_problem_on_100_random_problems() -> None:
    """GEM's equation 11 with its margin, as its paper and quadprog state it; one margin for all, or one for each."""
    rotated = 0
    for seed in range(100):
        k = 1 + seed % 8
        gradient, rows = problem(500 + seed, k, size=40)
        random = np.random.default_rng(seed)
        margins = torch.from_numpy(random.uniform(0, 1, size=k)) if seed % 2 else torch.full((k,), 0.5).double()
        projected = project_gradient(
            {"w": gradient}, {"w": rows}, all_present(rows), margins if seed % 2 else float(margins[0])
        )
        gram, slack = (rows @ rows.T).numpy(), (rows @ gradient).numpy()
        v = quadprog.solve_qp(gram, -slack, np.eye(k), margins.numpy())[0] if (slack < 0).any() else np.zeros(k)
        np.testing.assert_allclose(
            projected.gradients["w"].numpy(), gradient.numpy() + rows.numpy().T @ v, rtol=1e-9, atol=1e-9
        )
        assert projected.unsolved == 0
        rotated += int(projected.rotated)
    assert 40 < rotated < 100


@pytest.mark.parametrize("k", [1, 3, 10])
def test_projection_and_selection_are_the_same_lifted_over_clients(k: int) -> None:
    problems = [problem(seed, k, size=30, dtype=torch.float32) for seed in range(16)]
    gradients, rows = (torch.stack(column) for column in zip(*problems, strict=True))
    present = torch.rand(16, k, generator=torch.Generator().manual_seed(0)) < 0.8
    selectors = MostDissimilar(k=min(2, k)), LargestAngle(k=min(2, k))

    def project_and_select(gradient: Tensor, row: Tensor, present: Tensor) -> tuple[Tensor, ...]:
        projected = project_gradient({"w": gradient}, {"w": row}, present)
        obtuse = has_obtuse_angle(projected.gradients, ({"w": row},), present)
        selected = [selector({"w": gradient}, ReferenceGradients({"w": row}, present)) for selector in selectors]
        return projected.gradients["w"], projected.rotated, projected.degenerate, projected.unsolved, obtuse, *selected

    lifted = torch.vmap(project_and_select)(gradients, rows, present)
    alone = [project_and_select(*arguments) for arguments in zip(gradients, rows, present, strict=True)]
    for together, single in zip(lifted, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(single))


# Gradient transforms


def empty_step() -> Step:
    empty = torch.empty(0)
    return Step(empty, empty, empty, {}, {}, empty, torch.tensor(0))


def test_gradient_integrator_counts_its_steps() -> None:
    gradient, rows = problem(3, k=4, size=9, dtype=torch.float32)
    references = ReferenceGradients({"w": rows}, all_present(rows))
    applied, counts = GradientIntegrator(check=True)({"w": gradient}, references, empty_step())
    np.testing.assert_allclose(applied["w"].numpy(), by_quadprog(gradient, rows), atol=1e-5)
    assert set(counts) == {*COUNT_NAMES, OBTUSE} == set(GradientIntegrator(check=True).counts)
    assert {name: float(count) for name, count in counts.items()} == {
        "integrated": 1,
        "rotated": 1,
        "degenerate": 0,
        "unsolved": 0,
        OBTUSE: 0,
    }
    unchanged, no_counts = GradientIntegrator()({"w": gradient}, None, empty_step())
    assert unchanged["w"] is gradient
    assert {name: float(count) for name, count in no_counts.items()} == dict.fromkeys(COUNT_NAMES, 0)


def test_has_obtuse_angle() -> None:
    rows = torch.eye(2, 3)
    present = torch.ones(2, dtype=torch.bool)
    assert has_obtuse_angle({"w": torch.tensor([1.0, -1e-5, 0.0])}, ({"w": rows},), present) == 1
    assert has_obtuse_angle({"w": torch.tensor([1.0, -1e-7, 0.0])}, ({"w": rows},), present) == 0
    assert has_obtuse_angle({"w": torch.tensor([1.0, -1.0, 0.0])}, ({"w": rows},), torch.tensor([True, False])) == 0


def test_gradient_integrator_passes_its_check_for_many_float32_parameters() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 50_000, generator=random) + 0.5 * torch.randn(50_000, generator=random)
    gradient = torch.randn(50_000, generator=random) * 1e-4 - 1e-3 * rows.mean(0)
    applied, counts = GradientIntegrator(check=True)(
        {"w": gradient}, ReferenceGradients({"w": rows}, all_present(rows)), empty_step()
    )
    cosines = (rows.double() @ applied["w"].double()) / rows.double().norm(dim=1) / applied["w"].double().norm()
    assert float(cosines.min()) >= -1e-6
    assert as_floats(counts["rotated"], counts[OBTUSE], counts["unsolved"]) == [1, 0, 0]


def test_gradient_rotation_rotates_the_gradient_before_aggregation_towards_the_one_after() -> None:
    after, before = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([-3.0, 1.0, 0.5])
    references = ReferenceGradients({"w": before[None]}, torch.tensor([True]))
    applied, counts = GradientRotation(check=True)({"w": after}, references, empty_step())
    torch.testing.assert_close(applied["w"], before - (before @ after) / (after @ after) * after)
    assert as_floats(counts["rotated"], counts[OBTUSE]) == [1, 0]
    agreeing = ReferenceGradients({"w": -before[None]}, torch.tensor([True]))
    unchanged, _ = GradientRotation()({"w": after}, agreeing, empty_step())
    assert torch.equal(unchanged["w"], -before)


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_gradient_rotation_with_stored_tasks_is_the_projection_against_all_of_them(margin: float) -> None:
    for seed in range(20):
        before, constraints = problem(seed, k=5, size=30)
        stored, after = constraints[:-1], constraints[-1]
        references = ReferenceGradients({"w": torch.cat([stored, before[None]])}, all_present(constraints))
        applied, counts = GradientRotation(check=True, margin=margin)({"w": after}, references, empty_step())
        gram, slack = (constraints @ constraints.T).numpy(), (constraints @ before).numpy()
        if (slack >= 0).all():
            assert torch.equal(applied["w"], before)
            continue
        v = quadprog.solve_qp(gram, -slack, np.eye(5), np.array([margin] * 4 + [0.0]))[0]
        np.testing.assert_allclose(applied["w"].numpy(), before.numpy() + constraints.numpy().T @ v, atol=1e-9)
        assert as_floats(counts["rotated"], counts[OBTUSE]) == [1, 0]


# Selection of references


def test_wasserstein_distances_equal_scipy() -> None:
    random = torch.Generator().manual_seed(0)
    gradients = {"a": torch.randn(4, 5, generator=random), "b": torch.randn(13, generator=random)}
    references = {"a": torch.randn(6, 4, 5, generator=random) * 2, "b": torch.randn(6, 13, generator=random) + 0.3}
    gradient = torch.cat([tensor.flatten() for tensor in gradients.values()]).numpy()
    rows = torch.cat([tensor.flatten(1) for tensor in references.values()], dim=1).numpy()
    expected = [wasserstein_distance(gradient, row) for row in rows]
    np.testing.assert_allclose(wasserstein_distances(gradients, references).numpy(), expected, rtol=1e-5)


def test_most_dissimilar_selects_the_farthest_and_absent_references_last() -> None:
    gradient = {"w": torch.zeros(3)}
    rows = {"w": torch.tensor([1.0, 5.0, 3.0, 4.0, 2.0])[:, None].expand(5, 3)}
    all_five = torch.ones(5, dtype=torch.bool)
    assert MostDissimilar(3)(gradient, ReferenceGradients(rows, all_five)).tolist() == [1, 2, 3]
    some_absent = torch.tensor([True, False, False, True, True])
    assert MostDissimilar(3)(gradient, ReferenceGradients(rows, some_absent)).tolist() == [0, 3, 4]


def test_largest_angle_selects_the_smallest_cosines() -> None:
    for seed in range(50):
        gradient, rows = problem(seed, k=7, size=24, dtype=torch.float32)
        parts = {"a": gradient[:6].reshape(2, 3), "b": gradient[6:]}
        references = {"a": rows[:, :6].reshape(7, 2, 3), "b": rows[:, 6:]}
        angles = [float(torch.rad2deg(torch.arccos(torch.cosine_similarity(gradient, row, dim=0)))) for row in rows]
        np.testing.assert_allclose(cosines(parts, references).numpy(), np.cos(np.deg2rad(angles)), atol=1e-5)
        for k in (1, 3):
            selected = LargestAngle(k)(parts, ReferenceGradients(references, all_present(rows))).tolist()
            assert selected == sorted(np.argsort(angles)[-k:].tolist())


def test_largest_angle_selects_zero_and_absent_references_last() -> None:
    gradient = {"w": torch.tensor([1.0, 0.0])}
    rows = {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])}
    everything = torch.ones(4, dtype=torch.bool)
    assert LargestAngle(2)(gradient, ReferenceGradients(rows, everything)).tolist() == [2, 3]
    without_opposite = torch.tensor([True, True, False, True])
    assert LargestAngle(1)(gradient, ReferenceGradients(rows, without_opposite)).tolist() == [3]
    assert LargestAngle(3)(gradient, ReferenceGradients(rows, without_opposite)).tolist() == [0, 1, 3]


def test_wasserstein_ranks_by_norm_where_the_angle_does_not() -> None:
    """A long reference in the gradient's direction against a short one that opposes it, and random references."""
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(20_000, generator=random)
    rows = torch.stack([5 * gradient, -0.9 * gradient])
    references = ReferenceGradients({"w": rows}, all_present(rows))
    assert MostDissimilar(1)({"w": gradient}, references).tolist() == [0]
    assert LargestAngle(1)({"w": gradient}, references).tolist() == [1]
    norms = torch.tensor([1.5, 8.0, 3.0, 5.0, 2.0, 13.0])
    mixed = torch.randn(6, 20_000, generator=random) + torch.linspace(2, -2, 6)[:, None] * gradient
    mixed = mixed / mixed.norm(dim=1, keepdim=True) * norms[:, None] * gradient.norm()
    by_distance = wasserstein_distances({"w": gradient}, {"w": mixed}).argsort()
    assert by_distance.tolist() == norms.argsort().tolist()
    by_angle = cosines({"w": gradient}, {"w": mixed}).argsort(descending=True)
    assert by_angle.tolist() == [0, 1, 2, 3, 4, 5]
