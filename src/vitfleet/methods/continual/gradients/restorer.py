"""FedViT's gradient restorer: which gradients of earlier tasks a step is compared with, and when they are computed.

FedViT and FedKNOW project the gradient of a step against those of the k earlier tasks that are most dissimilar to it.
What a task's gradient is differs: of stored samples (FedViT), of the distillation of a sparse model (FedKNOW). Which
tasks are chosen, after how many steps they are chosen again, and after how many their gradients are computed again, is
the same, and so is the rotation of the gradient after an aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.message import Numbers, Tensors, add_prefix, with_prefix
from vitfleet.methods.continual.gradients.projection import (
    COUNTED_STEPS,
    References,
    as_row,
    project,
    projection_counts,
    to_chunks,
)
from vitfleet.methods.personal.shared_body import HeadsParams
from vitfleet.training.local_training import LocalResult
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView

SELECTED, RESTORED, BEFORE = "selected_tasks", "restored.", "before."

FINE_TUNING = "tuning_"  # prefix of the numbers that count the steps of the fine-tuning
#: What clients report of fine-tuning, then of the training that follows it.
INTEGRATION_METRICS = (
    *(
        replace(metric, name=FINE_TUNING + metric.name, description=f"fine-tuning {metric.description}")
        for metric in COUNTED_STEPS
    ),
    *COUNTED_STEPS,
)

#: Computes the gradients of earlier tasks at the current weights: of all of them, or of those with these indices.
TaskGradients: TypeAlias = Callable[[StepView, Samples, Tensor | None], References]
Ranking: TypeAlias = Literal["wasserstein", "angle"]


class RestorerParams(HeadsParams):
    """Parameters of methods that compare a step's gradient with those of the most dissimilar earlier tasks."""

    k: int = Field(10, ge=1, description="earlier tasks that are integrated: the most dissimilar ones")
    rerank: int = Field(1, ge=1, description="steps between two rankings of the earlier tasks")
    recompute_references: int = Field(
        1, ge=1, description="steps after which gradients of earlier tasks are computed again; between, they are reused"
    )
    reference_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="data type in which gradients of earlier tasks are held; inner products are in float64"
    )
    margin: float = Field(
        0.0, ge=0, description="least multiplier of each earlier task once one is violated (the paper: 0; GEM: 0.5)"
    )
    tune_epochs: int = Field(1, ge=0, description="epochs of fine-tuning after an aggregation")


@dataclass(frozen=True)
class Restorer:
    """The gradients of a client's earlier tasks, as its steps need them."""

    tasks: int  # how many earlier tasks there are, missed ones included
    k: int  # how many of them are used
    ranking: Ranking = "wasserstein"
    rerank: int = 1  # after so many steps of an epoch tasks are chosen again
    recompute: int = 1  # after so many, their gradients are computed again; between, those computed last are used
    bf16: bool = False  # whether gradients are held in bfloat16

    @classmethod
    def of_params(cls, params: RestorerParams, tasks: int, ranking: Ranking = "wasserstein") -> Restorer:
        """Return the configured restorer."""
        bf16 = params.reference_dtype == "bf16"
        return cls(tasks, params.k, ranking, params.rerank, params.recompute_references, bf16)

    @property
    def chooses(self) -> bool:
        """Whether there are more tasks than are used."""
        return self.tasks > self.k

    @property
    def dtype(self) -> torch.dtype | None:
        """The type in which gradients are held; ``None``: that of the weights."""
        return torch.bfloat16 if self.bf16 else None

    def kind(self, index: int) -> str:
        """Return what a step of an epoch does: rank all tasks, compute gradients, or reuse them."""
        if index % self.recompute:
            return "reuse"
        return "rank" if self.chooses and index % self.rerank == 0 else "compute"

    def scratch(self, weights: Tensors) -> dict[str, Tensor]:
        """Return what steps pass on to later ones: the chosen tasks, and their gradients where these are reused."""
        rows, found = min(self.k, self.tasks), dict[str, Tensor]()
        if self.chooses:
            found[SELECTED] = torch.empty(self.k, dtype=torch.long, device="meta")
        if self.recompute > 1:
            for name, weight in weights.items():
                dtype = self.dtype or weight.dtype
                found[RESTORED + name] = torch.empty(rows, *weight.shape, dtype=dtype, device="meta")
            found[RESTORED] = torch.empty(rows, dtype=torch.bool, device="meta")
        return found

    def references(
        self, view: StepView, batch: Samples, gradients: Tensors, task_gradients: TaskGradients
    ) -> References:
        """Return the gradients of the tasks that this step is compared with."""
        if view.kind == "reuse":
            rows = with_prefix(view.scratch, RESTORED)
            return References({name: rows[name] for name in gradients}, view.scratch[RESTORED])
        if view.kind == "rank":
            references = task_gradients(view, batch, None)
            selected = view.map(self.most_dissimilar, gradients, references.gradients, references.present)
            view.keep({SELECTED: selected})
            references = view.map(_take, references, selected)
        else:
            references = task_gradients(view, batch, view.scratch[SELECTED] if self.chooses else None)
        if self.recompute > 1:
            view.keep({**add_prefix(RESTORED, references.gradients), RESTORED: references.present})
        return references

    def most_dissimilar(self, gradients: Tensors, references: Tensors, present: Tensor) -> Tensor:
        """Return the indices of the k references that differ most from a gradient, rising; absent ones come last."""
        scores = DISSIMILARITIES[self.ranking](gradients, references)
        return torch.where(present, scores, -torch.inf).topk(self.k).indices.sort().values


def _take(references: References, selected: Tensor) -> References:
    rows = {name: tensor.index_select(0, selected) for name, tensor in references.gradients.items()}
    return References(rows, references.present.index_select(0, selected))


def wasserstein_distances(gradients: Tensors, references: Tensors) -> Tensor:
    """Return the 1-D Wasserstein distance of a gradient to each reference, ``[references]``.

    Each gradient is taken as a sample of numbers. For samples of equal size the distance is the mean of
    |sort(a) − sort(b)|. References are sorted one by one, so that the memory in addition to them does not grow with
    their number.
    """
    gradient = torch.cat([tensor.flatten() for tensor in gradients.values()]).sort().values
    num_references = next(iter(references.values())).shape[0]
    distances = []
    for index in range(num_references):
        reference = torch.cat([references[name][index].flatten() for name in gradients]).sort().values
        distances.append((gradient - reference).abs().mean(dtype=torch.float64))
    return torch.stack(distances)


def angles(gradients: Tensors, references: Tensors) -> Tensor:
    """Return a number that grows with the angle of each reference to a gradient, ``[references]``: the negative cosine.

    It is −1 where one of them is zero. References are converted to float64 one by one.
    """
    gradient = to_chunks(as_row(gradients))
    norm = torch.linalg.vector_norm(gradient)
    num_references = next(iter(references.values())).shape[0]
    values = []
    for index in range(num_references):
        reference = to_chunks({name: references[name][index : index + 1] for name in gradients})
        lengths = norm * torch.linalg.vector_norm(reference)
        values.append(torch.where(lengths > 0, (gradient * reference).sum() / torch.where(lengths > 0, lengths, 1), 1))
    return -torch.stack(values)


DISSIMILARITIES: Mapping[Ranking, Callable[[Tensors, Tensors], Tensor]] = {
    "wasserstein": wasserstein_distances,
    "angle": angles,
}


@dataclass(frozen=True)
class IntegratedStep:
    """Follows the gradient of the batch, projected against those of the most dissimilar earlier tasks.

    What ``measure`` returns of the gradient, if anything, is added to the kept tensors.
    """

    restorer: Restorer
    task_gradients: TaskGradients
    margin: float = 0.0
    measure: Callable[[Tensors], Tensors] | None = None

    def kind(self, index: int) -> str:
        """Return what the step does: see :meth:`Restorer.kind`."""
        return self.restorer.kind(index)

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        gradients = view.grad(cross_entropy, batch)
        references = self.restorer.references(view, batch, gradients, self.task_gradients)
        if self.measure is not None:
            view.count(view.map(self.measure, gradients))
        integrated: Tensors
        integrated, counts = view.map(partial(project, margin=self.margin), gradients, references)
        view.count(counts)
        return integrated


@dataclass(frozen=True)
class RotatedStep:
    """Fine tuning after an aggregation: rotates the gradient before it to an acute angle with that after it.

    The weights that train are the aggregated ones, those before the aggregation are constants (``before.NAME``). With
    the gradients g_b and g_a of the same batch before and after it, g' = g_b − min(0, g_b·g_a) / ‖g_a‖² · g_a. With a
    restorer, g' is the gradient nearest to g_b that has no obtuse angle with g_a nor with any earlier task's.
    """

    restorer: Restorer | None = None
    task_gradients: TaskGradients | None = None
    margin: float = 0.0

    def kind(self, index: int) -> str | None:
        """Return what the step does: see :meth:`Restorer.kind`."""
        return None if self.restorer is None else self.restorer.kind(index)

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        after = view.grad(cross_entropy, batch)
        before = view.grad(cross_entropy, batch, at=with_prefix(view.constants, BEFORE))
        tasks: list[References] = []
        if self.restorer is not None and self.task_gradients is not None:
            tasks.append(self.restorer.references(view, batch, after, self.task_gradients))
        rotated: Tensors
        rotated, counts = view.map(partial(rotate, margin=self.margin), before, after, *tasks)
        view.count(counts)
        return rotated


def rotate(before: Tensors, after: Tensors, *tasks: References, margin: float = 0.0) -> tuple[Tensors, Tensors]:
    """Return the gradient before the aggregation, rotated to an acute angle with that after it, and the counts.

    It has no obtuse angle with the gradients of earlier tasks either. ``margin`` is GEM's γ for these; that of the
    gradient after the aggregation is 0.
    """
    device = next(iter(after.values())).device
    aggregated = References(as_row(after), torch.ones(1, dtype=torch.bool, device=device))
    is_task = torch.cat([*(torch.ones_like(group.present) for group in tasks), torch.zeros_like(aggregated.present)])
    return project(before, *tasks, aggregated, margin=margin * is_task)


def fine_tuning_counts(result: LocalResult) -> Numbers:
    """Return what was counted of the projections of a fine-tuning."""
    return {FINE_TUNING + name: count for name, count in projection_counts(result).items()}
