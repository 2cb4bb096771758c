"""The nearest gradient that has no obtuse angle with any of some reference gradients: GEM's and FedViT's projection.

Of all g' with G g' ≥ 0, the rows of G being the reference gradients, the one nearest to g is g' = g + Gᵀv, where v
solves the dual (GEM, equation 11; FedViT's gradient integrator, section 3.4)

    min ½ vᵀ G Gᵀ v + gᵀGᵀ v   subject to   v ≥ 0.

It is computed for one client, with operations of fixed shape that do not depend on values, as in every step.

An adaptive optimiser (AdamW) does not step along g' itself: that no loss of a stored task grows, to first order, then
holds for g' only. ``train.optimizer = "sgd"`` without momentum keeps the guarantee for the step.
"""

from __future__ import annotations

from collections.abc import Iterable
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

#: What clients report of the projections of a training: the number of its steps. After a degenerate projection the
#: result still satisfies the definition; after an unsolved one, the optimality conditions do not hold to 1e-8, or a
#: gradient is not finite.
COUNTED_STEPS = (
    ClientMetric("integrated", "steps with reference gradients", "sum", form="count"),
    ClientMetric("rotated", "steps with a rotated gradient", "sum", form="count"),
    ClientMetric("degenerate", "steps with a zero or linearly dependent gradient", "sum", warning=True, form="count"),
    ClientMetric("unsolved", "steps whose projection was not solved", "sum", warning=True, form="count"),
)


def zero_counts(device: torch.device) -> dict[str, Tensor]:
    """Return the counters before the first step: the kept tensors of a training with projections."""
    return {metric.name: torch.zeros((), device=device) for metric in COUNTED_STEPS}


def projection_counts(result: LocalResult) -> Numbers:
    """Return what was counted of the projections of a training, if any were."""
    names = [metric.name for metric in COUNTED_STEPS]
    return {name: int(result.kept[name]) for name in names if name in result.kept}


class References(NamedTuple):
    """Reference gradients of each weight, ``[references, …]``, and which of them exist; the rows of others are zero."""

    gradients: Tensors
    present: Tensor


def project(gradients: Tensors, *references: References, margin: float | Tensor = 0.0) -> tuple[Tensors, Tensors]:
    """Return the nearest gradient that has no obtuse angle with any reference, and the counts of this step.

    It is zero if every direction is excluded. A reference that is absent or zero excludes nothing. ``margin`` is GEM's
    γ: the lower bound of every multiplier, or of each, ``[references]``, once any constraint is violated.
    """
    rows = to_chunks(*(group.gradients for group in references), as_row(gradients))
    present = torch.cat([group.present for group in references])
    products = (rows @ rows.mT).sum(0)
    exists = present.double()
    gram, slack = products[:-1, :-1] * exists[:, None] * exists[None, :], products[:-1, -1] * exists
    squared_norm, lengths = products[-1, -1], gram.diagonal().clamp(min=0).sqrt()
    violated = (slack < -VIOLATION_TOLERANCE * lengths * squared_norm.sqrt()).any()
    least = margin * (lengths > 0).double()
    # v = least + u with u ≥ 0 is the same problem with another slack.
    solution = solve_dual(gram, slack + gram @ least, squared_norm)
    v = torch.where(violated, solution.v + least, torch.zeros_like(least))
    shifted = torch.cat([v, v.new_ones(1)])[None, None, :] @ rows
    # Its length from its own numbers: ‖g‖² + 2vᵀGg + vᵀGGᵀv would cancel, down to rounding errors of ‖g‖².
    vanished = violated & ((shifted * shifted).sum() <= VANISHING_RATIO**2 * squared_norm)
    projected = torch.where(violated, torch.where(vanished, 0, shifted), rows[:, -1:])
    is_zero = (squared_norm == 0) | (present & (lengths == 0)).any()
    finite = gram.isfinite().all() & slack.isfinite().all() & squared_norm.isfinite()
    counts = {
        "integrated": present.any(),
        "rotated": violated,
        "degenerate": is_zero | (violated & solution.dependent) | vanished,
        "unsolved": (violated & ~solution.solved) | ~finite,
    }
    return from_chunks(projected, gradients), {name: flag.float() for name, flag in counts.items()}


def as_row(gradients: Tensors) -> dict[str, Tensor]:
    """Return one gradient as a group of one row: see :func:`to_chunks`."""
    return {name: tensor[None] for name, tensor in gradients.items()}


def to_chunks(*groups: Tensors) -> Tensor:
    """Return gradients as rows of one matrix that is cut into chunks, ``[chunks, rows, CHUNK]``, in float64.

    In float64, because float32 products on a GPU (TF32) are too coarse for the angles. In chunks, because a matrix
    product of few rows with millions of columns keeps only a few of a GPU's processors busy: every chunk is multiplied
    separately, and the products are summed. Every tensor is cut into whole chunks; what is left of all tensors fills
    the last ones, with zeros at the end. The order of the tensors is that of the last group.
    """
    pieces = [_cut(group, groups[-1]) for group in groups]
    rows, sizes = [group[0].shape[1] for group in pieces], [piece.shape[0] for piece in pieces[-1]]
    # Every number is read once and written once, in its place and type. `torch.cat` would join groups by another pass.
    chunks = pieces[-1][0].new_empty(sum(sizes), sum(rows), CHUNK, dtype=torch.float64)
    for rows_of_group, group in zip(torch.split(chunks, rows, dim=1), pieces, strict=True):
        for place, piece in zip(torch.split(rows_of_group, sizes), group, strict=True):
            place.copy_(piece)
    return chunks


def from_chunks(chunks: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Return a single gradient, ``[chunks, 1, CHUNK]``, in the names, shapes and types of ``like``."""
    restored = {name: tensor.new_empty(tensor.shape) for name, tensor in like.items()}
    whole, rest = _divide([tensor.view(1, -1) for tensor in restored.values()])
    numbers, start = chunks.flatten(), 0
    for place in (*whole, *rest):
        place.copy_(numbers[start : start + place.shape[1]])
        start += place.shape[1]
    return restored


def _cut(gradients: Tensors, names: Iterable[str]) -> list[Tensor]:
    """Return the pieces of some gradients, ``[chunks, rows, CHUNK]`` each; all but the last are views."""
    whole, rests = _divide([gradients[name].flatten(1) for name in names])
    rest = torch.cat(rests, dim=1)
    rest = functional.pad(rest, (0, -rest.shape[1] % CHUNK))
    return [torch.unflatten(part, 1, (-1, CHUNK)).transpose(0, 1) for part in (*whole, rest) if part.shape[1]]


def _divide(rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of what fills whole chunks of each tensor, and of what is left of each."""
    sizes = [tensor.shape[1] // CHUNK * CHUNK for tensor in rows]
    whole = [tensor[:, :size] for tensor, size in zip(rows, sizes, strict=True)]
    return whole, [tensor[:, size:] for tensor, size in zip(rows, sizes, strict=True)]


class DualSolution(NamedTuple):
    """The multipliers v, ``[k]``; whether the optimality conditions hold; whether some row depends on active ones."""

    v: Tensor
    solved: Tensor
    dependent: Tensor


def solve_dual(gram: Tensor, slack: Tensor, squared_norm: Tensor) -> DualSolution:
    """Minimise ½ vᵀ gram v + slackᵀ v over v ≥ 0, in float64: non-negative least squares on a small matrix.

    This is Lawson and Hanson's active-set method on a dictionary: with w = gram·v + slack, an active constraint has v
    basic and w = 0, an inactive one has w basic and v = 0. Activating or deactivating a constraint is one pivot of the
    dictionary, a rank-one update. Every iteration makes one pivot, or none once the solution is reached. The number of
    iterations is fixed at two per row, while random problems need about one; whether it sufficed is checked.

    ``gram`` and ``slack`` are the inner products of the rows, ``[k, k]``, and with the gradient, ``[k]``;
    ``squared_norm`` is the squared length of the gradient. A row of zeros is no constraint.
    """
    k = slack.shape[-1]
    gram, slack, norm = gram.double(), slack.double(), squared_norm.double().sqrt()
    # Rows and gradient are scaled to unit length: one scale for every tolerance. A row of zeros becomes independent of
    # all others and is never violated.
    lengths = gram.diagonal().clamp(min=0).sqrt()
    nonzero = lengths > 0
    scale = torch.where(nonzero, 1 / torch.where(nonzero, lengths, 1), 0)
    inverse_norm = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)
    eye = torch.eye(k, dtype=torch.float64, device=gram.device)
    a = gram * scale[:, None] * scale[None, :] * (1 - eye) + eye
    b = torch.where(nonzero, slack * scale * inverse_norm, torch.ones_like(slack))
    # The dictionary, the matrix and the values of the basic variables; which constraints are active; the multipliers.
    table, active, x = torch.cat([a, b[:, None]], dim=1), torch.zeros_like(nonzero), torch.zeros_like(b)
    for _ in range(2 * k):
        table, active, x = _iterate(table, active, x)
    inverse = table[:, :k] * active[:, None] * active[None, :]
    x = torch.where(active, table[:, k], 0)
    for _ in range(2):  # iterative refinement, against the rounding errors of the pivots
        x = torch.where(active, x - inverse @ (a @ x + b), 0)
    x = x.clamp(min=0)
    w = a @ x + b
    solved = (w > -OPTIMALITY_TOLERANCE).all() & ((x * w).abs() < OPTIMALITY_TOLERANCE).all()
    dependent = (nonzero & ~active & (table[:, :k].diagonal() <= DEPENDENCE_TOLERANCE)).any()
    return DualSolution(x * scale * norm, solved, dependent)


def _iterate(table: Tensor, active: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Deactivate a constraint whose multiplier would turn negative, or else activate a violated one."""
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
