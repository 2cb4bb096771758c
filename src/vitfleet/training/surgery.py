"""Gradient surgery: turn a gradient as little as possible so that it goes against none of some others.

The gradient integrator (FedViT, section 3.4; GEM, section 3): of all g' with G g' ≥ 0, the rows of G being the
reference gradients, the one nearest to g is g' = Gᵀv + g, where v solves the dual

    min ½ vᵀ G Gᵀ v + gᵀGᵀ v   subject to   v ≥ 0,

a non-negative least squares problem on the small Gram matrix G Gᵀ. Everything here is written for one client as tensor
operations of fixed shape without a look at their values, so that it can be lifted over many clients with ``torch.vmap``
and captured in a graph: no host waits for it, and no gradient leaves the device.

With an adaptive optimiser behind it (AdamW) the step that is taken is no longer g' itself, and the promise that no
stored task's loss grows holds for the gradient only; ``train.optimizer = "sgd"`` keeps it (without momentum, to first
order).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.training.objective import ReferenceGradients, Step

# Everything below is on rows of unit length: these are sines and cosines.
VIOLATED = 1e-10  # a constraint is taken up when it is broken by more than this
DEPENDENT = 1e-12  # a row whose squared distance from the span of those taken up is less says nothing new
SOLVED = 1e-8  # what counts as solved
VANISHED = 1e-7  # a turned gradient this much shorter than g is all rounding: it is none
ACUTE = -1e-6  # the least cosine that the check lets pass
CHUNK = 8192  # numbers of a gradient that are multiplied at once; see in_pieces
COUNT_NAMES = ("integrated", "rotated", "degenerate", "unsolved")  # steps, of what is told here: see Turned
OBTUSE = "obtuse"  # and those that the check, where it is on, found wrong


@dataclass(frozen=True)
class Solution:
    """The solution of a small problem.

    Attributes
    ----------
    v
        The multipliers, ``[k]``, of the constraints as given.
    solved
        Whether all conditions hold to 1e-8.
    dependent
        Whether some row is a combination of those whose constraints are active.
    """

    v: Tensor
    solved: Tensor
    dependent: Tensor


def solve_dual(gram: Tensor, slack: Tensor, size: Tensor) -> Solution:
    """Minimise ½ vᵀ gram v + slackᵀ v over v ≥ 0, in float64.

    Lawson and Hanson's active-set method, kept as a dictionary: with w = gram·v + slack, those constraints that are
    taken up have v basic and w = 0, the others w basic and v = 0. Taking one up or letting one go is one exchange of
    the dictionary, a rank-one update; every pass of the loop makes one, or none once the solution is reached. The
    number of passes is fixed, two a row, while random problems need about one; that it sufficed is checked, not
    assumed.

    Parameters
    ----------
    gram
        Inner products of the rows, ``[k, k]``; a row of zeros is no constraint.
    slack
        Their inner products with the gradient, ``[k]``.
    size
        The gradient's squared length.
    """
    k = slack.shape[-1]
    gram, slack = gram.double(), slack.double()
    lengths = gram.diagonal().clamp(min=0).sqrt()
    real = lengths > 0
    # Rows of unit length, a gradient of unit length: one scale for every tolerance. A row that is none is made
    # independent of all others and never broken.
    scale = torch.where(real, 1 / torch.where(real, lengths, 1), 0)
    length = size.double().sqrt()
    nonzero = length > 0
    unit = torch.where(nonzero, 1 / torch.where(nonzero, length, 1), 0)
    eye = torch.eye(k, dtype=torch.float64, device=gram.device)
    a = gram * scale[:, None] * scale[None, :]
    a = a * (1 - eye) + eye
    b = torch.where(real, slack * scale * unit, torch.ones_like(slack))

    table, taken, x = torch.cat([a, b[:, None]], dim=1), torch.zeros_like(real), torch.zeros_like(b)
    infinite, places = torch.full_like(b, torch.inf), torch.arange(k, device=b.device)
    for _ in range(2 * k):
        matrix, value = table[:, :k], table[:, k]
        # Where those taken up would go, and the first of them that would turn negative on the way there.
        goal = torch.where(taken, value, 0)
        leaving = taken & (goal <= 0)
        some_leave = leaving.any()
        room = torch.where(leaving, x / (x - goal).clamp(min=torch.finfo(torch.float64).tiny), infinite)
        way = torch.where(some_leave, room.min(), 1)
        x = (x + way * (goal - x)).clamp(min=0)
        # If none does: the constraint that is broken most, among those that say something new.
        broken = ~taken & (value < -VIOLATED) & (matrix.diagonal() > DEPENDENT)
        some_break = broken.any()
        place = torch.where(some_leave, room.argmin(), torch.where(broken, value, infinite).argmin())
        chosen = (places == place) & (some_leave | some_break)
        x = torch.where(chosen, 0, x)  # who leaves is at zero now, who comes has been there
        table = _exchange(table, chosen)
        taken = taken ^ chosen
    inverse = table[:, :k] * taken[:, None] * taken[None, :]
    x = torch.where(taken, table[:, k], 0)
    for _ in range(2):  # the exchanges' rounding errors, taken back
        x = torch.where(taken, x - inverse @ (a @ x + b), 0)
    x = x.clamp(min=0)
    w = a @ x + b
    solved = (w > -SOLVED).all() & ((x * w).abs() < SOLVED).all()
    dependent = (real & ~taken & (table[:, :k].diagonal() <= DEPENDENT)).any()
    return Solution(x * scale * length, solved, dependent)


def _exchange(table: Tensor, chosen: Tensor) -> Tensor:
    """Exchange the roles of v and w at the chosen place, the one that is true; where none is, change nothing."""
    k = chosen.shape[-1]
    hot = chosen.to(table.dtype)
    row, column = hot @ table, table[:, :k] @ hot  # both zero where none is chosen
    pivot = torch.where(chosen.any(), row[:k] @ hot, 1)
    here = torch.cat([chosen, torch.zeros_like(chosen[:1])])
    # Elsewhere a_ij − a_ip a_pj / a_pp; in the column a_ip / a_pp, in the row −a_pj / a_pp, at the place 1 / a_pp.
    result = table - column[:, None] * (row / pivot)[None, :]
    result = torch.where(here[None, :], (column / pivot)[:, None], result)
    return torch.where(chosen[:, None], torch.where(here, 1 / pivot, -row / pivot)[None, :], result)


@dataclass(frozen=True)
class ProjectedGradient:
    """A gradient after surgery, and what there is to say of it (0 or 1 each, as float32 scalars).

    Attributes
    ----------
    rotated
        It was changed.
    degenerate
        The input was out of the ordinary: a zero gradient, a reference that is zero, rows that depend on each other, or
        nothing left of the gradient. The result is what the definition says all the same.
    unsolved
        The conditions do not hold to 1e-8.
    """

    gradients: Tensors
    rotated: Tensor
    degenerate: Tensor
    unsolved: Tensor


def project_gradient(
    gradients: Tensors, references: Tensors, present: Tensor, margin: float = 0.0
) -> ProjectedGradient:
    """Return the gradient nearest to the given one that goes against none of the references.

    Where nothing of it is left (every direction is forbidden), it is zero; a reference that is absent or zero forbids
    nothing.

    Parameters
    ----------
    present
        Which of the references are real, ``[k]``.
    margin
        GEM's γ: the least of every multiplier, once any constraint is broken.
    """
    own, rows = to_chunks({name: one[None] for name, one in gradients.items()}), to_chunks(references, gradients)
    gram, slack, size = inner_products(own, rows)
    here = present.to(torch.float64)
    gram, slack = gram * here[:, None] * here[None, :], slack * here
    lengths = gram.diagonal().clamp(min=0).sqrt()
    broken = (slack < -VIOLATED * lengths * size.sqrt()).any()
    least = margin * (lengths > 0).to(torch.float64)
    # v = least + u with u ≥ 0: the same problem, moved.
    solution = solve_dual(gram, slack + gram @ least, size)
    v = torch.where(broken, solution.v + least, torch.zeros_like(least))
    left = size + 2 * (v @ slack) + v @ gram @ v
    vanished = broken & (left <= VANISHED**2 * size)
    moved = torch.where(broken, torch.where(vanished, 0, own + v[None, None, :] @ rows), own)
    applied = from_chunks(moved, gradients)
    odd = (present & (lengths == 0)).any() | (size == 0) | (broken & solution.dependent) | vanished
    return ProjectedGradient(applied, broken.float(), odd.float(), (broken & ~solution.solved).float())


def to_chunks(rows: Tensors, names: Iterable[str] | None = None) -> Tensor:
    """Return the numbers of some gradients, ``[k, …]`` each, as ``[pieces, k, PIECE]`` in float64, zeros at the end.

    In float64: what a GPU does to float32 products (TF32) would spoil the angles. In pieces: few rows of millions of
    numbers are no shape for a matrix product, whose work would fall to a handful of a GPU's processors; so every piece
    is multiplied on its own, and the products are summed.
    """
    flat = [rows[name].flatten(1) for name in (rows if names is None else names)]
    missing = -sum(one.shape[1] for one in flat) % CHUNK
    together = torch.cat([*flat, flat[0].new_zeros(flat[0].shape[0], missing)], dim=1)
    return together.reshape(together.shape[0], -1, CHUNK).transpose(0, 1).contiguous().double()


def from_chunks(pieces: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Return a single gradient, ``[pieces, 1, PIECE]``, in the shapes that it came in."""
    sizes = [one.numel() for one in like.values()]
    parts = torch.split(pieces.flatten()[: sum(sizes)], sizes)
    return {name: part.reshape(one.shape).to(one.dtype) for (name, one), part in zip(like.items(), parts, strict=True)}


def inner_products(own: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inner products of the references, those with the gradient, and its squared length, in float64."""
    gram, slack = (rows @ rows.mT).sum(0), (rows @ own.mT).sum(0).squeeze(-1)
    return gram, slack, (own * own).sum()


def has_obtuse_angle(gradients: Tensors, references: Tensors, present: Tensor) -> Tensor:
    """Return whether the angle to some reference is obtuse, its cosine below −1e-6: 0 or 1, a float32 scalar."""
    own = to_chunks({name: one[None] for name, one in gradients.items()})
    gram, slack, size = inner_products(own, to_chunks(references, gradients))
    lengths = (gram.diagonal() * size).sqrt()
    return (present & (slack < ACUTE * lengths)).any().float()


@dataclass(frozen=True)
class GradientIntegrator:
    """The gradient integrator as a transform: the step's gradient, turned away from none of its references.

    Attributes
    ----------
    check
        Whether to verify, at every step, what is applied.
    margin
        See :func:`turn`.
    """

    check: bool = False
    margin: float = 0.0

    @property
    def counts(self) -> tuple[str, ...]:
        """Steps with references, and those that were rotated, out of the ordinary, not solved (and found obtuse)."""
        return (*COUNT_NAMES, OBTUSE) if self.check else COUNT_NAMES

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        """Return the turned gradient; without references, the gradient."""
        if references is None:
            return gradients, dict.fromkeys(self.counts, step.sample_weight.new_zeros(()))
        return _judged(
            project_gradient(gradients, references.gradients, references.present, self.margin), references, self.check
        )


@dataclass(frozen=True)
class GradientRotation:
    """FedViT's fine tuning after an aggregation: the gradient before it, turned to an acute angle with that after it.

    The weights that train are the aggregated ones; the last reference is the gradient of the same batch at the
    client's weights from before: g' = g_b − min(0, g_b·g_a) / ‖g_a‖² · g_a.
    """

    check: bool = False

    @property
    def counts(self) -> tuple[str, ...]:
        """The same as the integrator's."""
        return (*COUNT_NAMES, OBTUSE) if self.check else COUNT_NAMES

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        """Return the gradient before aggregation, rotated."""
        assert references is not None
        before = {name: rows[-1] for name, rows in references.gradients.items()}
        after = {name: own[None] for name, own in gradients.items()}
        present = torch.ones_like(references.present[-1:])
        return _judged(project_gradient(before, after, present), ReferenceGradients(after, present), self.check)


def _judged(turned: ProjectedGradient, references: ReferenceGradients, check: bool) -> tuple[Tensors, Tensors]:
    told = references.present.any().float(), turned.rotated, turned.degenerate, turned.unsolved
    counts = dict(zip(COUNT_NAMES, told, strict=True))
    if check:
        counts[OBTUSE] = has_obtuse_angle(turned.gradients, references.gradients, references.present)
    return turned.gradients, counts


@dataclass(frozen=True)
class MostDissimilar:
    """The gradient restorer's choice: the k references farthest from the gradient by the Wasserstein distance.

    Attributes
    ----------
    k
        How many.
    every
        Steps that a choice serves.
    """

    k: int
    every: int = 1

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        """Return the places of the chosen ones, in ascending order; absent ones come last."""
        distances = wasserstein_distances(gradients, references.gradients)
        ranked = torch.where(references.present, distances, -1)
        return ranked.topk(self.k).indices.sort().values


def wasserstein_distances(gradients: Tensors, references: Tensors) -> Tensor:
    """Return the 1-D Wasserstein distance of a gradient, as a sample of numbers, to each reference, ``[references]``.

    Of two samples of equal size it is the mean of |sort(a) − sort(b)|. One reference is sorted at a time, so that what
    is needed besides the references themselves does not grow with their number.
    """
    own = torch.cat([one.flatten() for one in gradients.values()]).sort().values
    count = next(iter(references.values())).shape[0]
    found = []
    for place in range(count):
        other = torch.cat([references[name][place].flatten() for name in gradients]).sort().values
        found.append((own - other).abs().mean(dtype=torch.float64))
    return torch.stack(found)
