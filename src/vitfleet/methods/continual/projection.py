"""The nearest gradient that has no obtuse angle with any of some reference gradients: GEM's and FedViT's projection.

Of all g' with G g' ≥ 0, the rows of G being the reference gradients, the one nearest to g is g' = Gᵀv + g, where v
solves the dual (GEM, equation 11; FedViT's gradient integrator, section 3.4)

    min ½ vᵀ G Gᵀ v + gᵀGᵀ v   subject to   v ≥ 0.

Everything is written for one client, with operations of fixed shape that do not depend on values: it is mapped over
clients and captured in a CUDA graph. Inner products are in float64.

An adaptive optimiser (AdamW) does not step along g' itself: that no loss of a stored task grows, to first order, then
holds for g' only. ``train.optimizer = "sgd"`` without momentum keeps the guarantee for the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vitfleet.message import Numbers, Tensors
from vitfleet.methods.reported import ClientMetric
from vitfleet.training.local_training import LocalResult

VANISHING_RATIO = 1e-7  # a projected gradient that is this much shorter than g is all rounding errors: it is zero
CHUNK = 4096  # numbers of a gradient that are multiplied at once: see `to_chunks`. Divides the matrices of most ViTs.
# Tolerances of the dual, for rows and gradients of unit length: they are sines and cosines.
VIOLATION_TOLERANCE = 1e-10  # a constraint becomes active if it is violated by more
DEPENDENCE_TOLERANCE = 1e-12  # a row is dependent if its squared distance from the span of the active ones is less
OPTIMALITY_TOLERANCE = 1e-8

#: What is counted of a training's steps: those with references; those whose gradient was changed; unusual ones (a zero
#: gradient or reference, dependent references, a projection that is zero: the result still satisfies the definition);
#: those in which the optimality conditions do not hold to 1e-8, or a gradient is not finite.
COUNTED = {
    "integrated": "with reference gradients",
    "rotated": "with a rotated gradient",
    "degenerate": "with a zero or linearly dependent gradient",
    "unsolved": "whose projection was not solved",
}


class References(NamedTuple):
    """Reference gradients.

    Attributes
    ----------
    gradients
        One row per reference, for each weight that trains, ``[references, …]``.
    present
        Which references exist, ``[references]``. The rows of the others are zero.
    """

    gradients: Tensors
    present: Tensor


def projection_metrics(prefix: str = "", steps: str = "steps") -> tuple[ClientMetric, ...]:
    """Declare what clients report of the projections of a training, whose steps are called ``steps``."""
    return tuple(
        ClientMetric(f"{prefix}{name}", f"{steps} {what}", "sum", name in ("degenerate", "unsolved"), "count")
        for name, what in COUNTED.items()
    )


def zero_counts(device: torch.device) -> dict[str, Tensor]:
    """Return the counters before the first step."""
    return {name: torch.zeros((), device=device) for name in COUNTED}


def projection_counts(result: LocalResult, prefix: str = "") -> Numbers:
    """Return what was counted of the projections of a training, if any were."""
    return {f"{prefix}{name}": int(result.kept[name]) for name in COUNTED if name in result.kept}


def project(gradients: Tensors, references: References, margin: float = 0.0) -> tuple[Tensors, Tensors]:
    """Return the nearest gradient that has no obtuse angle with any reference, and the counts of this step.

    It is zero if every direction is excluded. A reference that is absent or zero excludes nothing.

    Parameters
    ----------
    margin
        GEM's γ: the lower bound of every multiplier once any constraint is violated.
    """
    rows = to_chunks(references.gradients, as_row(gradients))
    return project_last_row(rows, gradients, references.present, margin)


def project_last_row(
    rows: Tensor, like: Tensors, present: Tensor, margin: float | Tensor = 0.0
) -> tuple[Tensors, Tensors]:
    """Project a gradient as :func:`project` does, from references and gradient in chunks.

    Parameters
    ----------
    rows
        The references, then the gradient: see :func:`to_chunks`.
    like
        The names, shapes and types of the result, in the order of the chunks.
    margin
        Of all references or of each, ``[references]``.
    """
    products = (rows @ rows.mT).sum(0)
    gram, slack, squared_norm = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    mask = present.to(torch.float64)
    gram, slack = gram * mask[:, None] * mask[None, :], slack * mask
    lengths = gram.diagonal().clamp(min=0).sqrt()
    violated = (slack < -VIOLATION_TOLERANCE * lengths * squared_norm.sqrt()).any()
    lower_bound = margin * (lengths > 0).to(torch.float64)
    # v = lower_bound + u with u ≥ 0 is the same problem with another slack.
    solution = solve_dual(gram, slack + gram @ lower_bound, squared_norm)
    v = torch.where(violated, solution.v + lower_bound, torch.zeros_like(lower_bound))
    shifted = torch.cat([v, v.new_ones(1)])[None, None, :] @ rows
    # Its length from its own numbers: ‖g‖² + 2vᵀGg + vᵀGGᵀv would cancel, down to rounding errors of ‖g‖².
    vanished = violated & ((shifted * shifted).sum() <= VANISHING_RATIO**2 * squared_norm)
    projected = torch.where(violated, torch.where(vanished, 0, shifted), rows[:, -1:])
    zero_reference = (present & (lengths == 0)).any()
    degenerate = zero_reference | (squared_norm == 0) | (violated & solution.dependent) | vanished
    finite = gram.isfinite().all() & slack.isfinite().all() & squared_norm.isfinite()
    flags = present.any(), violated, degenerate, (violated & ~solution.solved) | ~finite
    counts = {name: flag.float() for name, flag in zip(COUNTED, flags, strict=True)}
    return from_chunks(projected, like), counts


def as_row(gradients: Tensors) -> dict[str, Tensor]:
    """Return one gradient as a group of one row: see :func:`to_chunks`."""
    return {name: tensor[None] for name, tensor in gradients.items()}


def to_chunks(*groups: Tensors) -> Tensor:
    """Return the gradients of all groups as ``[chunks, rows, CHUNK]`` in float64.

    In float64, because float32 products on a GPU (TF32) are too coarse for the angles. In chunks, because a matrix
    product of few rows with millions of columns keeps only a few of a GPU's processors busy: every chunk is multiplied
    separately, and the products are summed.

    The chunks are those of the first tensor, of the second, and so on; then what is left of all of them, which fills no
    chunk of its own, and zeros up to the end of the last chunk.

    Parameters
    ----------
    groups
        Gradients of the same weights, ``[rows, …]`` each. The order of the tensors is that of the last group.
    """
    pieces = [_cut(group, groups[-1]) for group in groups]
    num_chunks, num_rows = sum(piece.shape[0] for piece in pieces[0]), sum(group[0].shape[1] for group in pieces)
    # Every number is read once and written once, in its place and type. `torch.cat` would join groups by another pass.
    chunks = pieces[-1][0].new_empty(num_chunks, num_rows, CHUNK, dtype=torch.float64)
    row = 0
    for group in pieces:
        position, end = 0, row + group[0].shape[1]
        for piece in group:
            chunks[position : position + piece.shape[0], row:end].copy_(piece)
            position += piece.shape[0]
        row = end
    return chunks


def _cut(gradients: Tensors, names: Iterable[str]) -> list[Tensor]:
    """Return the pieces of some gradients, ``[chunks, rows, CHUNK]`` each; all but the last are views."""
    flat = [gradients[name].flatten(1) for name in names]
    whole = [tensor[:, : tensor.shape[1] // CHUNK * CHUNK] for tensor in flat]
    rest = torch.cat([tensor[:, part.shape[1] :] for tensor, part in zip(flat, whole, strict=True)], dim=1)
    rest = functional.pad(rest, (0, -rest.shape[1] % CHUNK))
    return [torch.unflatten(part, 1, (-1, CHUNK)).transpose(0, 1) for part in (*whole, rest) if part.shape[1]]


def from_chunks(chunks: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Return a single gradient, ``[chunks, 1, CHUNK]``, in the names, shapes and types of ``like``."""
    sizes = [tensor.numel() for tensor in like.values()]
    rest = [size % CHUNK for size in sizes]
    whole = [size - left for size, left in zip(sizes, rest, strict=True)]
    parts = torch.split(chunks.flatten()[: sum(sizes)], [*whole, *rest])
    numbers = [_join(*pair) for pair in zip(parts[: len(sizes)], parts[len(sizes) :], strict=True)]
    return {
        name: part.reshape(tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(like.items(), numbers, strict=True)
    }


def _join(whole: Tensor, rest: Tensor) -> Tensor:
    """Concatenate two vectors; one of them is not copied if the other is empty."""
    if not rest.numel():
        return whole
    return torch.cat([whole, rest]) if whole.numel() else rest


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
    """Minimise ½ vᵀ gram v + slackᵀ v over v ≥ 0, in float64: non-negative least squares on a small matrix.

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
