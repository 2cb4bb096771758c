"""The samples that a client stores of the tasks it has learned, and the base class of methods that store some.

Of every class of a task a fraction ρ of the samples is stored: random ones (GEM), or those with the lowest loss under
the trained model (FedViT's knowledge extractor, section 3.2). A client's last round of a task is not known in advance,
so the samples are selected anew after every round. What remains is from the last round in which it trained on the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.schema import Config
from vitfleet.data.subsets import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.message import Numbers, State, Tensors, add_numbers, label_dtype, with_numbers
from vitfleet.methods.base import ClientRoundInput, StateAfterTasks, Work
from vitfleet.methods.personal.shared_body import SharedBody, TrainedClient
from vitfleet.methods.reported import MAX_TASK_COUNT, ClientMetric
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalResult, SampleSet

Params = TypeVar("Params", bound="StorageParams")
MEMORY = "memory"  # the set of stored samples whose parts a step takes, and their prefix in a client's state


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


@dataclass(frozen=True)
class StoredSamples:
    """Stored samples of one task, in descending priority.

    Methods that compare a model with an earlier one store its logits too, ``[samples, classes]``.
    """

    images: Tensor
    labels: Tensor
    logits: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        logits = {} if self.logits is None else {"logits": self.logits}
        return {"images": self.images, "labels": self.labels, **logits}

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return sum(tensor[:1].nbytes for tensor in self.tensors().values())


StoredTasks: TypeAlias = Mapping[int, StoredSamples]  # by task index


def memory_tensors(stored: StoredTasks) -> dict[str, Tensor]:
    """Return the stored tasks as tensors of a client's state."""
    return add_numbers(f"{MEMORY}.", {task_index: samples.tensors() for task_index, samples in stored.items()})


def read_memory(client_tensors: Tensors) -> StoredTasks:
    """Return the stored tasks in the tensors of a client's state, in the order of the tasks."""
    return {index: StoredSamples(**samples) for index, samples in with_numbers(client_tensors, f"{MEMORY}.").items()}


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


def limit_memory(stored: StoredTasks, max_bytes: int | None) -> StoredTasks:
    """Return the stored tasks cut to a number of bytes: no task keeps more samples than a common limit."""
    limit = longest = max((len(task) for task in stored.values()), default=0)
    while max_bytes and sum(min(limit, len(task)) * task.sample_bytes for task in stored.values()) > max_bytes:
        limit -= 1
    if limit == longest:
        return stored
    return {
        task_index: StoredSamples(**{name: tensor[:limit].clone() for name, tensor in task.tensors().items()})
        for task_index, task in stored.items()
    }


def merge_tasks(tasks: Sequence[StoredSamples]) -> StoredSamples:
    """Return the samples of several tasks as one."""
    columns = [task.tensors() for task in tasks]
    return StoredSamples(**{name: torch.cat([column[name] for column in columns]) for name in columns[0]})


def parts_before(stored: StoredTasks, task_index: int, merged: bool = False) -> SampleSet | None:
    """Return the stored samples of the tasks before ``task_index``, a part per task, or all ``merged`` in one part.

    ``None``: there are none. A task that the client missed is a part without samples, so that all clients of a round
    have the same number of parts.
    """
    tasks = [stored.get(index) for index in range(task_index)]
    known = [task for task in tasks if task is not None]
    if not known:
        return None
    parts = [merge_tasks(known)] if merged else tasks
    return SampleSet.of_parts([None if part is None else (part.images, part.labels) for part in parts])


class MemoryMethod(SharedBody[Params]):
    """Shared body, local or shared heads; every client has an episodic memory."""

    needs_tasks = True
    client_metrics: ClassVar[tuple[ClientMetric, ...]] = (
        ClientMetric("memory_bytes", "bytes of stored samples, largest client", "max", form="count"),
        ClientMetric("stored", "samples stored of each task", form="task counts"),
    )
    #: Whether samples are stored with their logits under the model that the client has just trained.
    stores_logits: ClassVar[bool] = False

    @classmethod
    def declared_work(cls, params: Params, config: Config) -> Work:
        """Return the work with stored samples."""
        return replace(super().declared_work(params, config), stored_share=params.stored_share)

    def stored_tasks(self, job: ClientRoundInput) -> StoredTasks:
        """Return the samples that the client has stored so far."""
        return {} if job.client_state is None else read_memory(job.client_state.tensors)

    def random_scores(self, job: ClientRoundInput) -> Tensor:
        """Return a random score for each of the client's samples: the same in every round of a task."""
        address = Address(self.context.seed, Purpose.MEMORY, client=job.client, epoch=job.task_index)
        return torch.from_numpy(address.generator().random(len(job.shard)))

    def with_memory(
        self, job: ClientRoundInput, weights: Tensors, result: LocalResult, scores: Tensor, numbers: Numbers
    ) -> TrainedClient:
        """Return the result of a client's local training, with the samples of its task stored that score lowest.

        There is one score per sample of the shard. The numbers are reported besides those of the memory.
        """
        params, shard, stored = self.params, job.shard, self.stored_tasks(job)
        if len(shard):
            positions = select_samples(scores, shard.labels, params.stored_share).to(shard.index.device)
            labels = shard.labels[positions].to(label_dtype(self.context.num_classes))
            logits = result.sample_logits[positions] if self.stores_logits else None
            samples = StoredSamples(shard.images.images[shard.index[positions]], labels, logits)
            limit, least = params.memory_bytes, self.context.num_tasks * samples.sample_bytes
            if limit is not None and limit < least:
                raise ConfigError("method.memory_bytes", limit, f"must be at least {least}: one image per task")
            stored = limit_memory({**stored, job.task_index: samples}, limit)
        counts = [len(stored[index]) if index in stored else 0 for index in range(max(stored, default=-1) + 1)]
        num_bytes = sum(len(task) * task.sample_bytes for task in stored.values())
        numbers = {**numbers, "memory_bytes": num_bytes, "stored": counts}
        return TrainedClient({**weights, **result.weights}, result, numbers, memory_tensors(stored))

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return the state with as many samples of each task as the client reports; no more than it can have."""
        stored, limit = reported.get("stored"), self.params.memory_bytes
        counts = enumerate(stored[: self.context.num_tasks] if isinstance(stored, list) else [])
        learned = {task_index: count for task_index, count in counts if isinstance(count, int) and count > 0}
        state = after_tasks(tuple(learned))
        assert state is not None
        kept = {}
        for task_index, samples in read_memory(state.tensors).items():
            count = min(learned[task_index], MAX_TASK_COUNT if limit is None else limit // samples.sample_bytes)
            tensors = samples.tensors().items()
            kept[task_index] = StoredSamples(**{name: t.new_empty(count, *t.shape[1:]) for name, t in tensors})
        return replace(state, tensors={**state.tensors, **memory_tensors(kept)})
