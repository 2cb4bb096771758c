"""A data set as a stream of tasks: which classes a task has, and what each client holds of it.

The classes are parted into tasks. Every client learns all the tasks, one after the other, in its own order; of a task
it holds some classes, and of each of these a share of the training images. Clients draw independently, so two of them
may hold the same image. A client's test images of a task are all those of its classes. ``tasks.safetensors`` keeps
the deal for a run that goes on, ``tasks.json`` says it in words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from vitfleet.config.schema import TasksConfig
from vitfleet.data.batches import round_half_up
from vitfleet.data.partition_io import ClientIndices, Ints, labels_fingerprint
from vitfleet.errors import ConfigError, DataError
from vitfleet.files import write_atomically
from vitfleet.randomness import Address, Purpose

ARRAYS_FILE = "tasks.safetensors"
SUMMARY_FILE = "tasks.json"
NO_TASK = -1
_ARRAYS = ("task_of_class", "order", "train_indices", "train_offsets", "test_indices", "test_offsets", "counts")


@dataclass(frozen=True, eq=False)
class TaskStreams:
    """Every client's stream of tasks.

    Attributes
    ----------
    task_of_class
        ``[classes]``; −1 for a class that belongs to no task.
    order
        ``[clients, tasks]``: the task that a client learns first, second, …: its stages.
    train, test
        Each client's images of each of its tasks, in its order.
    counts
        ``[clients, classes]``: training images over all stages.
    """

    task_of_class: Ints
    order: Ints
    train: ClientIndices
    test: ClientIndices
    counts: Ints

    @property
    def clients(self) -> int:
        """Number of clients."""
        return int(self.order.shape[0])

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return int(self.order.shape[1])

    def fingerprint(self) -> str:
        """Return the SHA-256 of the streams: equal exactly when every client learns the same from the same images."""
        digest = sha256()
        for array in (self.task_of_class, self.order, *_flat(self.train), *_flat(self.test)):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()


def make_task_streams(
    config: TasksConfig, clients: int, seed: int, train_labels: Ints, test_labels: Ints, classes: int
) -> TaskStreams:
    """Part the classes into tasks and deal each client its stream.

    What a client holds of a task does not depend on its place in the client's order.

    Raises
    ------
    ConfigError
        If the data has too few classes.
    """
    members = _members(config, seed, classes)
    order = np.stack([order_of(config, seed, client) for client in range(clients)])
    holders = {label: np.flatnonzero(train_labels == label) for label in range(classes)}
    testers = {label: np.flatnonzero(test_labels == label) for label in range(classes)}
    train: list[Ints] = []
    test: list[Ints] = []
    for client in range(clients):
        for task in order[client]:
            held = _classes(config, seed, client, int(task), members[task])
            train.append(_join([_samples(config, seed, client, int(label), holders[int(label)]) for label in held]))
            test.append(_join([testers[int(label)] for label in held]))
    train_indices, test_indices = (_client_indices(parts, config.count) for parts in (train, test))
    counts = train_indices.counts(train_labels, classes)
    return TaskStreams(tasks_of_classes(config, seed, classes), order, train_indices, test_indices, counts)


def tasks_of_classes(config: TasksConfig, seed: int, classes: int) -> Ints:
    """Return the task of each class, −1 for a class that belongs to none; see :func:`make_task_streams`."""
    task_of_class = np.full(classes, NO_TASK, np.int64)
    task_of_class[_members(config, seed, classes)] = np.arange(config.count)[:, None]
    return task_of_class


def _members(config: TasksConfig, seed: int, classes: int) -> Ints:
    """Return the classes of each task, ``[tasks, classes a task]``."""
    if config.count * config.classes > classes:
        raise ConfigError(
            "data.tasks.count",
            config.count,
            f"{config.count} tasks of data.tasks.classes = {config.classes} need {config.count * config.classes} "
            f"classes, the data has {classes}",
        )
    listed = np.arange(classes)
    if config.split == "random":
        listed = Address(seed, Purpose.TASKS).generator().permutation(classes)
    return listed[: config.count * config.classes].reshape(config.count, config.classes)


def order_of(config: TasksConfig, seed: int, client: int) -> Ints:
    """Return the tasks in the order in which a client learns them."""
    whose = client if config.order == "own" else -1
    return Address(seed, Purpose.TASK_ORDER, client=whose).generator().permutation(config.count)


def _classes(config: TasksConfig, seed: int, client: int, task: int, members: Ints) -> Ints:
    rng = Address(seed, Purpose.TASK_CLASSES, client=client, epoch=task).generator()
    least, most = config.per_client
    return np.sort(rng.choice(members, rng.integers(least, most + 1), replace=False))


def _samples(config: TasksConfig, seed: int, client: int, label: int, images: Ints) -> Ints:
    """Draw a client's share of a class: at least one image, where there is one."""
    rng = Address(seed, Purpose.TASK_SAMPLES, client=client, epoch=label).generator()
    wanted = max(1, round_half_up(rng.uniform(*config.share) * len(images)))
    return rng.permutation(images)[:wanted]


def _join(parts: list[Ints]) -> Ints:
    return np.sort(np.concatenate(parts))


def _client_indices(parts: list[Ints], num_tasks: int) -> ClientIndices:
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return ClientIndices(np.concatenate(parts), offsets, num_tasks)


def _flat(deal: ClientIndices) -> tuple[Ints, Ints]:
    return deal.indices, deal.offsets


def save(streams: TaskStreams, config: TasksConfig, train_labels: Ints, test_labels: Ints, folder: Path) -> None:
    """Write the streams' two files into a folder; neither is ever seen half written."""
    identity = {"sha256": streams.fingerprint(), "labels_sha256": labels_fingerprint(train_labels, test_labels)}
    sizes, tests = streams.train.sizes(), streams.test.sizes()
    summary = {
        "tasks": config.model_dump(),
        "clients": streams.clients,
        "train_images_a_task": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
        "test_images_a_task": {"min": int(tests.min()), "mean": float(tests.mean()), "max": int(tests.max())},
        **identity,
        "task_of_class": streams.task_of_class.tolist(),
        "order": streams.order.tolist(),
    }
    deals = (*_flat(streams.train), *_flat(streams.test))
    values = (streams.task_of_class, streams.order, *deals, streams.counts)
    arrays = {name: np.ascontiguousarray(array, np.int64) for name, array in zip(_ARRAYS, values, strict=True)}
    # The summary last: it says that the arrays are there.
    write_atomically(folder / ARRAYS_FILE, to_bytes(arrays, {"vitfleet": json.dumps(identity)}))
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary).encode())


def load(folder: Path, train_labels: Ints, test_labels: Ints) -> TaskStreams:
    """Read the streams of a run back and verify that they are whole and made for these images."""
    file = folder / ARRAYS_FILE
    damaged = f"{file}: damaged, or not a saved stream of tasks; the run cannot go on"
    try:
        with safe_open(file, framework="numpy") as stored:
            identity = json.loads((stored.metadata() or {})["vitfleet"])
            found = [stored.get_tensor(name) for name in _ARRAYS]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise DataError(damaged) from None
    task_of_class, order, train_indices, train_offsets, test_indices, test_offsets, counts = found
    streams = TaskStreams(
        task_of_class,
        order,
        ClientIndices(train_indices, train_offsets, order.shape[1]),
        ClientIndices(test_indices, test_offsets, order.shape[1]),
        counts,
    )
    if streams.fingerprint() != identity["sha256"]:
        raise DataError(damaged)
    if identity["labels_sha256"] != labels_fingerprint(train_labels, test_labels):
        raise DataError(f"{file}: made for other images; the data has changed since the run began")
    return streams
