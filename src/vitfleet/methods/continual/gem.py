"""GEM and A-GEM: no step goes against the gradients of the stored samples of earlier tasks.

GEM: Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning", 2017. Each stored task gives one
reference gradient g_k. A gradient g with ⟨g, g_k⟩ < 0 for any k is projected (equation 11). A-GEM: Chaudhry et al.,
"Efficient Lifelong Learning with A-GEM", 2019. All stored samples give one reference gradient g_ref (equation 11
there). Both train body and head together and store random samples, as in their papers. Here the body is shared; the
heads are local or shared (``method.heads``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from pydantic import Field
from torch import Tensor

from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.continual.projection import (
    References,
    project,
    projection_counts,
    projection_metrics,
    zero_counts,
)
from vitfleet.methods.continual.stored_samples import MEMORY, MemoryMethod, MemoryParams, parts_before
from vitfleet.methods.personal.shared_body import ClientTraining
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView

Params = TypeVar("Params", bound=MemoryParams)


@dataclass(frozen=True)
class ProjectedStep:
    """Follows the gradient of the batch, projected against the gradient of each part of the memory.

    Attributes
    ----------
    margin
        GEM's γ: the least multiplier of each part once one is violated.
    """

    margin: float = 0.0

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        gradients = view.grad(cross_entropy, batch)
        parts = view.parts(MEMORY)
        references = view.part_grads(cross_entropy, parts)
        projected: Tensors
        projected, counts = view.map(self.project, gradients, references, parts.present)
        view.count(counts)
        return projected

    def project(self, gradients: Tensors, references: Tensors, present: Tensor) -> tuple[Tensors, Tensors]:
        """Return the projected gradient, and the counts of the step."""
        return project(gradients, References(references, present), self.margin)


class GradientEpisodicMemory(MemoryMethod[Params]):
    """The local training of GEM and A-GEM."""

    client_metrics = (*projection_metrics(), *MemoryMethod.client_metrics)

    #: Whether all stored tasks give one reference gradient, instead of one each.
    merges_tasks: ClassVar[bool]

    @property
    def projected_step(self) -> ProjectedStep:
        """The step of a client that has stored samples of earlier tasks."""
        return ProjectedStep()

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train body and head with projected gradients; store random samples of the task."""
        training = LocalTraining(weights, self.trainable, self.context.train.epochs)
        memory = parts_before(self.stored_tasks(job), job.task_index, self.merges_tasks)
        if memory is not None:
            counts = zero_counts(self.context.device)
            training = replace(training, step=self.projected_step, sets={MEMORY: memory}, kept=counts)
        result = yield training
        return self.with_memory(job, weights, result, self.random_scores(job), projection_counts(result))


class GemParams(MemoryParams):
    """Gradient episodic memory: no step against the gradient of a stored task (GEM)."""

    margin: float = Field(0.0, ge=0, description="least multiplier of each stored task once one is violated (GEM: 0.5)")


@register_method("gem", GemParams, title="GEM")
class Gem(GradientEpisodicMemory[GemParams]):
    """One constraint per stored task."""

    merges_tasks = False

    @property
    def projected_step(self) -> ProjectedStep:
        """The step, with GEM's margin γ."""
        return ProjectedStep(self.params.margin)


class AGemParams(MemoryParams):
    """No step against the gradient of all stored tasks together (A-GEM)."""


@register_method("a-gem", AGemParams, title="A-GEM")
class AGem(GradientEpisodicMemory[AGemParams]):
    """One constraint for all stored tasks together."""

    merges_tasks = True
