"""GEM and A-GEM: no step goes against the gradients of the stored samples of earlier tasks.

GEM: Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning", 2017. Each stored task gives one
reference gradient g_k. A gradient g with ⟨g, g_k⟩ < 0 for any k is projected (equation 11). A-GEM: Chaudhry et al.,
"Efficient Lifelong Learning with A-GEM", 2019. All stored samples give one reference gradient g_ref (equation 11
there). Both train body and head together and store random samples, as in their papers. Here the body is shared; the
heads are local or shared (``method.heads``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, TypeVar

from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.episodic_memory import ReferenceGradientParams, replay_memory, with_reference_settings
from vitfleet.methods.memory_method import MemoryMethod
from vitfleet.methods.projection_metrics import projection_counts, projection_metrics
from vitfleet.methods.shared_body import LocalTraining
from vitfleet.training.objective import Fit, Objective
from vitfleet.training.surgery import GradientIntegrator

Params = TypeVar("Params", bound=ReferenceGradientParams)


class GradientEpisodicMemory(MemoryMethod[Params]):
    """The local training of GEM and A-GEM."""

    client_metrics = (*projection_metrics(), *MemoryMethod.client_metrics)

    #: Whether all stored tasks give one reference gradient, instead of one each.
    merges_tasks: ClassVar[bool]

    def projection(self) -> GradientIntegrator:
        """Return the transform that projects the gradient of each step."""
        return GradientIntegrator(self.params.check)

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Train body and head with projected gradients; store random samples of the task."""
        memory = replay_memory(self.stored_tasks(job), job.task_index, self.merges_tasks)
        objective = Objective(self.trainable)
        if memory:
            objective = with_reference_settings(replace(objective, transform=self.projection()), self.params)
        result = yield Fit(weights, objective, self.context.train.epochs, memory=memory)
        return self.with_memory(job, weights, result, self.random_scores(job), projection_counts(result))


class GemParams(ReferenceGradientParams):
    """Gradient episodic memory: no step against the gradient of a stored task (GEM)."""

    margin: float = Field(0.0, ge=0, description="least multiplier of each stored task once one is violated (GEM: 0.5)")


@register_method("gem", GemParams, title="GEM")
class Gem(GradientEpisodicMemory[GemParams]):
    """One constraint per stored task."""

    merges_tasks = False

    def projection(self) -> GradientIntegrator:
        """Return the projection with GEM's margin γ."""
        return GradientIntegrator(self.params.check, self.params.margin)


class AGemParams(ReferenceGradientParams):
    """No step against the gradient of all stored tasks together (A-GEM)."""


@register_method("a-gem", AGemParams, title="A-GEM")
class AGem(GradientEpisodicMemory[AGemParams]):
    """One constraint for all stored tasks together."""

    merges_tasks = True
