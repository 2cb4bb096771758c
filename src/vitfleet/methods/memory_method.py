"""Base class of methods whose clients store samples of the tasks they have learned: GEM, FedViT, replay and others."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from vitfleet.message import Numbers, Tensors
from vitfleet.methods.base import ClientJob, RejectedUpdateError
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.episodic_memory import (
    StorageParams,
    StoredSamples,
    StoredTasks,
    memory_bytes,
    memory_tensors,
    read_memory,
    store_task,
)
from vitfleet.methods.shared_body import LocalTrainingResult, SharedBody
from vitfleet.models.parts import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.objective import FitResult

Params = TypeVar("Params", bound=StorageParams)

MAX_REPORTED = 2**31  # larger counts in a client's message are not plausible
MEMORY_METRICS = (
    ClientMetric("memory_bytes", "bytes of stored samples, largest client", "max", form="count"),
    ClientMetric("stored", "samples stored of each task", form="counts"),
)


class MemoryMethod(SharedBody[Params]):
    """Shared body, local or shared heads; every client has an episodic memory."""

    needs_tasks = True
    client_metrics: ClassVar[tuple[ClientMetric, ...]] = MEMORY_METRICS
    #: Whether samples are stored with their logits under the model that the client has just trained.
    stores_logits: ClassVar[bool] = False

    def stored_tasks(self, job: ClientJob) -> StoredTasks:
        """Return the samples that the client has stored so far."""
        return {} if job.client_state is None else read_memory(job.client_state.tensors)

    def random_scores(self, job: ClientJob) -> Tensor:
        """Return a random score for each of the client's samples: the same in every round of a task.

        So the samples that are stored of a task stay the same.
        """
        rng = Address(self.context.seed, Purpose.MEMORY, client=job.client, epoch=job.task_index).generator()
        return torch.from_numpy(rng.random(len(job.shard)))

    def with_memory(
        self,
        job: ClientJob,
        weights: Tensors,
        result: FitResult,
        scores: Tensor,
        numbers: Numbers,
        sent: Selection | None = None,
    ) -> LocalTrainingResult:
        """Store the current task's samples with the lowest scores; return the local training's result with the memory.

        Parameters
        ----------
        scores
            One per sample of the client's shard.
        numbers
            Further numbers to report.
        sent
            The weights of the body that the client sends; ``None``: all of them.
        """
        logits = result.sample_logits if self.stores_logits else None
        stored = store_task(
            self.stored_tasks(job), job.task_index, job.shard, scores, self.params, self.context.num_tasks, logits
        )
        numbers = {**numbers, **memory_numbers(stored)}
        return LocalTrainingResult({**weights, **result.weights}, result, numbers, memory_tensors(stored), sent)

    def check_reported(self, numbers: Numbers) -> None:
        """Reject stored samples of more tasks than there are, or more of them than can be."""
        super().check_reported(numbers)
        counts, num_tasks = reported_counts(numbers), self.context.num_tasks
        if len(counts) > num_tasks or any(count >= MAX_REPORTED for count in counts):
            raise RejectedUpdateError(
                f"its 'stored' has {len(counts)} tasks, the most samples are {max(counts, default=0)}; expected: at "
                f"most {num_tasks} tasks and fewer than {MAX_REPORTED} samples of each"
            )

    def client_state_shapes(self, reported: Numbers, channels: int, image_size: int) -> Tensors:
        """Return the shapes of the stored samples; implausible counts are reduced to the limit."""
        num_logits = self.context.num_classes if self.stores_logits else None
        sample = _empty_samples(1, channels, image_size, num_logits)
        limit = self.params.memory_bytes
        most = MAX_REPORTED if limit is None else limit // sample.sample_bytes
        counts = [min(count, most) for count in reported_counts(reported)[: self.context.num_tasks]]
        return memory_tensors(
            {
                index: _empty_samples(count, channels, image_size, num_logits)
                for index, count in enumerate(counts)
                if count
            }
        )

    def num_stored_samples(self, reported: Numbers) -> int:
        """Return how many samples a client has stored, over all tasks."""
        return sum(reported_counts(reported))


def memory_numbers(stored: StoredTasks) -> Numbers:
    """Return the numbers that a client reports of its memory: its bytes, and the samples of each task so far."""
    counts = [len(stored[index]) if index in stored else 0 for index in range(max(stored, default=-1) + 1)]
    return {"memory_bytes": memory_bytes(stored), "stored": counts}


def reported_counts(reported: Numbers) -> list[int]:
    """Return the samples that a client has stored of each task, as it reported them; an invalid count is 0."""
    stored = reported.get("stored")
    counts = stored if isinstance(stored, list) else []
    return [min(count, MAX_REPORTED) if isinstance(count, int) and count > 0 else 0 for count in counts]


def _empty_samples(count: int, channels: int, image_size: int, num_logits: int | None) -> StoredSamples:
    """Return samples with shapes only."""
    images = torch.empty(count, channels, image_size, image_size, dtype=torch.uint8, device="meta")
    logits = None if num_logits is None else torch.empty(count, num_logits, device="meta")
    return StoredSamples(images, torch.empty(count, dtype=torch.int16, device="meta"), logits)
