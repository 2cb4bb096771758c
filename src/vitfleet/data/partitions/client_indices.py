"""Which samples each client holds, as two flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """The sample indices of every client, and of each of its tasks if there are several.

    Two flat arrays, so that 10,000 clients cost no Python objects.
    """

    indices: Ints  # of samples, client by client and, within a client, task by task
    offsets: Ints  # `[clients * tasks + 1]`: where the samples of each client and task begin and end
    num_tasks: int = 1  # per client

    @classmethod
    def from_owners(cls, owners: Ints, num_clients: int) -> ClientIndices:
        """Build from the client of each sample; the samples of a client are in ascending order."""
        offsets = np.zeros(num_clients + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=num_clients), out=offsets[1:])
        return cls(np.argsort(owners, kind="stable").astype(np.int64), offsets)

    @classmethod
    def from_lists(cls, samples: Sequence[Ints], num_tasks: int = 1) -> ClientIndices:
        """Build from one array of sample indices per client and task."""
        offsets = np.zeros(len(samples) + 1, np.int64)
        np.cumsum([len(indices) for indices in samples], out=offsets[1:])
        return cls(np.concatenate(samples), offsets, num_tasks)

    @classmethod
    def empty(cls, num_clients: int, num_tasks: int = 1) -> ClientIndices:
        """Return the indices of clients without samples."""
        return cls(np.zeros(0, np.int64), np.zeros(num_clients * num_tasks + 1, np.int64), num_tasks)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return (len(self.offsets) - 1) // self.num_tasks

    @property
    def num_samples(self) -> int:
        """Number of samples held by all clients together."""
        return len(self.indices)

    def for_client(self, client: int, task_index: int = 0) -> Ints:
        """Return the sample indices of one client and task, as a view."""
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client}: there are {self.num_clients} clients")
        if not 0 <= task_index < self.num_tasks:
            raise IndexError(f"task {task_index}: there are {self.num_tasks} tasks")
        position = client * self.num_tasks + task_index
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def up_to_task(self, client: int, task_index: int) -> Ints:
        """Return the sample indices of one client's tasks up to this one, task by task, as a view."""
        last = self.for_client(client, task_index)
        start = self.offsets[client * self.num_tasks]
        return self.indices[start : self.offsets[client * self.num_tasks + task_index] + len(last)]

    def all_tasks(self) -> ClientIndices:
        """Return the samples of each client over all its tasks, as if they were one task."""
        return ClientIndices(self.indices, self.offsets[:: self.num_tasks])

    def sizes(self) -> Ints:
        """Return the number of samples of each client and task, in the order of ``offsets``."""
        return np.diff(self.offsets)

    def class_counts(self, labels: Ints, num_classes: int) -> Ints:
        """Count the samples of each client by class, over all tasks: ``[clients, classes]``."""
        owners = np.repeat(np.arange(self.num_clients), self.all_tasks().sizes())
        cells = np.bincount(owners * num_classes + labels[self.indices], minlength=self.num_clients * num_classes)
        return cells.astype(np.int64).reshape(self.num_clients, num_classes)

    def is_exact_cover(self) -> bool:
        """Whether the clients together hold every sample exactly once."""
        edges, ascending = self.offsets, bool(np.all(self.sizes() >= 0))
        is_valid = len(edges) > 0 and edges[0] == 0 and edges[-1] == self.num_samples and ascending
        return is_valid and np.array_equal(np.sort(self.indices), np.arange(self.num_samples))


@dataclass(frozen=True, eq=False)
class Partition:
    """The training and test images of every client."""

    train: ClientIndices
    test: ClientIndices
    class_counts: Ints  # `[clients, classes]`: training images

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.train.num_clients

    def fingerprint(self) -> str:
        """Return the SHA-256 of both splits: equal exactly if every client holds the same samples."""
        return _hash_arrays(self.train.indices, self.train.offsets, self.test.indices, self.test.offsets)


def hash_labels(train_labels: Ints, test_labels: Ints) -> str:
    """Return the SHA-256 of the labels, which tells whether a partition was made for the same images in this order."""
    return _hash_arrays(train_labels, test_labels)


def _hash_arrays(*arrays: Ints) -> str:
    digest = sha256()
    for array in arrays:
        # With its length: [1, 2] + [3] and [1] + [2, 3] are different partitions.
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, "<i8").tobytes())
    return digest.hexdigest()
