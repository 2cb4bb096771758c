"""Base class of methods that replay stored samples of earlier tasks in every step: ER, DER++ and BCN.

Body and head are trained together. At the end of every round the client stores a random fraction ρ of each class of its
current task, the same samples in every round of the task. The papers fill their memory by reservoir sampling, because
their stream does not tell where a task ends; here it does, and every task keeps its share. A step draws from the
samples of earlier tasks only, uniformly and with replacement; they are augmented and masked as the batch is.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from pydantic import Field

from vitfleet.message import Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.episodic_memory import MemoryParams, replay_buffer
from vitfleet.methods.memory_method import MemoryMethod
from vitfleet.methods.shared_body import LocalTraining
from vitfleet.training.objective import Fit, Loss, Objective


class ReplayParams(MemoryParams):
    """Parameters of all methods that replay stored samples."""

    replays: int = Field(
        1, ge=1, le=1000, description="stored samples drawn per sample of the batch, for each replay term"
    )


Params = TypeVar("Params", bound=ReplayParams)


class ReplayMethod(MemoryMethod[Params]):
    """Shared body; the loss of a step has terms of replayed samples."""

    @property
    def replays(self) -> int:
        """How many stored samples a step replays per sample of its batch."""
        return self.params.replays

    @abstractmethod
    def loss(self) -> Loss:
        """Return the loss of a step; before the client's second task there are no replayed samples."""

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Train body and head with replayed samples; store random samples of the task."""
        buffer = replay_buffer(self.stored_tasks(job), job.task_index, self.replays)
        result = yield Fit(
            weights,
            Objective(self.trainable, self.loss()),
            self.context.train.epochs,
            replay=buffer,
            score_samples=self.stores_logits,
        )
        return self.with_memory(job, weights, result, self.random_scores(job), {})
