"""The samples that a client stores of the tasks it has learned, and the base class of methods that store some.

FedViT's knowledge extractor (section 3.2) stores, of every class of a task, the fraction ρ of the samples that have the
lowest loss under the trained model. The client's last round of a task is not known in advance, so the samples are
selected anew after every round. What remains is the selection under the last model that was trained on the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.schema import Config
from vitfleet.data.images import Shard
from vitfleet.data.subsets import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.message import Numbers, State, Tensors, label_dtype
from vitfleet.methods.base import ClientRoundInput, StateAfterTasks, Work
from vitfleet.methods.personal.shared_body import HeadsParams, SharedBody, TrainedClient
from vitfleet.methods.reported import MAX_TASK_COUNT, ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalResult, SampleSet

Params = TypeVar("Params", bound="StorageParams")
MEMORY = "memory"  # the set of stored samples whose parts a step takes
REPLAY = "replay"  # the set of stored samples that a step draws from
_PREFIX = "memory."

MEMORY_METRICS = (
    ClientMetric("memory_bytes", "bytes of stored samples, largest client", "max", form="count"),
    ClientMetric("stored", "samples stored of each task", form="task counts"),
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

    @property
    def draws(self) -> int:
        """How many stored samples a step draws per sample of its batch."""
        return 0


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

    @classmethod
    def declared_work(cls, params: Params, config: Config) -> Work:
        """Return the work with drawn and stored samples."""
        work = super().declared_work(params, config)
        images = (1 + params.draws) * work.images_per_step
        return replace(work, images_per_step=images, stored_share=params.stored_share)

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

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return the state with as many samples of each task as the client reports; no more than it can have."""
        stored, limit = reported.get("stored"), self.params.memory_bytes
        counts = enumerate(stored[: self.context.num_tasks] if isinstance(stored, list) else [])
        learned = {task_index: count for task_index, count in counts if isinstance(count, int) and count > 0}
        state = after_tasks(tuple(learned))
        assert state is not None
        tensors = dict(state.tensors)
        for task_index, sample in read_memory(state.tensors).items():
            most = MAX_TASK_COUNT if limit is None else limit // sample.sample_bytes
            tensors |= {
                name: tensor.new_empty(min(learned[task_index], most), *tensor.shape[1:])
                for name, tensor in memory_tensors({task_index: sample}).items()
            }
        return replace(state, tensors=tensors)


def memory_numbers(stored: StoredTasks) -> Numbers:
    """Return the numbers that a client reports of its memory: its bytes, and the samples of each task so far."""
    counts = [len(stored[index]) if index in stored else 0 for index in range(max(stored, default=-1) + 1)]
    return {"memory_bytes": memory_bytes(stored), "stored": counts}
