"""Save task streams to files and load them again.

``tasks.safetensors`` holds the arrays, for a run that is resumed. ``tasks.json`` is a summary for people and for other
tools.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from vitfleet.config.schema import TasksConfig
from vitfleet.data.client_indices import ClientIndices, Ints, hash_labels
from vitfleet.data.tasks import TaskStreams
from vitfleet.errors import DataError
from vitfleet.files import TASKS_ARRAYS, TASKS_FILE, parse_json, write_atomically

_ARRAY_NAMES = ("task_of_class", "order", "train_indices", "train_offsets", "test_indices", "test_offsets", "counts")


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
        "task_of_class": streams.task_of_class.tolist(),
        "order": streams.task_order.tolist(),
    }
    values = (*streams.arrays(), streams.class_counts)
    arrays = {name: np.ascontiguousarray(array, np.int64) for name, array in zip(_ARRAY_NAMES, values, strict=True)}
    # The summary last: its presence means that the arrays are complete.
    write_atomically(folder / TASKS_ARRAYS, to_bytes(arrays, {"vitfleet": json.dumps(identity)}))
    write_atomically(folder / TASKS_FILE, json.dumps(summary).encode())


def load_task_streams(folder: Path, train_labels: Ints, test_labels: Ints) -> TaskStreams:
    """Load the streams of a run and verify that they are intact and were made for these images."""
    file = folder / TASKS_ARRAYS
    damaged = f"{file}: damaged, or not a saved stream of tasks; the run cannot be resumed"
    try:
        with safe_open(file, framework="numpy") as stored:
            identity = parse_json((stored.metadata() or {})["vitfleet"])
            arrays = [stored.get_tensor(name) for name in _ARRAY_NAMES]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise DataError(damaged) from None
    task_of_class, task_order, train_indices, train_offsets, test_indices, test_offsets, class_counts = arrays
    num_tasks = task_order.shape[1]
    streams = TaskStreams(
        task_of_class,
        task_order,
        ClientIndices(train_indices, train_offsets, num_tasks),
        ClientIndices(test_indices, test_offsets, num_tasks),
        class_counts,
    )
    if streams.fingerprint() != identity["sha256"]:
        raise DataError(damaged)
    if identity["labels_sha256"] != hash_labels(train_labels, test_labels):
        raise DataError(f"{file}: made for other images; the data has changed since the run began")
    return streams


def _describe(sizes: Ints) -> dict[str, float]:
    return {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())}
