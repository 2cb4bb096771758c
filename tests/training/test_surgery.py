"""The integrator against quadprog and closed forms, the ranking against SciPy; lifted over clients, nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import quadprog
import torch
from numpy.typing import NDArray
from scipy.stats import wasserstein_distance
from torch import Tensor

from vitfleet.training.objective import ReferenceGradients, Step
from vitfleet.training.surgery import (
    COUNT_NAMES,
    OBTUSE,
    GradientIntegrator,
    GradientRotation,
    MostDissimilar,
    has_obtuse_angle,
    inner_products,
    project_gradient,
    solve_dual,
    to_chunks,
    wasserstein_distances,
)

Floats = NDArray[np.float64]


def problem(seed: int, k: int, size: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return a gradient and k references, correlated with each other, some of which it goes against."""
    random = np.random.default_rng(seed)
    width = size or int(random.integers(k, 60))
    rows = random.normal(size=(k, width)) + random.uniform(0, 2) * random.normal(size=width)
    gradient = random.normal(size=width) - random.uniform(0, 3) * rows.mean(axis=0)
    return torch.tensor(gradient, dtype=dtype), torch.tensor(rows, dtype=dtype)


def told(*counts: Tensor) -> list[float]:
    return [float(count) for count in counts]


def all_of(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


def by_quadprog(gradient: Tensor, rows: Tensor) -> Floats:
    """Solve the primal: min ½‖g − g'‖² subject to G g' ≥ 0."""
    g, constraints = gradient.double().numpy(), rows.double().numpy().T
    found: Floats = quadprog.solve_qp(np.eye(len(g)), g, constraints, np.zeros(len(rows)))[0]
    return found


def test_the_integrator_equals_quadprog_on_200_random_problems() -> None:
    rotated = 0
    for seed in range(200):
        gradient, rows = problem(seed, k=1 + seed % 10)
        turned = project_gradient({"w": gradient}, {"w": rows}, all_of(rows))
        np.testing.assert_allclose(turned.gradients["w"].numpy(), by_quadprog(gradient, rows), atol=1e-6)
        assert turned.unsolved == 0
        rotated += int(turned.rotated)
    assert 100 < rotated < 200, "some are turned, some need not be"


@pytest.mark.parametrize("k", [1, 4, 10, 49])
def test_the_dual_is_solved_to_1e_8(k: int) -> None:
    for seed in range(20):
        gradient, rows = problem(1000 + seed, k, size=80)
        gram, slack, size = inner_products(to_chunks({"w": gradient[None]}), to_chunks({"w": rows}))
        solution = solve_dual(gram, slack, size)
        # The conditions of Karush, Kuhn and Tucker, on rows and gradient of unit length.
        lengths = gram.diagonal().sqrt()
        values = (gram @ solution.v + slack) / lengths / size.sqrt()
        assert bool(solution.solved)
        assert float(solution.v.min()) >= 0
        assert float(values.min()) > -1e-8
        assert float((values * solution.v * lengths / size.sqrt()).abs().max()) < 1e-8


def test_more_constraints_than_dimensions() -> None:
    for seed in range(50):
        gradient, rows = problem(2000 + seed, k=8, size=3)
        turned = project_gradient({"w": gradient}, {"w": rows}, all_of(rows))
        np.testing.assert_allclose(turned.gradients["w"].numpy(), by_quadprog(gradient, rows), atol=1e-6)
        assert turned.unsolved == 0


def test_one_constraint_is_the_closed_form() -> None:
    for seed in range(20):
        gradient, rows = problem(seed, k=1, size=7)
        reference = rows[0]
        expected = gradient - torch.clamp(gradient @ reference, max=0) / (reference @ reference) * reference
        turned = project_gradient({"w": gradient}, {"w": rows}, all_of(rows))
        torch.testing.assert_close(turned.gradients["w"], expected)
        assert bool(turned.rotated) == bool(gradient @ reference < 0)


def test_a_gradient_that_goes_against_nothing_stays_as_it_is_to_the_bit() -> None:
    rows = torch.eye(3, 5)
    gradient = torch.rand(5)
    turned = project_gradient({"w": gradient}, {"w": rows}, all_of(rows))
    assert torch.equal(turned.gradients["w"], gradient)
    assert told(turned.rotated, turned.degenerate, turned.unsolved) == [0, 0, 0]


def test_tensors_are_one_vector() -> None:
    gradient, rows = problem(7, k=5, size=24)
    whole = project_gradient({"w": gradient}, {"w": rows}, all_of(rows)).gradients["w"]
    parts = {"a": gradient[:6].reshape(2, 3), "b": gradient[6:]}
    turned = project_gradient(parts, {"a": rows[:, :6].reshape(5, 2, 3), "b": rows[:, 6:]}, all_of(rows)).gradients
    assert turned["a"].shape == (2, 3)
    torch.testing.assert_close(torch.cat([turned["a"].flatten(), turned["b"]]), whole)


def test_what_is_absent_forbids_nothing() -> None:
    gradient, rows = problem(3, k=6, size=20)
    present = torch.tensor([True, False, True, True, False, True])
    alone = project_gradient({"w": gradient}, {"w": rows[present]}, all_of(rows[present]))
    among = project_gradient({"w": gradient}, {"w": rows}, present)
    torch.testing.assert_close(among.gradients["w"], alone.gradients["w"])
    assert among.degenerate == 0
    nobody = project_gradient({"w": gradient}, {"w": rows}, torch.zeros(6, dtype=torch.bool))
    assert torch.equal(nobody.gradients["w"], gradient)


def test_a_zero_gradient_stays_zero_and_is_counted() -> None:
    turned = project_gradient({"w": torch.zeros(4)}, {"w": torch.rand(3, 4)}, torch.ones(3, dtype=torch.bool))
    assert torch.equal(turned.gradients["w"], torch.zeros(4))
    assert told(turned.rotated, turned.degenerate, turned.unsolved) == [0, 1, 0]


def test_a_zero_reference_forbids_nothing_and_is_counted() -> None:
    gradient, rows = problem(5, k=3, size=9)
    with_zero = torch.cat([rows, torch.zeros(1, 9, dtype=rows.dtype)])
    turned = project_gradient({"w": gradient}, {"w": with_zero}, all_of(with_zero))
    torch.testing.assert_close(
        turned.gradients["w"], project_gradient({"w": gradient}, {"w": rows}, all_of(rows)).gradients["w"]
    )
    assert told(turned.degenerate, turned.unsolved) == [1, 0]


@pytest.mark.parametrize(
    "again",
    [
        lambda rows: rows[:1],
        lambda rows: 1e3 * rows[:1],
        lambda rows: -rows[:1],
        lambda rows: rows[:1] + rows[1:2],
    ],
    ids=["the same", "longer", "opposite", "a sum"],
)
def test_rows_that_depend_on_each_other_give_the_same_as_quadprog_and_are_counted(
    again: Callable[[Tensor], Tensor],
) -> None:
    rows = torch.eye(2, 6, dtype=torch.float64)
    gradient = torch.tensor([-1.0, -2.0, 0.5, 0.0, 1.0, -1.0], dtype=torch.float64)
    more = torch.cat([rows, again(rows)])
    turned = project_gradient({"w": gradient}, {"w": more}, all_of(more))
    np.testing.assert_allclose(turned.gradients["w"].numpy(), [0, 0, 0.5, 0, 1, -1], atol=1e-12)
    assert told(turned.rotated, turned.degenerate, turned.unsolved) == [1, 1, 0]


def test_where_every_direction_is_forbidden_nothing_is_left() -> None:
    """An optimiser that scales its steps would blow rounding errors up: they are not passed on."""
    rows = torch.tensor([[1.0, 0.1], [0.3, 1.0]])
    gradient = -(0.7 * rows[0] + 1.9 * rows[1])
    turned = project_gradient({"w": gradient}, {"w": rows}, all_of(rows))
    assert torch.equal(turned.gradients["w"], torch.zeros(2))
    assert told(turned.rotated, turned.degenerate) == [1, 1]


def test_gems_margin_is_the_least_multiplier() -> None:
    gradient, rows = problem(11, k=4, size=12)
    assert bool((rows @ gradient < 0).any())
    turned = project_gradient({"w": gradient}, {"w": rows}, all_of(rows), margin=0.5).gradients["w"].numpy()
    # GEM's own statement: min ½ vᵀGGᵀv + gᵀGᵀv subject to v ≥ 0.5.
    gram, slack = (rows @ rows.T).numpy(), (rows @ gradient).numpy()
    v = quadprog.solve_qp(gram, -slack, np.eye(4), np.full(4, 0.5))[0]
    np.testing.assert_allclose(turned, gradient.numpy() + rows.numpy().T @ v, atol=1e-9)
    free = torch.ones(12, dtype=torch.float64)
    kept = project_gradient({"w": free}, {"w": torch.eye(4, 12, dtype=torch.float64)}, all_of(rows), margin=0.5)
    assert torch.equal(kept.gradients["w"], free), "as long as nothing is violated there is no margin"


@pytest.mark.parametrize("k", [1, 3, 10])
def test_lifted_over_clients_it_is_the_same(k: int) -> None:
    problems = [problem(seed, k, size=30, dtype=torch.float32) for seed in range(16)]
    gradients, rows = (torch.stack(column) for column in zip(*problems, strict=True))
    present = torch.rand(16, k, generator=torch.Generator().manual_seed(0)) < 0.8
    selector = MostDissimilar(k=min(2, k))

    def one(gradient: Tensor, row: Tensor, here: Tensor) -> tuple[Tensor, ...]:
        turned = project_gradient({"w": gradient}, {"w": row}, here)
        wrong = has_obtuse_angle(turned.gradients, {"w": row}, here)
        chosen = selector({"w": gradient}, ReferenceGradients({"w": row}, here))
        return turned.gradients["w"], turned.rotated, turned.degenerate, turned.unsolved, wrong, chosen

    lifted = torch.vmap(one)(gradients, rows, present)
    alone = [one(*arguments) for arguments in zip(gradients, rows, present, strict=True)]
    for together, single in zip(lifted, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(single))


# The transforms


def a_step() -> Step:
    nothing = torch.empty(0)
    return Step(nothing, nothing, nothing, {}, {}, nothing, torch.tensor(0))


def test_the_integrator_counts_what_it_does() -> None:
    gradient, rows = problem(3, k=4, size=9, dtype=torch.float32)
    references = ReferenceGradients({"w": rows}, all_of(rows))
    applied, counts = GradientIntegrator(check=True)({"w": gradient}, references, a_step())
    np.testing.assert_allclose(applied["w"].numpy(), by_quadprog(gradient, rows), atol=1e-5)
    assert set(counts) == {*COUNT_NAMES, OBTUSE} == set(GradientIntegrator(check=True).counts)
    assert {name: float(count) for name, count in counts.items()} == {
        "integrated": 1,
        "rotated": 1,
        "degenerate": 0,
        "unsolved": 0,
        OBTUSE: 0,
    }
    untouched, none = GradientIntegrator()({"w": gradient}, None, a_step())
    assert untouched["w"] is gradient
    assert {name: float(count) for name, count in none.items()} == dict.fromkeys(COUNT_NAMES, 0)


def test_the_check_finds_an_obtuse_angle() -> None:
    rows = torch.eye(2, 3)
    here = torch.ones(2, dtype=torch.bool)
    assert has_obtuse_angle({"w": torch.tensor([1.0, -1e-5, 0.0])}, {"w": rows}, here) == 1
    assert has_obtuse_angle({"w": torch.tensor([1.0, -1e-7, 0.0])}, {"w": rows}, here) == 0
    assert has_obtuse_angle({"w": torch.tensor([1.0, -1.0, 0.0])}, {"w": rows}, torch.tensor([True, False])) == 0


def test_single_precision_gradients_of_many_parameters_pass_the_check() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 50_000, generator=random) + 0.5 * torch.randn(50_000, generator=random)
    gradient = torch.randn(50_000, generator=random) * 1e-4 - 1e-3 * rows.mean(0)
    applied, counts = GradientIntegrator(check=True)(
        {"w": gradient}, ReferenceGradients({"w": rows}, all_of(rows)), a_step()
    )
    cosines = (rows.double() @ applied["w"].double()) / rows.double().norm(dim=1) / applied["w"].double().norm()
    assert float(cosines.min()) >= -1e-6
    assert told(counts["rotated"], counts[OBTUSE], counts["unsolved"]) == [1, 0, 0]


def test_the_rotation_applies_the_gradient_before_aggregation_turned_towards_the_one_after() -> None:
    after, before = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([-3.0, 1.0, 0.5])
    references = ReferenceGradients({"w": before[None]}, torch.tensor([True]))
    applied, counts = GradientRotation(check=True)({"w": after}, references, a_step())
    torch.testing.assert_close(applied["w"], before - (before @ after) / (after @ after) * after)
    assert told(counts["rotated"], counts[OBTUSE]) == [1, 0]
    agreeing = ReferenceGradients({"w": -before[None]}, torch.tensor([True]))
    untouched, _ = GradientRotation()({"w": after}, agreeing, a_step())
    assert torch.equal(untouched["w"], -before)


# The ranking


def test_the_distance_is_scipys() -> None:
    random = torch.Generator().manual_seed(0)
    gradients = {"a": torch.randn(4, 5, generator=random), "b": torch.randn(13, generator=random)}
    references = {"a": torch.randn(6, 4, 5, generator=random) * 2, "b": torch.randn(6, 13, generator=random) + 0.3}
    own = torch.cat([one.flatten() for one in gradients.values()]).numpy()
    rows = torch.cat([one.flatten(1) for one in references.values()], dim=1).numpy()
    expected = [wasserstein_distance(own, row) for row in rows]
    np.testing.assert_allclose(wasserstein_distances(gradients, references).numpy(), expected, rtol=1e-5)


def test_the_most_dissimilar_are_chosen_and_the_absent_last() -> None:
    gradient = {"w": torch.zeros(3)}
    rows = {"w": torch.tensor([1.0, 5.0, 3.0, 4.0, 2.0])[:, None].expand(5, 3)}
    here = torch.ones(5, dtype=torch.bool)
    assert MostDissimilar(3)(gradient, ReferenceGradients(rows, here)).tolist() == [1, 2, 3]
    gone = torch.tensor([True, False, False, True, True])
    assert MostDissimilar(3)(gradient, ReferenceGradients(rows, gone)).tolist() == [0, 3, 4]
