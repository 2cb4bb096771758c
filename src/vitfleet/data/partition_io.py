"""A partition as a value, and the two files it is kept in.

``partition.safetensors`` holds the arrays and is what a later run reads back; ``partition.json`` says the
same in words and tables, for people and for other tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from vitfleet.config.schema import PartitionConfig
from vitfleet.errors import ConfigError, DataError
from vitfleet.files import write_atomically

Ints = NDArray[np.int64]

ARRAYS_FILE = "partition.safetensors"
SUMMARY_FILE = "partition.json"
_ARRAYS = ("train_indices", "train_offsets", "test_indices", "test_offsets", "counts")


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """Sample indices of every client, task by task: two flat arrays, so that 10,000 clients cost no Python objects.

    Attributes
    ----------
    indices
        Sample indices: of the first client's first task, of its second task, …, of the second client's first task, ….
    offsets
        ``[clients * num_tasks + 1]``: task ``t`` of client ``k`` has ``indices[offsets[p]:offsets[p + 1]]`` with
        ``p = k * num_tasks + t``. Only this class computes ``p``.
    num_tasks
        Tasks per client; 1 without tasks.
    """

    indices: Ints
    offsets: Ints
    num_tasks: int = 1

    @classmethod
    def from_owners(cls, owners: Ints, clients: int) -> ClientIndices:
        """Build the deal from each sample's client; a client's samples come out in ascending order."""
        offsets = np.zeros(clients + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=clients), out=offsets[1:])
        return cls(np.argsort(owners, kind="stable").astype(np.int64), offsets)

    @classmethod
    def empty(cls, clients: int, num_tasks: int = 1) -> ClientIndices:
        """Return the indices of clients without samples."""
        return cls(np.zeros(0, np.int64), np.zeros(clients * num_tasks + 1, np.int64), num_tasks)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return (len(self.offsets) - 1) // self.num_tasks

    @property
    def samples(self) -> int:
        """Number of samples dealt."""
        return len(self.indices)

    def of(self, client: int, task_index: int = 0) -> Ints:
        """Return the sample indices of one client's task, as a view."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client}: there are {self.clients}")
        if not 0 <= task_index < self.num_tasks:
            raise IndexError(f"task {task_index}: there are {self.num_tasks}")
        position = client * self.num_tasks + task_index
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def all_tasks(self) -> ClientIndices:
        """Return each client's samples of all its tasks, as if they were one task."""
        return ClientIndices(self.indices, self.offsets[:: self.num_tasks])

    def sizes(self) -> Ints:
        """Return the number of samples of each client's tasks: ``[clients * num_tasks]``."""
        return np.diff(self.offsets)

    def counts(self, labels: Ints, classes: int) -> Ints:
        """Count each client's samples by class: ``[clients, classes]``."""
        sizes = np.diff(self.offsets[:: self.num_tasks])
        owners = np.repeat(np.arange(self.clients), sizes)
        cells = np.bincount(owners * classes + labels[self.indices], minlength=self.clients * classes)
        return cells.astype(np.int64).reshape(self.clients, classes)

    def complete(self) -> bool:
        """Whether every sample is dealt exactly once."""
        edges = self.offsets
        fits = len(edges) > 0 and edges[0] == 0 and edges[-1] == self.samples and bool(np.all(np.diff(edges) >= 0))
        return fits and np.array_equal(np.sort(self.indices), np.arange(self.samples))


@dataclass(frozen=True, eq=False)
class Partition:
    """How the training and the test images are dealt to the clients.

    Attributes
    ----------
    train, test
        Both deals, over the same clients.
    counts
        ``[clients, classes]``: training images by client and class.
    """

    train: ClientIndices
    test: ClientIndices
    counts: Ints

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self.train.clients

    def fingerprint(self) -> str:
        """Return the SHA-256 of both deals: equal exactly when every client holds the same samples."""
        return _digest(self.train.indices, self.train.offsets, self.test.indices, self.test.offsets)


def labels_fingerprint(train_labels: Ints, test_labels: Ints) -> str:
    """Return the SHA-256 of the labels: whether a partition was made for these very images' order."""
    return _digest(train_labels, test_labels)


def save(
    partition: Partition,
    config: PartitionConfig,
    train_labels: Ints,
    test_labels: Ints,
    class_names: Sequence[str],
    folder: Path,
) -> Path:
    """Write a partition's two files into a folder; neither is ever seen half written.

    Returns
    -------
    Path
        The ``partition.safetensors``, which :func:`load` and ``data.partition.path`` accept.
    """
    sizes = partition.train.sizes()
    identity = {
        "sha256": partition.fingerprint(),
        "labels_sha256": labels_fingerprint(train_labels, test_labels),
    }
    summary = {
        "partition": config.model_dump(),
        "clients": partition.clients,
        "train_samples": partition.train.samples,
        "test_samples": partition.test.samples,
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "empty_clients": int(np.count_nonzero(sizes == 0)),
        **identity,
        "classes": list(class_names),
    }
    arrays = {
        "train_indices": partition.train.indices,
        "train_offsets": partition.train.offsets,
        "test_indices": partition.test.indices,
        "test_offsets": partition.test.offsets,
        "counts": partition.counts,
    }
    contiguous = {name: np.ascontiguousarray(array, np.int64) for name, array in arrays.items()}
    folder.mkdir(parents=True, exist_ok=True)
    # One metadata entry: safetensors does not keep the order of several, and equal runs write equal files.
    write_atomically(folder / ARRAYS_FILE, to_bytes(contiguous, {"vitfleet": json.dumps(identity)}))
    write_atomically(folder / SUMMARY_FILE, _summary_text(summary, partition.counts).encode())
    return folder / ARRAYS_FILE


def load(path: Path) -> Partition:
    """Read a partition back and verify that it is whole.

    Parameters
    ----------
    path
        The folder it was saved to, or the ``partition.safetensors`` in it.
    """
    return _read(_arrays_file(path))[0]


def load_for(path: Path, clients: int, train_labels: Ints, test_labels: Ints, classes: int) -> Partition:
    """Read a partition back for these images and this fleet; one made for others is refused."""
    key = "data.partition.path"
    file = _arrays_file(path)
    if not file.is_file():
        raise ConfigError(key, str(path), f"no partition there; give a run folder or its {ARRAYS_FILE}")
    partition, labels_sha256 = _read(file)
    if partition.clients != clients:
        raise ConfigError("fleet.clients", clients, f"must be {partition.clients}, as in the partition {path}")
    for split, deal, labels in (
        ("training", partition.train, train_labels),
        ("test", partition.test, test_labels),
    ):
        if deal.samples != len(labels):
            raise ConfigError(key, str(path), f"made for {deal.samples} {split} images, but the data has {len(labels)}")
    if labels_sha256 != labels_fingerprint(train_labels, test_labels):
        raise ConfigError(key, str(path), "made for other data: as many images, but their labels differ")
    return replace(partition, counts=partition.train.counts(train_labels, classes))


def _arrays_file(path: Path) -> Path:
    return path / ARRAYS_FILE if path.is_dir() else path


def _read(file: Path) -> tuple[Partition, str]:
    """Return the partition and the hash of the labels it was made for."""
    damaged = f"{file}: damaged, or not a saved partition; save it again from the run that made it"
    try:
        with safe_open(file, framework="numpy") as stored:
            identity = json.loads((stored.metadata() or {})["vitfleet"])
            arrays = {name: stored.get_tensor(name) for name in _ARRAYS}
            expected, labels_sha256 = str(identity["sha256"]), str(identity["labels_sha256"])
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise DataError(damaged) from None
    if any(array.dtype != np.int64 for array in arrays.values()):
        raise DataError(damaged)
    partition = Partition(
        ClientIndices(arrays["train_indices"], arrays["train_offsets"]),
        ClientIndices(arrays["test_indices"], arrays["test_offsets"]),
        arrays["counts"],
    )
    if partition.fingerprint() != expected or not _consistent(partition):
        raise DataError(damaged)
    return partition, labels_sha256


def _consistent(partition: Partition) -> bool:
    # The hash says that nothing changed since it was written; this says that what was written makes sense.
    train, test, counts = partition.train, partition.test, partition.counts
    return (
        train.complete()
        and test.complete()
        and train.clients == test.clients
        and counts.ndim == 2
        and np.array_equal(counts.sum(axis=1), train.sizes())
    )


def _summary_text(summary: dict[str, object], counts: Ints) -> str:
    """Lay the summary out as JSON with one line a client in the table of counts."""
    rows = ",\n    ".join(json.dumps(row) for row in counts.tolist())
    head = json.dumps(summary, indent=2, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n  "counts": [\n    {rows}\n  ]\n}}\n'


def _digest(*arrays: Ints) -> str:
    digest = sha256()
    for array in arrays:
        # The length goes in too: [1, 2] + [3] and [1] + [2, 3] are different partitions.
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, "<i8").tobytes())
    return digest.hexdigest()
