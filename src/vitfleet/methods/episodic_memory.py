"""The samples that a client stores of the tasks it has learned, and their use: as reference gradients or to replay.

FedViT's knowledge extractor (section 3.2) stores, of every class of a task, the fraction ρ of the samples that have the
lowest loss under the trained model. The client's last round of a task is not known in advance, so the samples are
selected anew after every round. What remains is the selection under the last model that was trained on the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.data.images import Shard
from vitfleet.data.subsets import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.message import Tensors
from vitfleet.methods.shared_body import HeadsParams
from vitfleet.training.memories import EpisodicMemory, ReplayBuffer
from vitfleet.training.objective import Objective

_PREFIX = "memory."


class StorageParams(MethodParams):
    """Parameters of all methods that store samples of learned tasks."""

    rho: float = Field(0.1, gt=0, le=1, description="fraction ρ of a task's samples, of every class, that is stored")
    memory_bytes: int | None = Field(
        None,
        ge=1,
        le=2**50,
        description="most bytes stored per client; all tasks are cut to a common size; null: no limit",
    )


class MemoryParams(StorageParams, HeadsParams):
    """Parameters of methods that store samples and work with local and with shared heads."""


class ReferenceParams(HeadsParams):
    """Parameters of all methods that compare the gradient with those of stored tasks."""

    restore_every: int = Field(
        1,
        ge=1,
        description="steps after which gradients of stored tasks are computed again; between, they are reused",
    )
    reference_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="data type in which gradients of stored tasks are held; inner products are in float64"
    )
    check: bool = Field(False, description="verify at every step that the angle to no stored task is obtuse")


class ReferenceGradientParams(ReferenceParams, MemoryParams):
    """Parameters of all methods that compare the gradient with those of stored samples."""


def with_reference_settings(objective: Objective, params: ReferenceParams) -> Objective:
    """Return an objective with the configured period and data type of the reference gradients."""
    dtype = torch.bfloat16 if params.reference_dtype == "bf16" else None
    return replace(objective, restore_every=params.restore_every, reference_dtype=dtype)


@dataclass(frozen=True)
class StoredSamples:
    """Stored samples of one task, in descending priority.

    Attributes
    ----------
    images, labels
        uint8 ``[samples, channels, image_size, image_size]`` and int16 ``[samples]``.
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


def select_samples(scores: Tensor, labels: Tensor, rho: float) -> Tensor:
    """Return the positions of the samples to store: of every class the fraction ρ with the lowest scores, at least one.

    They are ordered such that every prefix keeps the class proportions as well as possible: first the lowest score of
    each class, then evenly through the classes. A memory can therefore be reduced by cutting off its end.
    """
    scores, labels = scores.cpu(), labels.cpu()
    ranked: list[tuple[float, int, int]] = []
    for label in sorted(set(labels.tolist())):
        class_positions = torch.nonzero(labels == label).flatten()
        count = max(1, round_half_up(rho * len(class_positions)))
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
    logits: Tensor | None = None,
) -> StoredTasks:
    """Return the stored tasks with the samples of one task replaced, within ``params.memory_bytes``.

    Parameters
    ----------
    scores
        The ranking of the shard's samples: those with the lowest scores are stored.
    num_tasks
        Number of tasks for which the memory must suffice.
    logits
        Logits of the shard's samples, to store with them; ``None``: none are stored.
    """
    if not len(shard):
        return stored
    positions = select_samples(scores, shard.labels, params.rho).to(shard.index.device)
    indices = shard.index[positions]
    samples = StoredSamples(
        shard.images.images[indices],
        shard.images.labels[indices].to(torch.int16),
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


def replay_buffer(stored: StoredTasks, task_index: int, replays: int) -> ReplayBuffer | None:
    """Return the stored samples of the tasks before ``task_index`` as the replay buffer of a training.

    ``None`` if there are none, or none are to be replayed.

    Parameters
    ----------
    replays
        How many of them are replayed per sample of the batch.
    """
    tasks = [stored[index] for index in sorted(stored) if index < task_index]
    if not tasks or not replays:
        return None
    logits = [samples.logits for samples in tasks if samples.logits is not None]
    return ReplayBuffer(
        torch.cat([samples.images for samples in tasks]),
        torch.cat([samples.labels for samples in tasks]).long(),
        replays,
        {"logits": torch.cat(logits)} if logits else {},
    )


def replay_memory(stored: StoredTasks, task_index: int, merge_tasks: bool = False) -> EpisodicMemory | None:
    """Return the stored samples of the tasks before ``task_index`` as the memory of a training.

    ``None`` if there are none. The largest part comes first.

    Parameters
    ----------
    merge_tasks
        All tasks form one part, instead of one part per task. A task that the client missed is a part without samples,
        so that all clients of a round have the same number of parts.
    """
    parts = [stored.get(index) for index in range(task_index)]
    non_empty = [part for part in parts if part is not None]
    if not non_empty:
        return None
    if merge_tasks:
        images, labels = torch.cat([part.images for part in non_empty]), torch.cat([part.labels for part in non_empty])
        parts = [StoredSamples(images, labels)]
    parts.sort(key=lambda part: 0 if part is None else -len(part))
    sizes = tuple(0 if part is None else len(part) for part in parts)
    images = non_empty[0].images.new_zeros(len(parts), sizes[0], *non_empty[0].images.shape[1:])
    labels = non_empty[0].labels.new_zeros(len(parts), sizes[0], dtype=torch.long)
    sample_weight = torch.zeros(len(parts), sizes[0], device=labels.device)
    for row, part in enumerate(parts):
        if part is not None:
            images[row, : len(part)] = part.images
            labels[row, : len(part)] = part.labels.long()
            sample_weight[row, : len(part)] = 1 / len(part)
    return EpisodicMemory(images, labels, sample_weight, sizes)
