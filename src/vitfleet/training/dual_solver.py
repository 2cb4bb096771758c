"""The dual quadratic programme of gradient projection: min ½ vᵀ(GGᵀ)v + (Gg)ᵀv subject to v ≥ 0.

It is a non-negative least squares problem on the small Gram matrix GGᵀ of the reference gradients, the rows of G. All
operations have fixed shapes and none depends on the value of a tensor, so that the solver can be lifted over clients
with ``torch.vmap`` and captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tolerances for rows and gradients of unit length: they are sines and cosines.
VIOLATION_TOLERANCE = 1e-10  # a constraint becomes active if it is violated by more
DEPENDENCE_TOLERANCE = 1e-12  # a row is dependent if its squared distance from the span of the active ones is less
OPTIMALITY_TOLERANCE = 1e-8


@dataclass(frozen=True)
class DualSolution:
    """Solution of the dual.

    Attributes
    ----------
    v
        The multipliers of the constraints, ``[k]``.
    solved
        Whether all optimality conditions hold to 1e-8.
    dependent
        Whether some row is a linear combination of the rows of active constraints.
    """

    v: Tensor
    solved: Tensor
    dependent: Tensor


@dataclass(frozen=True)
class UnitProblem:
    """The dual for rows and a gradient that were scaled to unit length: one scale for every tolerance.

    A row of zeros is made independent of all others and is never violated.

    Attributes
    ----------
    gram, slack
        Inner products of the rows, ``[k, k]``, and with the gradient, ``[k]``.
    nonzero
        Which rows are not zero, ``[k]``.
    scale
        The factors from the multipliers of this problem to those of the original one, ``[k]``.
    """

    gram: Tensor
    slack: Tensor
    nonzero: Tensor
    scale: Tensor


def solve_dual(gram: Tensor, slack: Tensor, squared_norm: Tensor) -> DualSolution:
    """Minimise ½ vᵀ gram v + slackᵀ v over v ≥ 0, in float64.

    This is Lawson and Hanson's active-set method on a dictionary: with w = gram·v + slack, an active constraint has v
    basic and w = 0, an inactive one has w basic and v = 0. Activating or deactivating a constraint is one pivot of the
    dictionary, a rank-one update. Every iteration makes one pivot, or none once the solution is reached. The number of
    iterations is fixed at two per row, while random problems need about one; whether it sufficed is checked.

    Parameters
    ----------
    gram
        Inner products of the rows, ``[k, k]``. A row of zeros is no constraint.
    slack
        Inner products of the rows with the gradient, ``[k]``.
    squared_norm
        The squared length of the gradient.
    """
    k = slack.shape[-1]
    problem = _scale_to_unit_length(gram.double(), slack.double(), squared_norm.double())
    a, b = problem.gram, problem.slack
    table, active, x = torch.cat([a, b[:, None]], dim=1), torch.zeros_like(problem.nonzero), torch.zeros_like(b)
    for _ in range(2 * k):
        table, active, x = _iterate(table, active, x)
    inverse = table[:, :k] * active[:, None] * active[None, :]
    x = torch.where(active, table[:, k], 0)
    for _ in range(2):  # iterative refinement, against the rounding errors of the pivots
        x = torch.where(active, x - inverse @ (a @ x + b), 0)
    x = x.clamp(min=0)
    w = a @ x + b
    solved = (w > -OPTIMALITY_TOLERANCE).all() & ((x * w).abs() < OPTIMALITY_TOLERANCE).all()
    dependent = (problem.nonzero & ~active & (table[:, :k].diagonal() <= DEPENDENCE_TOLERANCE)).any()
    return DualSolution(x * problem.scale * squared_norm.double().sqrt(), solved, dependent)


def _scale_to_unit_length(gram: Tensor, slack: Tensor, squared_norm: Tensor) -> UnitProblem:
    lengths = gram.diagonal().clamp(min=0).sqrt()
    nonzero = lengths > 0
    scale = torch.where(nonzero, 1 / torch.where(nonzero, lengths, 1), 0)
    norm = squared_norm.sqrt()
    inverse_norm = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)
    eye = torch.eye(slack.shape[-1], dtype=torch.float64, device=gram.device)
    cosines = gram * scale[:, None] * scale[None, :]
    unit_slack = torch.where(nonzero, slack * scale * inverse_norm, torch.ones_like(slack))
    return UnitProblem(cosines * (1 - eye) + eye, unit_slack, nonzero, scale)


def _iterate(table: Tensor, active: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make one iteration: deactivate a constraint whose multiplier would turn negative, or activate a violated one.

    Parameters
    ----------
    table
        The dictionary, ``[k, k + 1]``: the matrix and the values of the basic variables.
    active
        Which constraints are active, ``[k]``.
    x
        The multipliers, ``[k]``.
    """
    k = active.shape[-1]
    matrix, value = table[:, :k], table[:, k]
    infinite = torch.full_like(value, torch.inf)
    # The target of the active multipliers, and the first of them that would turn negative on the way there.
    target = torch.where(active, value, 0)
    leaving = active & (target <= 0)
    some_leave = leaving.any()
    fraction = torch.where(leaving, x / (x - target).clamp(min=torch.finfo(torch.float64).tiny), infinite)
    step = torch.where(some_leave, fraction.min(), 1)
    x = (x + step * (target - x)).clamp(min=0)
    # If none would: the constraint that is violated most, among those that do not depend on active ones.
    violated = ~active & (value < -VIOLATION_TOLERANCE) & (matrix.diagonal() > DEPENDENCE_TOLERANCE)
    entering = torch.where(violated, value, infinite).argmin()
    index = torch.where(some_leave, fraction.argmin(), entering)
    pivot = (torch.arange(k, device=value.device) == index) & (some_leave | violated.any())
    x = torch.where(pivot, 0, x)  # a leaving multiplier is zero now, an entering one has been zero
    return _exchange(table, pivot), active ^ pivot, x


def _exchange(table: Tensor, chosen: Tensor) -> Tensor:
    """Exchange the roles of v and w at the chosen index, the one that is true; change nothing if none is."""
    k = chosen.shape[-1]
    one_hot = chosen.to(table.dtype)
    row, column = one_hot @ table, table[:, :k] @ one_hot  # both zero where none is chosen
    pivot = torch.where(chosen.any(), row[:k] @ one_hot, 1)
    chosen_column = torch.cat([chosen, torch.zeros_like(chosen[:1])])
    # At the pivot 1 / a_pp, in its column a_ip / a_pp, in its row −a_pj / a_pp, elsewhere a_ij − a_ip a_pj / a_pp.
    result = table - column[:, None] * (row / pivot)[None, :]
    result = torch.where(chosen_column[None, :], (column / pivot)[:, None], result)
    return torch.where(chosen[:, None], torch.where(chosen_column, 1 / pivot, -row / pivot)[None, :], result)
