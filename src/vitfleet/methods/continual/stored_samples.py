"""The samples that a client stores of the tasks it has learned, and the base class of methods that store some.

FedViT's knowledge extractor (section 3.2) stores, of every class of a task, the fraction ρ of the samples that have the
lowest loss under the trained model. The client's last round of a task is not known in advance, so the samples are
selected anew after every round. What remains is the selection under the last model that was trained on the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.data.images import Shard
from vitfleet.data.subsets import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.message import Numbers, Tensors, label_dtype
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.personal.shared_body import HeadsParams, SharedBody, TrainedClient
from vitfleet.methods.reported import ClientMetric, RejectedUpdateError
from vitfleet.models.parts import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalResult, SampleSet

Params = TypeVar("Params", bound="StorageParams")
MEMORY = "memory"  # the set of stored samples whose parts a step takes
REPLAY = "replay"  # the set of stored samples that a step draws from
_PREFIX = "memory."

MAX_REPORTED = 2**31  # larger counts in a client's message are not plausible
MEMORY_METRICS = (
    ClientMetric("memory_bytes", "bytes of stored samples, largest client", "max", form="count"),
    ClientMetric("stored", "samples stored of each task", form="counts"),
)


class StorageParams(MethodParams):
    """Parameters of all methods that store samples of learned tasks."""

    stored_share: float = Field(
        0.1, gt=0, le=1, description="fraction ρ of a task's samples, of every class, that is stored"
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        le=2**50,
        description="most bytes stored per client; all tasks are cut to a common size; null: no limit",
    )


class MemoryParams(StorageParams, HeadsParams):
    """Parameters of methods that store samples and work with local and with shared heads."""


@dataclass(frozen=True)
class StoredSamples:
    """Stored samples of one task, in descending priority.

    Attributes
    ----------
    images, labels
        uint8 ``[samples, channels, height, width]`` and integers ``[samples]``.
    logits
        The model's outputs when the samples were stored, float32 ``[samples, classes]``; ``None``: not stored.
    """

    images: Tensor
    labels: Tensor
    logits: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        logits_bytes = 0 if self.logits is None else self.logits.shape[1] * self.logits.element_size()
        return self.images[:1].numel() + self.labels.element_size() + logits_bytes

    def first(self, count: int) -> StoredSamples:
        """Return the first ``count`` samples."""
        if count >= len(self):
            return self
        logits = None if self.logits is None else self.logits[:count].clone()
        return StoredSamples(self.images[:count].clone(), self.labels[:count].clone(), logits)


StoredTasks: TypeAlias = Mapping[int, StoredSamples]  # by task index


def select_samples(scores: Tensor, labels: Tensor, share: float) -> Tensor:
    """Return the positions of the samples to store: of every class the share with the lowest scores, at least one.

    They are ordered such that every prefix keeps the class proportions as well as possible: first the lowest score of
    each class, then evenly through the classes. A memory can therefore be reduced by cutting off its end.
    """
    scores, labels = scores.cpu(), labels.cpu()
    ranked: list[tuple[float, int, int]] = []
    for label in sorted(set(labels.tolist())):
        class_positions = torch.nonzero(labels == label).flatten()
        count = max(1, round_half_up(share * len(class_positions)))
        lowest = class_positions[scores[class_positions].argsort(stable=True)[:count]].tolist()
        ranked += [(rank / count, label, position) for rank, position in enumerate(lowest)]
    return torch.tensor([position for *_, position in sorted(ranked)], dtype=torch.long)


def store_task(
    stored: StoredTasks,
    task_index: int,
    shard: Shard,
    scores: Tensor,
    params: StorageParams,
    num_tasks: int,
    dtype: torch.dtype,
    logits: Tensor | None = None,
) -> StoredTasks:
    """Return the stored tasks with the samples of one task replaced, within ``params.memory_bytes``.

    Parameters
    ----------
    scores
        The ranking of the shard's samples: those with the lowest scores are stored.
    num_tasks
        Number of tasks for which the memory must suffice.
    dtype
        The type of stored labels.
    logits
        Logits of the shard's samples, to store with them; ``None``: none are stored.
    """
    if not len(shard):
        return stored
    positions = select_samples(scores, shard.labels, params.stored_share).to(shard.index.device)
    indices = shard.index[positions]
    samples = StoredSamples(
        shard.images.images[indices],
        shard.images.labels[indices].to(dtype),
        None if logits is None else logits[positions],
    )
    limit = params.memory_bytes
    if limit is not None and limit < num_tasks * samples.sample_bytes:
        raise ConfigError(
            "method.memory_bytes", limit, f"must be at least {num_tasks * samples.sample_bytes}: one image per task"
        )
    return limit_memory({**stored, task_index: samples}, limit)


def limit_memory(stored: StoredTasks, max_bytes: int | None) -> StoredTasks:
    """Return the stored tasks cut to a number of bytes: no task keeps more samples than a common limit.

    The samples with the highest scores are dropped first, and the class proportions are kept: see
    :func:`select_samples`.
    """
    limit = max((len(samples) for samples in stored.values()), default=0)
    while (
        max_bytes is not None and sum(min(limit, len(task)) * task.sample_bytes for task in stored.values()) > max_bytes
    ):
        limit -= 1
    return {task_index: samples.first(limit) for task_index, samples in stored.items()}


def memory_bytes(stored: StoredTasks) -> int:
    """Return the number of stored bytes."""
    return sum(len(samples) * samples.sample_bytes for samples in stored.values())


def read_memory(client_tensors: Tensors) -> StoredTasks:
    """Return the stored tasks in the tensors of a client's state."""
    task_indices = sorted(
        int(name.split(".")[1]) for name in client_tensors if name.startswith(_PREFIX) and name.endswith(".labels")
    )
    return {
        index: StoredSamples(client_tensors[images], client_tensors[labels], client_tensors.get(logits))
        for index in task_indices
        for images, labels, logits in [_tensor_names(index)]
    }


def memory_tensors(stored: StoredTasks) -> dict[str, Tensor]:
    """Return the stored tasks as tensors of a client's state."""
    return {
        name: tensor
        for task_index, samples in stored.items()
        for name, tensor in zip(
            _tensor_names(task_index), (samples.images, samples.labels, samples.logits), strict=True
        )
        if tensor is not None
    }


def _tensor_names(task_index: int) -> tuple[str, str, str]:
    prefix = f"{_PREFIX}{task_index:04d}"
    return f"{prefix}.images", f"{prefix}.labels", f"{prefix}.logits"


def drawn_before(stored: StoredTasks, task_index: int, draws: int) -> SampleSet | None:
    """Return the stored samples of the tasks before ``task_index`` as one set that steps draw from.

    ``None`` if there are none, or none are to be drawn.

    Parameters
    ----------
    draws
        How many of them are drawn per sample of the batch.
    """
    tasks = [stored[index] for index in sorted(stored) if index < task_index]
    if not tasks or not draws:
        return None
    images, labels = torch.cat([task.images for task in tasks]), torch.cat([task.labels for task in tasks]).long()
    logits = [task.logits for task in tasks if task.logits is not None]
    return SampleSet(
        images[None], labels[None], (len(labels),), draws, stored={"logits": torch.cat(logits)[None]} if logits else {}
    )


def parts_before(stored: StoredTasks, task_index: int, merge_tasks: bool = False) -> SampleSet | None:
    """Return the stored samples of the tasks before ``task_index`` in parts, the largest first; ``None`` without any.

    Parameters
    ----------
    merge_tasks
        All tasks form one part, instead of one part per task. A task that the client missed is a part without samples,
        so that all clients of a round have the same number of parts.
    """
    tasks = [stored.get(index) for index in range(task_index)]
    known = [task for task in tasks if task is not None]
    if not known:
        return None
    if merge_tasks:
        merged = torch.cat([task.images for task in known]), torch.cat([task.labels for task in known])
        return SampleSet.of_parts([merged])
    return SampleSet.of_parts([None if task is None else (task.images, task.labels) for task in tasks])


class MemoryMethod(SharedBody[Params]):
    """Shared body, local or shared heads; every client has an episodic memory."""

    needs_tasks = True
    client_metrics: ClassVar[tuple[ClientMetric, ...]] = MEMORY_METRICS
    #: Whether samples are stored with their logits under the model that the client has just trained.
    stores_logits: ClassVar[bool] = False

    def stored_tasks(self, job: ClientRoundInput) -> StoredTasks:
        """Return the samples that the client has stored so far."""
        return {} if job.client_state is None else read_memory(job.client_state.tensors)

    def random_scores(self, job: ClientRoundInput) -> Tensor:
        """Return a random score for each of the client's samples: the same in every round of a task.

        So the samples that are stored of a task stay the same.
        """
        rng = Address(self.context.seed, Purpose.MEMORY, client=job.client, epoch=job.task_index).generator()
        return torch.from_numpy(rng.random(len(job.shard)))

    def with_memory(
        self,
        job: ClientRoundInput,
        weights: Tensors,
        result: LocalResult,
        scores: Tensor,
        numbers: Numbers,
        sent: Selection | None = None,
    ) -> TrainedClient:
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
            self.stored_tasks(job),
            job.task_index,
            job.shard,
            scores,
            self.params,
            self.context.num_tasks,
            label_dtype(self.context.num_classes),
            logits,
        )
        numbers = {**numbers, **memory_numbers(stored)}
        return TrainedClient({**weights, **result.weights}, result, numbers, memory_tensors(stored), sent)

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
        sample = self._empty_samples(1, channels, image_size)
        limit = self.params.memory_bytes
        most = MAX_REPORTED if limit is None else limit // sample.sample_bytes
        counts = [min(count, most) for count in reported_counts(reported)[: self.context.num_tasks]]
        return memory_tensors(
            {index: self._empty_samples(count, channels, image_size) for index, count in enumerate(counts) if count}
        )

    def _empty_samples(self, count: int, channels: int, image_size: int) -> StoredSamples:
        """Return samples with shapes only."""
        images = torch.empty(count, channels, image_size, image_size, dtype=torch.uint8, device="meta")
        labels = torch.empty(count, dtype=label_dtype(self.context.num_classes), device="meta")
        num_classes = self.context.num_classes
        return StoredSamples(
            images, labels, torch.empty(count, num_classes, device="meta") if self.stores_logits else None
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
