"""Gradient surgery: the nearest gradient that has no obtuse angle with any of some reference gradients.

The gradient integrator (FedViT, section 3.4; GEM, section 3): of all g' with G g' ≥ 0, the rows of G being the
reference gradients, the one nearest to g is g' = Gᵀv + g, where v solves the dual

    min ½ vᵀ G Gᵀ v + gᵀGᵀ v   subject to   v ≥ 0.

Everything is written for one client, with operations of fixed shape that do not depend on values. It can therefore be
lifted over clients with ``torch.vmap`` and captured in a CUDA graph; the host never waits, and no gradient leaves the
device.

An adaptive optimiser (AdamW) does not step along g' itself: that no loss of a stored task grows, to first order, then
holds for g' only. ``train.optimizer = "sgd"`` without momentum keeps the guarantee for the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vitfleet.message import Tensors
from vitfleet.training.dual_solver import VIOLATION_TOLERANCE, solve_dual
from vitfleet.training.objective import ReferenceGradients, Step

VANISHING_RATIO = 1e-7  # a projected gradient that is this much shorter than g is all rounding errors: it is zero
MIN_COSINE = -1e-6  # of the angle to a reference that passes as not obtuse
CHUNK = 4096  # numbers of a gradient that are multiplied at once: see `to_chunks`. Divides the matrices of most ViTs.

# Names of the counters of steps, as they are sent and recorded: see `ProjectedGradient`.
COUNT_NAMES = ("integrated", "rotated", "degenerate", "unsolved")
OBTUSE = "obtuse"  # steps whose result failed the check, where it is on


@dataclass(frozen=True)
class ProjectedGradient:
    """A gradient after surgery, with flags (0 or 1, float32 scalars).

    Attributes
    ----------
    rotated
        The gradient was changed.
    degenerate
        The input was unusual: a zero gradient, a zero reference, linearly dependent references, or a projection that is
        zero. The result still satisfies the definition.
    unsolved
        The optimality conditions do not hold to 1e-8, or the gradient or a reference is not finite.
    """

    gradients: Tensors
    rotated: Tensor
    degenerate: Tensor
    unsolved: Tensor


def project_gradient(
    gradients: Tensors, references: Tensors, present: Tensor, margin: float | Tensor = 0.0
) -> ProjectedGradient:
    """Return the nearest gradient that has no obtuse angle with any reference.

    It is zero if every direction is excluded. A reference that is absent or zero excludes nothing.

    Parameters
    ----------
    present
        Which references exist, ``[k]``.
    margin
        GEM's γ: the lower bound of every multiplier, or of each, ``[k]``, once any constraint is violated.
    """
    rows = to_chunks(references, as_row(gradients))
    return project_last_row(rows, gradients, present, margin)


def project_last_row(rows: Tensor, like: Tensors, present: Tensor, margin: float | Tensor = 0.0) -> ProjectedGradient:
    """Project a gradient as :func:`project_gradient` does, from references and gradient in chunks.

    Parameters
    ----------
    rows
        The references, then the gradient: see :func:`to_chunks`.
    like
        The names, shapes and types of the result, in the order of the chunks.
    """
    gram, slack, squared_norm = inner_products(rows)
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
    unsolved = (violated & ~solution.solved) | ~finite
    return ProjectedGradient(from_chunks(projected, like), violated.float(), degenerate.float(), unsolved.float())


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


def inner_products(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inner products of the references, those of the references with the gradient, and its squared length.

    Parameters
    ----------
    rows
        The references, then the gradient: see :func:`to_chunks`.
    """
    products = (rows @ rows.mT).sum(0)
    return products[:-1, :-1], products[:-1, -1], products[-1, -1]


def has_obtuse_angle(gradients: Tensors, references: tuple[Tensors, ...], present: Tensor) -> Tensor:
    """Return whether the cosine of the angle to some reference is below −1e-6: 0 or 1, a float32 scalar.

    Parameters
    ----------
    references
        Groups of references: see :func:`to_chunks`.
    """
    gram, slack, squared_norm = inner_products(to_chunks(*references, as_row(gradients)))
    lengths = (gram.diagonal() * squared_norm).sqrt()
    return (present & (slack < MIN_COSINE * lengths)).any().float()


@dataclass(frozen=True)
class GradientIntegrator:
    """The gradient integrator as a gradient transform: projects the gradient of the step against all references.

    Attributes
    ----------
    check
        Whether to verify the applied gradient at every step.
    margin
        GEM's γ: see :func:`project_gradient`.
    """

    check: bool = False
    margin: float = 0.0

    @property
    def counts(self) -> tuple[str, ...]:
        """Steps with references, and those that were rotated, degenerate or unsolved (or found obtuse)."""
        return (*COUNT_NAMES, OBTUSE) if self.check else COUNT_NAMES

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        """Return the projected gradient, or the gradient itself if there are no references."""
        if references is None:
            return gradients, dict.fromkeys(self.counts, step.sample_weight.new_zeros(()))
        projected = project_gradient(gradients, references.gradients, references.present, self.margin)
        return projected.gradients, _step_counts(projected, references.present, (references.gradients,), self.check)


@dataclass(frozen=True)
class GradientRotation:
    """FedViT's fine tuning after an aggregation: rotates the gradient before it to an acute angle with that after it.

    The weights that train are the aggregated ones. The last reference is the gradient of the same batch at the client's
    weights before the aggregation: g' = g_b − min(0, g_b·g_a) / ‖g_a‖² · g_a. With a memory there are references before
    it, the gradients of stored tasks: then g' is the gradient nearest to g_b that has no obtuse angle with g_a nor with
    any of them.

    Attributes
    ----------
    check
        Whether to verify the applied gradient at every step.
    margin
        GEM's γ for the stored tasks: see :func:`project_gradient`. That of g_a is 0.
    """

    check: bool = False
    margin: float = 0.0

    @property
    def counts(self) -> tuple[str, ...]:
        """The counters of :class:`GradientIntegrator`."""
        return (*COUNT_NAMES, OBTUSE) if self.check else COUNT_NAMES

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        """Return the rotated gradient."""
        assert references is not None
        before = {name: references.gradients[name][-1] for name in gradients}
        # The gradient at the aggregated weights takes the place of the one before: stored tasks, then g_a.
        stored = {name: references.gradients[name][:-1] for name in gradients}
        constraints = stored, as_row(gradients)
        is_stored = (
            torch.arange(len(references.present), device=references.present.device) < len(references.present) - 1
        )
        rows = to_chunks(*constraints, as_row(before))
        projected = project_last_row(rows, before, references.present, self.margin * is_stored)
        return projected.gradients, _step_counts(projected, references.present, constraints, self.check)


def _step_counts(
    projected: ProjectedGradient, present: Tensor, references: tuple[Tensors, ...], check: bool
) -> dict[str, Tensor]:
    flags = present.any().float(), projected.rotated, projected.degenerate, projected.unsolved
    counts = dict(zip(COUNT_NAMES, flags, strict=True))
    if check:
        counts[OBTUSE] = has_obtuse_angle(projected.gradients, references, present)
    return counts


@dataclass(frozen=True)
class TopReferences(ABC):
    """A selector of the gradient restorer: the k references with the largest scores.

    Attributes
    ----------
    k
        How many references are selected.
    every
        The number of steps after which references are selected again.
    """

    k: int
    every: int = 1

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        """Return the indices of the selected references, in ascending order. Absent references are selected last."""
        scores = self.scores(gradients, references.gradients)
        return torch.where(references.present, scores, -torch.inf).topk(self.k).indices.sort().values

    @abstractmethod
    def scores(self, gradients: Tensors, references: Tensors) -> Tensor:
        """Return the score of each reference, ``[references]``."""


@dataclass(frozen=True)
class MostDissimilar(TopReferences):
    """The k references with the largest Wasserstein distance to the gradient."""

    def scores(self, gradients: Tensors, references: Tensors) -> Tensor:
        """Return the Wasserstein distances."""
        return wasserstein_distances(gradients, references)


@dataclass(frozen=True)
class LargestAngle(TopReferences):
    """The k references with the largest included angle with the gradient."""

    def scores(self, gradients: Tensors, references: Tensors) -> Tensor:
        """Return the negative cosines, which grow with the angle."""
        return -cosines(gradients, references)


def wasserstein_distances(gradients: Tensors, references: Tensors) -> Tensor:
    """Return the 1-D Wasserstein distance of a gradient to each reference, ``[references]``.

    Each gradient is taken as a sample of numbers. For samples of equal size the distance is the mean of
    |sort(a) − sort(b)|. References are sorted one by one, so that the memory in addition to
    them does not grow with their number.
    """
    gradient = torch.cat([tensor.flatten() for tensor in gradients.values()]).sort().values
    num_references = next(iter(references.values())).shape[0]
    distances = []
    for index in range(num_references):
        reference = torch.cat([references[name][index].flatten() for name in gradients]).sort().values
        distances.append((gradient - reference).abs().mean(dtype=torch.float64))
    return torch.stack(distances)


def cosines(gradients: Tensors, references: Tensors) -> Tensor:
    """Return the cosine of the angle between a gradient and each reference, ``[references]``; 1 where one is zero.

    References are converted to float64 one by one, as those in :func:`wasserstein_distances` are sorted.
    """
    gradient = to_chunks(as_row(gradients))
    norm = torch.linalg.vector_norm(gradient)
    num_references = next(iter(references.values())).shape[0]
    values = []
    for index in range(num_references):
        reference = to_chunks({name: references[name][index : index + 1] for name in gradients})
        lengths = norm * torch.linalg.vector_norm(reference)
        values.append(torch.where(lengths > 0, (gradient * reference).sum() / torch.where(lengths > 0, lengths, 1), 1))
    return torch.stack(values)
