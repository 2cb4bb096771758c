"""GEM and A-GEM: no step goes against what is stored of earlier tasks.

GEM: Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning", 2017. One reference gradient a stored
task; if the step's gradient goes against any of them, it is projected (equation 11). A-GEM: Chaudhry et al.,
"Efficient Lifelong Learning with A-GEM", 2019. One reference gradient over all memories (equation 11 there). Both
train body and head together, as in their papers, and store samples at random. Here the body is shared and heads are
local.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods import episodic_memory
from vitfleet.methods.base import ClientJob
from vitfleet.methods.episodic_memory import MemoryParams
from vitfleet.methods.memory_method import MemoryMethod
from vitfleet.methods.projection_metrics import projection_counts
from vitfleet.methods.shared_body import LocalGenerator, LocalResult
from vitfleet.randomness import Address, Purpose
from vitfleet.training.objective import Fit, Objective
from vitfleet.training.surgery import GradientIntegrator

Params = TypeVar("Params", bound=MemoryParams)


class ProjectedTraining(MemoryMethod[Params]):
    """What the two have in common."""

    #: Whether all memories give one reference gradient.
    together: ClassVar[bool]

    def integrator(self) -> GradientIntegrator:
        """Return what projects a step's gradient."""
        return GradientIntegrator(self.params.check)

    def learn(self, job: ClientJob, weights: Tensors) -> LocalGenerator:
        """Train everything at once, each step projected; store some of the samples."""
        known = episodic_memory.read({} if job.client_state is None else job.client_state.tensors)
        memory = episodic_memory.recall(known, job.task_index, self.together)
        objective = Objective(self.trainable, transform=self.integrator() if memory else None)
        fitted = yield Fit(weights, objective, self.context.train.epochs, memory=memory)
        # The same draw in every round of a task: what is stored of it stays.
        rng = Address(self.context.seed, Purpose.MEMORY, client=job.client, epoch=job.task_index).generator()
        scores = torch.from_numpy(rng.random(len(job.shard)))
        known = episodic_memory.store(known, job.task_index, job.shard, scores, self.params, self.context.num_tasks)
        numbers = {**projection_counts(fitted), **episodic_memory.told(known)}
        return LocalResult({**weights, **fitted.weights}, fitted, numbers, episodic_memory.write(known))


class GemParams(MemoryParams):
    """Gradient episodic memory: no step against the gradient of a stored task (GEM)."""

    margin: float = Field(0.0, ge=0, description="least weight of each stored task once one is violated (GEM: 0.5)")


@register_method("gem", GemParams)
class Gem(ProjectedTraining[GemParams]):
    """One constraint a stored task."""

    together = False

    def integrator(self) -> GradientIntegrator:
        """Return the projection with GEM's margin."""
        return GradientIntegrator(self.params.check, self.params.margin)


class AGemParams(MemoryParams):
    """No step against the gradient of all stored tasks together (A-GEM)."""


@register_method("a-gem", AGemParams)
class AGem(ProjectedTraining[AGemParams]):
    """One constraint for all stored tasks together."""

    together = True
