"""Save the partition or the task streams of a run to files, and load them again.

``partition.safetensors`` and ``tasks.safetensors`` hold the arrays: a resumed run loads them, and a later one can load
a partition. ``partition.json`` and ``tasks.json`` are summaries for people and for other tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from vitfleet.config.base import PartitionParams
from vitfleet.config.schema import TasksConfig
from vitfleet.data.partitions.client_indices import ClientIndices, Ints, Partition, hash_labels
from vitfleet.data.tasks import TaskStreams
from vitfleet.errors import ConfigError, DataError
from vitfleet.files import PARTITION_ARRAYS, PARTITION_FILE, TASKS_ARRAYS, TASKS_FILE, parse_json, write_atomically

_INDICES = ("train_indices", "train_offsets", "test_indices", "test_offsets", "counts")
_STREAMS = ("class_to_task", "order", *_INDICES)


def save_partition(
    partition: Partition,
    params: PartitionParams,
    train_labels: Ints,
    test_labels: Ints,
    class_names: Sequence[str],
    folder: Path,
) -> Path:
    """Write the two files of a partition into a folder, each atomically, and return the ``partition.safetensors``."""
    train, test, sizes = partition.train, partition.test, partition.train.sizes()
    identity = {"sha256": partition.fingerprint(), "labels_sha256": hash_labels(train_labels, test_labels)}
    summary = {
        "partition": params.model_dump(),
        "clients": partition.num_clients,
        "train_samples": train.num_samples,
        "test_samples": test.num_samples,
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "empty_clients": int(np.count_nonzero(sizes == 0)),
        **identity,
        "classes": list(class_names),
    }
    values = (train.indices, train.offsets, test.indices, test.offsets, partition.class_counts)
    _write_arrays(folder / PARTITION_ARRAYS, dict(zip(_INDICES, values, strict=True)), identity)
    write_atomically(folder / PARTITION_FILE, _format_summary(summary, partition.class_counts).encode())
    return folder / PARTITION_ARRAYS


def load_partition_for(
    path: Path, num_clients: int, train_labels: Ints, test_labels: Ints, num_classes: int
) -> Partition:
    """Load a partition for these images and this fleet; reject one that was made for others."""
    key = "data.partition.path"
    file = _arrays_file(path)
    if not file.is_file():
        raise ConfigError(key, str(path), f"no partition there; give a run folder or its {PARTITION_ARRAYS}")
    partition, labels_sha256 = load_partition(file)
    if partition.num_clients != num_clients:
        raise ConfigError("fleet.clients", num_clients, f"must be {partition.num_clients}, as in the partition {path}")
    for split, indices, labels in (
        ("training", partition.train, train_labels),
        ("test", partition.test, test_labels),
    ):
        if indices.num_samples != len(labels):
            remedy = f"made for {indices.num_samples} {split} images, but the data has {len(labels)}"
            raise ConfigError(key, str(path), remedy)
    if labels_sha256 != hash_labels(train_labels, test_labels):
        raise ConfigError(key, str(path), "made for other data: the number of images is the same, the labels differ")
    return replace(partition, class_counts=partition.train.class_counts(train_labels, num_classes))


def save_task_streams(
    streams: TaskStreams, config: TasksConfig, train_labels: Ints, test_labels: Ints, folder: Path
) -> None:
    """Write the two files of the streams into a folder, each atomically."""
    identity = {"sha256": streams.fingerprint(), "labels_sha256": hash_labels(train_labels, test_labels)}
    summary = {
        "tasks": config.model_dump(),
        "clients": streams.num_clients,
        "train_images_per_task": _describe(streams.train.sizes()),
        "test_images_per_task": _describe(streams.test.sizes()),
        **identity,
        "class_to_task": streams.class_to_task.tolist(),
        "order": streams.task_order.tolist(),
    }
    arrays = dict(zip(_STREAMS, (*streams.arrays(), streams.class_counts), strict=True))
    _write_arrays(folder / TASKS_ARRAYS, arrays, identity)
    # The summary last: its presence means that the arrays are complete.
    write_atomically(folder / TASKS_FILE, json.dumps(summary).encode())


def load_task_streams(folder: Path, train_labels: Ints, test_labels: Ints) -> TaskStreams:
    """Load the streams of a run and verify that they are intact and were made for these images."""
    file = folder / TASKS_ARRAYS
    damaged = f"{file}: damaged, or not a saved stream of tasks; the run cannot be resumed"
    arrays, sha256, labels_sha256 = _read_arrays(file, _STREAMS, damaged)
    class_to_task, task_order, train_indices, train_offsets, test_indices, test_offsets, class_counts = arrays
    num_tasks = task_order.shape[1]
    streams = TaskStreams(
        class_to_task,
        task_order,
        ClientIndices(train_indices, train_offsets, num_tasks),
        ClientIndices(test_indices, test_offsets, num_tasks),
        class_counts,
    )
    if streams.fingerprint() != sha256:
        raise DataError(damaged)
    if labels_sha256 != hash_labels(train_labels, test_labels):
        raise DataError(f"{file}: made for other images; the data has changed since the run began")
    return streams


def _arrays_file(path: Path) -> Path:
    return path / PARTITION_ARRAYS if path.is_dir() else path


def _write_arrays(file: Path, arrays: dict[str, Ints], identity: dict[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(array, np.int64) for name, array in arrays.items()}
    # One metadata entry: safetensors does not keep the order of several, and equal runs write equal files.
    write_atomically(file, to_bytes(contiguous, {"vitfleet": json.dumps(identity)}))


def _read_arrays(file: Path, names: Sequence[str], damaged: str) -> tuple[list[Ints], str, str]:
    """Return the arrays of a file, their hash, and that of the labels that they were made for."""
    try:
        with safe_open(file, framework="numpy") as stored:
            identity = parse_json((stored.metadata() or {})["vitfleet"])
            arrays = [stored.get_tensor(name) for name in names]
            hashes = str(identity["sha256"]), str(identity["labels_sha256"])
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise DataError(damaged) from None
    if any(array.dtype != np.int64 for array in arrays):
        raise DataError(damaged)
    return arrays, *hashes


def load_partition(path: Path) -> tuple[Partition, str]:
    """Return the partition of a folder or file, verified to be intact, and the hash of the labels it was made for."""
    file = _arrays_file(path)
    damaged = f"{file}: damaged, or not a saved partition; save it again from the run that made it"
    arrays, sha256, labels_sha256 = _read_arrays(file, _INDICES, damaged)
    train_indices, train_offsets, test_indices, test_offsets, class_counts = arrays
    train, test = ClientIndices(train_indices, train_offsets), ClientIndices(test_indices, test_offsets)
    partition = Partition(train, test, class_counts)
    if partition.fingerprint() != sha256 or not _is_consistent(partition):
        raise DataError(damaged)
    return partition, labels_sha256


def _is_consistent(partition: Partition) -> bool:
    # The hash shows that nothing has changed since it was written; this checks that what was written is a partition.
    train, test, class_counts = partition.train, partition.test, partition.class_counts
    return (
        train.is_exact_cover()
        and test.is_exact_cover()
        and train.num_clients == test.num_clients
        and class_counts.ndim == 2
        and np.array_equal(class_counts.sum(axis=1), train.sizes())
    )


def _format_summary(summary: dict[str, object], class_counts: Ints) -> str:
    """Format the summary as JSON, with one line per client in the table of class counts."""
    rows = ",\n    ".join(json.dumps(row) for row in class_counts.tolist())
    head = json.dumps(summary, indent=2, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n  "counts": [\n    {rows}\n  ]\n}}\n'


def _describe(sizes: Ints) -> dict[str, float]:
    return {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())}
