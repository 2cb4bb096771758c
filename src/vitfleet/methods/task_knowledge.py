"""What a client of FedKNOW keeps of the tasks it has learned: the largest weights of each task's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from vitfleet.data.subsets import round_half_up
from vitfleet.message import Tensors
from vitfleet.models.parts import Selection
from vitfleet.training.memories import Teachers

_PREFIX = "knowledge."


@dataclass(frozen=True)
class TaskKnowledge:
    """The kept weights of one task's model.

    Attributes
    ----------
    values, indices
        The weights, float32 ``[kept]``, and their positions in the vector of all parameters of the model, in the
        model's order, int32 ``[kept]``, ascending.
    label
        A class of the task, an int16 scalar.
    """

    values: Tensor
    indices: Tensor
    label: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes that are stored."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.values, self.indices, self.label))


KnownTasks: TypeAlias = Mapping[int, TaskKnowledge]  # by task index


def num_kept_weights(num_weights: int, rho: float) -> int:
    """Return how many weights are the fraction ρ of all: at least one."""
    return max(1, round_half_up(rho * num_weights))


def extract_knowledge(weights: Tensors, parameters: Selection, rho: float, label: Tensor) -> TaskKnowledge:
    """Return the fraction ρ of a model's weights that have the largest absolute values.

    They are ranked over the whole model. Of equal values the first in the model's order are kept.

    Parameters
    ----------
    parameters
        The weights that are ranked: all parameters of the model.
    label
        A class of the task that the model has learned.
    """
    vector = torch.cat([weights[name].detach().flatten() for name in parameters])
    ranking = vector.abs().sort(descending=True, stable=True).indices
    indices = ranking[: num_kept_weights(len(vector), rho)].sort().values
    return TaskKnowledge(vector[indices], indices.to(torch.int32), label.to(torch.int16))


def read_knowledge(client_tensors: Tensors) -> KnownTasks:
    """Return the knowledge in the tensors of a client's state."""
    task_indices = sorted(
        int(name.split(".")[1]) for name in client_tensors if name.startswith(_PREFIX) and name.endswith(".label")
    )
    return {index: TaskKnowledge(*(client_tensors[name] for name in _tensor_names(index))) for index in task_indices}


def knowledge_tensors(known: KnownTasks) -> dict[str, Tensor]:
    """Return the knowledge as tensors of a client's state."""
    return {
        name: tensor
        for index, task in known.items()
        for name, tensor in zip(_tensor_names(index), (task.values, task.indices, task.label), strict=True)
    }


def _tensor_names(task_index: int) -> tuple[str, str, str]:
    prefix = f"{_PREFIX}{task_index:04d}"
    return f"{prefix}.values", f"{prefix}.indices", f"{prefix}.label"


def make_teachers(known: KnownTasks, task_index: int, temperature: float) -> Teachers | None:
    """Return the knowledge of the tasks before ``task_index`` as the teachers of a training; ``None`` if there is none.

    A task that the client missed is an absent teacher, so that all clients of a round have the same number of teachers.
    """
    tasks = [known.get(index) for index in range(task_index)]
    present = [task for task in tasks if task is not None]
    if not present:
        return None
    empty = TaskKnowledge(
        torch.zeros_like(present[0].values), torch.zeros_like(present[0].indices), torch.zeros_like(present[0].label)
    )
    filled = [task or empty for task in tasks]
    values = torch.stack([task.values for task in filled])
    return Teachers(
        values,
        torch.stack([task.indices for task in filled]),
        torch.stack([task.label for task in filled]).long(),
        values.new_full((len(filled),), temperature),
        torch.tensor([task is not None for task in tasks], device=values.device),
    )
