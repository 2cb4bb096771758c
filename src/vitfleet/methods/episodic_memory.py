"""The samples that a client stores of the tasks it has learned, and their use as reference gradients.

FedViT's knowledge extractor (section 3.2) stores, of every class of a task, the fraction ρ of the samples that have the
lowest loss under the trained model. The client's last round of a task is not known in advance, so the samples are
selected anew after every round. What remains is the selection under the last model that was trained on the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.data.images import Shard
from vitfleet.data.rounding import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.message import Tensors
from vitfleet.methods.shared_body import HeadsParams
from vitfleet.training.objective import EpisodicMemory

_PREFIX = "memory."


class MemoryParams(HeadsParams):
    """Parameters of all methods that store samples of learned tasks."""

    rho: float = Field(0.1, gt=0, le=1, description="fraction ρ of a task's samples, of every class, that is stored")
    memory_bytes: int | None = Field(
        None, ge=1, description="most bytes stored per client; all tasks are cut to a common size; null: no limit"
    )
    restore_every: int = Field(
        1,
        ge=1,
        description="steps after which gradients of stored samples are computed again; between, they are reused",
    )
    reference_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="data type in which gradients of stored samples are held; inner products are in float64"
    )
    check: bool = Field(False, description="verify at every step that the angle to no stored task is obtuse")


@dataclass(frozen=True)
class StoredSamples:
    """Stored samples of one task, in descending priority.

    Attributes
    ----------
    images, labels
        uint8 ``[samples, channels, side, side]`` and int16 ``[samples]``.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return self.images[:1].numel() + self.labels.element_size()

    def first(self, count: int) -> StoredSamples:
        """Return the first ``count`` samples."""
        return StoredSamples(self.images[:count].clone(), self.labels[:count].clone()) if count < len(self) else self


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
    stored: StoredTasks, task_index: int, shard: Shard, scores: Tensor, params: MemoryParams, num_tasks: int
) -> StoredTasks:
    """Return the stored tasks with the samples of one task replaced, within ``params.memory_bytes``.

    Parameters
    ----------
    scores
        The ranking of the shard's samples: those with the lowest scores are stored.
    num_tasks
        Number of tasks for which the memory must suffice.
    """
    if not len(shard):
        return stored
    indices = shard.index[select_samples(scores, shard.labels, params.rho).to(shard.index.device)]
    samples = StoredSamples(shard.images.images[indices], shard.images.labels[indices].to(torch.int16))
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
    return {index: StoredSamples(*(client_tensors[name] for name in _tensor_names(index))) for index in task_indices}


def memory_tensors(stored: StoredTasks) -> dict[str, Tensor]:
    """Return the stored tasks as tensors of a client's state."""
    return {
        name: tensor
        for task_index, samples in stored.items()
        for name, tensor in zip(_tensor_names(task_index), (samples.images, samples.labels), strict=True)
    }


def _tensor_names(task_index: int) -> tuple[str, str]:
    return f"{_PREFIX}{task_index:04d}.images", f"{_PREFIX}{task_index:04d}.labels"


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
