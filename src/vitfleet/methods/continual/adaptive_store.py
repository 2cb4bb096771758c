"""FedWEIT's server: the mean of the base weights, and the adaptive weights of every client, one part of its state each.

Of every client the adaptive weights of its two latest tasks are stored: those of the task that all clients are learning
now, and those that other clients receive, from the task before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vitfleet.message import Message, State, Tensors, to_device, with_prefix
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.base import Aggregator
from vitfleet.methods.continual.decomposed_tasks import KEPT, LATEST_TASK, OTHERS, PAST_TASKS
from vitfleet.methods.continual.decomposition import ADAPTIVE, KNOWLEDGE
from vitfleet.methods.continual.sparse_weights import SparseVector, check_sparse
from vitfleet.methods.reported import RejectedUpdateError

CLIENT, TASK = "client", "task"  # numbers of a part
STORED_TASKS = 2  # per client


class AdaptiveStoreUpdate(Aggregator):
    """Averages the shared weights, and stores the adaptive weights that each client sent.

    Parameters
    ----------
    mean
        Aggregates the shared weights.
    length
        The number of decomposed weights.
    task_index
        The index of the task of this round.
    """

    def __init__(self, server_state: State, mean: WeightedMean, length: int, task_index: int) -> None:
        self.server_state = server_state
        self.mean = mean
        self.length = length
        self.task_index = task_index
        self.received: dict[int, State] = {}
        self.sizes = mean.sizes

    def add(self, client: int, message: Message) -> None:
        """Add one client's update; that of a client without samples has no tensors."""
        self._check_numbers(message)
        self.mean.earlier_sizes = self.earlier_sizes
        if not message.tensors:
            self.mean.add(client, message)
            return
        vector = check_sparse(with_prefix(message.tensors, ADAPTIVE), self.length, self.mean.config.max_change)
        if message.numbers[LATEST_TASK] != self.task_index:
            raise RejectedUpdateError(
                f"its adaptive weights are of task {message.numbers[LATEST_TASK]}; expected: {self.task_index}"
            )
        shared = {name: tensor for name, tensor in message.tensors.items() if not name.startswith(ADAPTIVE)}
        self.mean.add(client, replace(message, tensors=shared))
        on_host = to_device(vector.tensors(), torch.device("cpu"))
        self.received[client] = State(on_host, {CLIENT: client, TASK: self.task_index})

    def _check_numbers(self, message: Message) -> None:
        """Reject numbers that cannot be: the costs of the client's next round are computed from them."""
        owners = {_owner(part)[0] for part in self.server_state.parts.values()}
        limits = {LATEST_TASK: self.task_index, PAST_TASKS: self.task_index, OTHERS: len(owners), KEPT: self.length}
        for name, limit in limits.items():
            number = message.numbers.get(name)
            if not isinstance(number, int) or not -1 <= number <= limit:
                raise RejectedUpdateError(f"its number {name!r} is {number}; expected: at most {limit}")

    def finish(self) -> State:
        """Return the server's new state."""
        state = self.mean.finish()
        self.rejected = self.mean.rejected
        parts = dict(self.server_state.parts)
        for client, part in self.received.items():
            if client not in self.rejected:
                parts[part_name(client, self.task_index)] = part
                for name in _names_of(parts, client)[:-STORED_TASKS]:
                    del parts[name]
        return replace(state, parts=parts)


def knowledge_for(
    parts: Mapping[str, State], client: int, task_index: int, device: torch.device
) -> tuple[dict[str, Tensor], list[int]]:
    """Return the adaptive weights that a client receives, and whose they are.

    They are those of every other client, from the latest task that it learned before this one.
    """
    latest: dict[int, tuple[int, Tensors]] = {}
    for part in parts.values():
        owner, task = _owner(part)
        if owner != client and task < task_index and task >= latest.get(owner, (0, {}))[0]:
            latest[owner] = task, part.tensors
    owners = sorted(latest)
    tensors: dict[str, Tensor] = {}
    for row, owner in enumerate(owners):
        tensors |= SparseVector.of_tensors(latest[owner][1]).to(device).tensors(f"{KNOWLEDGE}{row:04d}.")
    return tensors, owners


def part_name(client: int, task_index: int) -> str:
    """Return the name of the part of the server's state with a client's adaptive weights of a task."""
    return f"adaptive-{client:06d}-task-{task_index:04d}"


def _names_of(parts: Mapping[str, State], client: int) -> list[str]:
    """Return the names of a client's parts, the latest task last."""
    return sorted(name for name, part in parts.items() if _owner(part)[0] == client)


def _owner(part: State) -> tuple[int, int]:
    """Return the client and the task of a part."""
    client, task = part.numbers[CLIENT], part.numbers[TASK]
    assert isinstance(client, int)
    assert isinstance(task, int)
    return client, task
