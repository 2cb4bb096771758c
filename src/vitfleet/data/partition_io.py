"""Save a partition to files and load it again.

``partition.safetensors`` holds the arrays and is what a later run loads. ``partition.json`` is a summary for people
and for other tools.
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
from vitfleet.data.client_indices import ClientIndices, Ints, Partition, hash_labels
from vitfleet.errors import ConfigError, DataError
from vitfleet.files import parse_json, write_atomically

ARRAYS_FILE = "partition.safetensors"
SUMMARY_FILE = "partition.json"
_ARRAY_NAMES = ("train_indices", "train_offsets", "test_indices", "test_offsets", "counts")


def save_partition(
    partition: Partition,
    params: PartitionParams,
    train_labels: Ints,
    test_labels: Ints,
    class_names: Sequence[str],
    folder: Path,
) -> Path:
    """Write the two files of a partition into a folder, each atomically.

    Returns
    -------
    Path
        The ``partition.safetensors``, which :func:`load_partition` and ``data.partition.path`` accept.
    """
    sizes = partition.train.sizes()
    identity = {"sha256": partition.fingerprint(), "labels_sha256": hash_labels(train_labels, test_labels)}
    summary = {
        "partition": params.model_dump(),
        "clients": partition.num_clients,
        "train_samples": partition.train.num_samples,
        "test_samples": partition.test.num_samples,
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "empty_clients": int(np.count_nonzero(sizes == 0)),
        **identity,
        "classes": list(class_names),
    }
    train, test = partition.train, partition.test
    values = (train.indices, train.offsets, test.indices, test.offsets, partition.class_counts)
    arrays = {name: np.ascontiguousarray(array, np.int64) for name, array in zip(_ARRAY_NAMES, values, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    # One metadata entry: safetensors does not keep the order of several, and equal runs write equal files.
    write_atomically(folder / ARRAYS_FILE, to_bytes(arrays, {"vitfleet": json.dumps(identity)}))
    write_atomically(folder / SUMMARY_FILE, _format_summary(summary, partition.class_counts).encode())
    return folder / ARRAYS_FILE


def load_partition(path: Path) -> Partition:
    """Load a partition and verify that it is intact.

    Parameters
    ----------
    path
        The folder it was saved to, or the ``partition.safetensors`` in it.
    """
    return _read(_arrays_file(path))[0]


def load_partition_for(
    path: Path, num_clients: int, train_labels: Ints, test_labels: Ints, num_classes: int
) -> Partition:
    """Load a partition for these images and this fleet; reject one that was made for others."""
    key = "data.partition.path"
    file = _arrays_file(path)
    if not file.is_file():
        raise ConfigError(key, str(path), f"no partition there; give a run folder or its {ARRAYS_FILE}")
    partition, labels_sha256 = _read(file)
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


def _arrays_file(path: Path) -> Path:
    return path / ARRAYS_FILE if path.is_dir() else path


def _read(file: Path) -> tuple[Partition, str]:
    """Return the partition and the hash of the labels it was made for."""
    damaged = f"{file}: damaged, or not a saved partition; save it again from the run that made it"
    try:
        with safe_open(file, framework="numpy") as stored:
            identity = parse_json((stored.metadata() or {})["vitfleet"])
            arrays = [stored.get_tensor(name) for name in _ARRAY_NAMES]
            expected, labels_sha256 = str(identity["sha256"]), str(identity["labels_sha256"])
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise DataError(damaged) from None
    if any(array.dtype != np.int64 for array in arrays):
        raise DataError(damaged)
    train_indices, train_offsets, test_indices, test_offsets, class_counts = arrays
    train, test = ClientIndices(train_indices, train_offsets), ClientIndices(test_indices, test_offsets)
    partition = Partition(train, test, class_counts)
    if partition.fingerprint() != expected or not _is_consistent(partition):
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
