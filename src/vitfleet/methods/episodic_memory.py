"""What a client keeps of the tasks it has learned: a few samples of each, as they are, and their gradients.

FedViT's knowledge extractor (section 3.2): of every class of a task, the share ρ of its samples that the trained model
names with the lowest loss. A client cannot know whether it will be asked again before a task ends, so it extracts anew
after every round; what stays is the knowledge under the last model it trained on the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.data.images import Shard
from vitfleet.data.rounding import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.message import Numbers, Tensors
from vitfleet.training.objective import EpisodicMemory

_PREFIX = "memory."
MOST_STORED = 2**31  # more than any device has: a count that a message says is not believed beyond it


class MemoryParams(MethodParams):
    """What methods that store samples of learned tasks have in common."""

    rho: float = Field(0.1, gt=0, le=1, description="share ρ of a task's samples, of every class, that is stored")
    memory_bytes: int | None = Field(
        None, ge=1, description="most bytes stored a client; the tasks are cut to a common size; null: no limit"
    )
    check: bool = Field(False, description="verify at every step that the angle to no stored task is obtuse")


@dataclass(frozen=True)
class Stored:
    """Stored samples of one task, the ones to keep longest first.

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

    def first(self, count: int) -> Stored:
        """Return the first ``count`` samples."""
        return Stored(self.images[:count].clone(), self.labels[:count].clone()) if count < len(self) else self


Knowledge = Mapping[int, Stored]  # by stage


def extract(scores: Tensor, labels: Tensor, rho: float) -> Tensor:
    """Return the positions of the samples to store: of every class the share ρ with the lowest scores, at least one.

    They come in an order in which every beginning keeps the classes' shares, too, as far as it goes: first the lowest
    of each class, then evenly through the classes. So a memory is made smaller by cutting its end off.
    """
    scores, labels = scores.cpu(), labels.cpu()
    rows: list[tuple[float, int, int]] = []
    for label in sorted(set(labels.tolist())):
        own = torch.nonzero(labels == label).flatten()
        kept = max(1, round_half_up(rho * len(own)))
        lowest = own[scores[own].argsort(stable=True)[:kept]].tolist()
        rows += [(rank / kept, label, position) for rank, position in enumerate(lowest)]
    return torch.tensor([position for *_, position in sorted(rows)], dtype=torch.long)


def store(
    known: Knowledge, task_index: int, shard: Shard, scores: Tensor, params: MemoryParams, num_tasks: int
) -> Knowledge:
    """Return the knowledge with that of a stage in it, within the budget.

    Parameters
    ----------
    scores
        What ranks the shard's samples: the lowest are stored.
    stages
        Tasks there will be, for which the budget has to last.
    """
    if not len(shard):
        return known
    places = shard.index[extract(scores, shard.labels, params.rho).to(shard.index.device)]
    new = Stored(shard.images.images[places], shard.images.labels[places].to(torch.int16))
    limit = params.memory_bytes
    if limit is not None and limit < num_tasks * new.sample_bytes:
        raise ConfigError(
            "method.memory_bytes", limit, f"must be at least {num_tasks * new.sample_bytes}: one image of each task"
        )
    return within({**known, task_index: new}, limit)


def within(known: Knowledge, limit: int | None) -> Knowledge:
    """Return the knowledge cut to a number of bytes: every task that has more samples than a common level, to it.

    What goes first are the samples of highest loss, the classes' shares are kept: see :func:`extract`.
    """
    level = max((len(one) for one in known.values()), default=0)
    while limit is not None and sum(min(level, len(one)) * one.sample_bytes for one in known.values()) > limit:
        level -= 1
    return {task_index: one.first(level) for task_index, one in known.items()}


def read(state: Tensors) -> Knowledge:
    """Find the knowledge in a client's state."""
    num_tasks = sorted(
        int(name.split(".")[1]) for name in state if name.startswith(_PREFIX) and name.endswith(".labels")
    )
    return {task_index: Stored(*(state[name] for name in _names(task_index))) for task_index in num_tasks}


def write(known: Knowledge) -> dict[str, Tensor]:
    """Return the knowledge as tensors of a client's state."""
    return {
        name: tensor
        for task_index, one in known.items()
        for name, tensor in zip(_names(task_index), (one.images, one.labels), strict=True)
    }


def _names(task_index: int) -> tuple[str, str]:
    return f"{_PREFIX}{task_index:04d}.images", f"{_PREFIX}{task_index:04d}.labels"


def bytes_of(known: Knowledge) -> int:
    """Return the bytes that are stored."""
    return sum(len(one) * one.sample_bytes for one in known.values())


def told(known: Knowledge) -> Numbers:
    """Return what a message says of the knowledge: its bytes, and the samples stored of each stage so far."""
    num_tasks = range(max(known, default=-1) + 1)
    stored = [len(known[task_index]) if task_index in known else 0 for task_index in num_tasks]
    return {"memory_bytes": bytes_of(known), "stored": stored}


def stored_samples(client_metrics: Numbers) -> int:
    """Return how many samples a client has stored that said this of itself."""
    return sum(_counts(client_metrics))


def _counts(client_metrics: Numbers) -> list[int]:
    """Return the samples stored of each stage, as far as a message says something sensible of it."""
    stored = client_metrics.get("stored")
    counts = stored if isinstance(stored, list) else []
    return [min(count, MOST_STORED) if isinstance(count, int) and count > 0 else 0 for count in counts]


def imagine(
    client_metrics: Numbers, channels: int, side: int, params: MemoryParams, num_tasks: int
) -> dict[str, Tensor]:
    """Return the shapes of the knowledge of a client that said this of itself; what cannot be is cut to what can."""
    one = Stored(*_blank(1, channels, side))
    most = MOST_STORED if params.memory_bytes is None else params.memory_bytes // one.sample_bytes
    counts = [min(count, most) for count in _counts(client_metrics)[:num_tasks]]
    return write(
        {task_index: Stored(*_blank(count, channels, side)) for task_index, count in enumerate(counts) if count}
    )


def _blank(count: int, channels: int, side: int) -> tuple[Tensor, Tensor]:
    images = torch.empty(count, channels, side, side, dtype=torch.uint8, device="meta")
    return images, torch.empty(count, dtype=torch.int16, device="meta")


def recall(known: Knowledge, task_index: int, together: bool = False) -> EpisodicMemory | None:
    """Return the samples of the tasks before a stage as a training's memory, the largest part first.

    ``None`` where there are none.

    Parameters
    ----------
    together
        All tasks in one part, instead of one part a task. A task that a client missed is a part without samples, so
        that all clients of a round have as many.
    """
    old = [known.get(one) for one in range(task_index)]
    there = [one for one in old if one is not None]
    if not there:
        return None
    if together:
        joined = Stored(torch.cat([one.images for one in there]), torch.cat([one.labels for one in there]))
        old = [joined]
    old.sort(key=lambda one: 0 if one is None else -len(one))
    sizes = tuple(0 if one is None else len(one) for one in old)
    most = sizes[0]
    images = there[0].images.new_zeros(len(old), most, *there[0].images.shape[1:])
    labels = there[0].labels.new_zeros(len(old), most, dtype=torch.long)
    share = torch.zeros(len(old), most, device=labels.device)
    for place, one in enumerate(old):
        if one is not None:
            images[place, : len(one)] = one.images
            labels[place, : len(one)] = one.labels.long()
            share[place, : len(one)] = 1 / len(one)
    return EpisodicMemory(images, labels, share, sizes)
