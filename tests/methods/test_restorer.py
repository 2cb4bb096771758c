"""FedViT's restorer: which tasks are the most dissimilar, and the rotation after an aggregation."""

from __future__ import annotations

import numpy as np
import pytest
import quadprog
import torch
from gradient_problems import all_present, problem
from scipy.stats import wasserstein_distance
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.methods.continual.gradients.projection import References
from vitfleet.methods.continual.gradients.restorer import (
    Ranking,
    Restorer,
    RotatedStep,
    angles,
    rotate,
    wasserstein_distances,
)


def chosen(ranking: Ranking, k: int, gradients: Tensors, references: Tensors, present: Tensor) -> Tensor:
    return Restorer(len(present), k, ranking).most_dissimilar(gradients, references, present)


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
    assert chosen("wasserstein", 3, gradient, rows, all_five).tolist() == [1, 2, 3]
    some_absent = torch.tensor([True, False, False, True, True])
    assert chosen("wasserstein", 3, gradient, rows, some_absent).tolist() == [0, 3, 4]


def test_largest_angle_selects_the_smallest_cosines() -> None:
    for seed in range(50):
        gradient, rows = problem(seed, k=7, size=24, dtype=torch.float32)
        parts = {"a": gradient[:6].reshape(2, 3), "b": gradient[6:]}
        references = {"a": rows[:, :6].reshape(7, 2, 3), "b": rows[:, 6:]}
        degrees = [float(torch.rad2deg(torch.arccos(torch.cosine_similarity(gradient, row, dim=0)))) for row in rows]
        np.testing.assert_allclose(angles(parts, references).numpy(), -np.cos(np.deg2rad(degrees)), atol=1e-5)
        for k in (1, 3):
            selected = chosen("angle", k, parts, references, all_present(rows)).tolist()
            assert selected == sorted(np.argsort(degrees)[-k:].tolist())


def test_largest_angle_selects_zero_and_absent_references_last() -> None:
    gradient = {"w": torch.tensor([1.0, 0.0])}
    rows = {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])}
    everything = torch.ones(4, dtype=torch.bool)
    assert chosen("angle", 2, gradient, rows, everything).tolist() == [2, 3]
    without_opposite = torch.tensor([True, True, False, True])
    assert chosen("angle", 1, gradient, rows, without_opposite).tolist() == [3]
    assert chosen("angle", 3, gradient, rows, without_opposite).tolist() == [0, 1, 3]


def test_wasserstein_ranks_by_norm_where_the_angle_does_not() -> None:
    """A long reference in the gradient's direction against a short one that opposes it, and random references."""
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(20_000, generator=random)
    rows = torch.stack([5 * gradient, -0.9 * gradient])
    present = all_present(rows)
    assert chosen("wasserstein", 1, {"w": gradient}, {"w": rows}, present).tolist() == [0]
    assert chosen("angle", 1, {"w": gradient}, {"w": rows}, present).tolist() == [1]
    norms = torch.tensor([1.5, 8.0, 3.0, 5.0, 2.0, 13.0])
    mixed = torch.randn(6, 20_000, generator=random) + torch.linspace(2, -2, 6)[:, None] * gradient
    mixed = mixed / mixed.norm(dim=1, keepdim=True) * norms[:, None] * gradient.norm()
    by_distance = wasserstein_distances({"w": gradient}, {"w": mixed}).argsort()
    assert by_distance.tolist() == norms.argsort().tolist()
    by_angle = angles({"w": gradient}, {"w": mixed}).argsort()
    assert by_angle.tolist() == [0, 1, 2, 3, 4, 5]


def test_gradient_rotation_rotates_the_gradient_before_aggregation_towards_the_one_after() -> None:
    after, before = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([-3.0, 1.0, 0.5])
    applied, counts = rotate({"w": before}, {"w": after})
    torch.testing.assert_close(applied["w"], before - (before @ after) / (after @ after) * after)
    assert float(counts["rotated"]) == 1
    unchanged, counts = rotate({"w": -before}, {"w": after})
    assert torch.equal(unchanged["w"], -before)
    assert float(counts["rotated"]) == 0


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_gradient_rotation_with_stored_tasks_is_the_projection_against_all_of_them(margin: float) -> None:
    for seed in range(20):
        before, constraints = problem(seed, k=5, size=30)
        stored, after = constraints[:-1], constraints[-1]
        tasks = References({"w": stored}, all_present(stored))
        applied, counts = rotate({"w": before}, {"w": after}, tasks, margin=margin)
        gram, slack = (constraints @ constraints.T).numpy(), (constraints @ before).numpy()
        if (slack >= 0).all():
            assert torch.equal(applied["w"], before)
            continue
        v = quadprog.solve_qp(gram, -slack, np.eye(5), np.array([margin] * 4 + [0.0]))[0]
        np.testing.assert_allclose(applied["w"].numpy(), before.numpy() + constraints.numpy().T @ v, atol=1e-9)
        assert float(counts["rotated"]) == 1
        if not margin:
            cosines = constraints @ applied["w"] / constraints.norm(dim=1) / applied["w"].norm()
            assert float(cosines.min()) >= -1e-6


@pytest.mark.parametrize("ranking", ["wasserstein", "angle"])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_choices_and_rotations_are_the_same_lifted_over_clients(ranking: Ranking, k: int) -> None:
    problems = [problem(seed, k, size=30, dtype=torch.float32) for seed in range(16)]
    gradients, rows = (torch.stack(column) for column in zip(*problems, strict=True))
    present = torch.rand(16, k, generator=torch.Generator().manual_seed(0)) < 0.8

    def choose_and_rotate(gradient: Tensor, rows: Tensor, present: Tensor) -> tuple[Tensor, ...]:
        after = {"w": rows.sum(0)}
        rotated, counts = rotate({"w": gradient}, after, References({"w": rows}, present))
        return chosen(ranking, min(2, k), {"w": gradient}, {"w": rows}, present), rotated["w"], *counts.values()

    lifted = torch.vmap(choose_and_rotate)(gradients, rows, present)
    alone = [choose_and_rotate(*arguments) for arguments in zip(gradients, rows, present, strict=True)]
    for together, single in zip(lifted, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(single))


def test_kinds_of_steps() -> None:
    """Ten steps: tasks are ranked where both are due, and gradients computed or reused in between."""
    restorer = Restorer(tasks=3, k=2, rerank=4, recompute=2)
    kinds = ["rank", "reuse", "compute", "reuse", "rank", "reuse", "compute", "reuse", "rank", "reuse"]
    assert [restorer.kind(index) for index in range(10)] == kinds
    assert {Restorer(tasks=2, k=2, rerank=4).kind(index) for index in range(10)} == {"compute"}, "nothing to choose"
    assert {Restorer(tasks=3, k=2).kind(index) for index in range(10)} == {"rank"}
    assert RotatedStep().kind(3) is None
