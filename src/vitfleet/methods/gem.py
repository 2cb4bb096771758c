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

from vitfleet.config.methods import AGemConfig, GemConfig, MemoryTable
from vitfleet.message import Numbers, Tensors
from vitfleet.methods import knowledge
from vitfleet.methods.base import Job
from vitfleet.methods.body import Learned, Learning, SharedBody
from vitfleet.randomness import Address, Purpose
from vitfleet.train.objective import Fit, Objective
from vitfleet.train.surgery import Integrator

Params = TypeVar("Params", bound=MemoryTable)


class Episodic(SharedBody[Params]):
    """What the two have in common."""

    #: Whether all memories give one reference gradient.
    together: ClassVar[bool]

    def integrator(self) -> Integrator:
        """Return what projects a step's gradient."""
        return Integrator(self.params.check)

    def learn(self, job: Job, weights: Tensors) -> Learning:
        """Train everything at once, each step projected; store some of the samples."""
        known = knowledge.read({} if job.own is None else job.own.tensors)
        memory = knowledge.recall(known, job.stage, self.together)
        objective = Objective(self.trains, transform=self.integrator() if memory else None)
        fitted = yield Fit(weights, objective, self.setting.train.epochs, memory=memory)
        # The same draw in every round of a task: what is stored of it stays.
        rng = Address(self.setting.seed, Purpose.MEMORY, client=job.client, epoch=job.stage).generator()
        scores = torch.from_numpy(rng.random(len(job.shard)))
        known = knowledge.store(known, job.stage, job.shard, scores, self.params, self.setting.stages)
        numbers = {**knowledge.counted(fitted), **knowledge.told(known)}
        return Learned({**weights, **fitted.weights}, fitted, numbers, knowledge.write(known))

    def kept(self, said: Numbers, channels: int, side: int) -> Tensors:
        """Return the shapes of the stored samples."""
        return knowledge.imagine(said, channels, side, self.params, self.setting.stages)


class Gem(Episodic[GemConfig]):
    """One constraint a stored task."""

    name = "gem"
    together = False

    def integrator(self) -> Integrator:
        """Return the projection with GEM's margin."""
        return Integrator(self.params.check, self.params.margin)


class AGem(Episodic[AGemConfig]):
    """One constraint for all stored tasks together."""

    name = "a-gem"
    together = True
