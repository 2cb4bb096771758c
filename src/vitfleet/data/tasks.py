"""Continual learning: split a data set into tasks and give every client its own stream of them.

The classes are divided among the tasks. Every client learns all tasks, one after the other, in its own order. Of each
task it holds some of the classes, and of each of these classes a share of the training images. Clients draw
independently, so two of them may hold the same image. A client's test images of a task are all those of its classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from vitfleet.config.schema import TasksConfig
from vitfleet.data.partitions.client_indices import ClientIndices, Ints
from vitfleet.data.subsets import round_half_up
from vitfleet.errors import ConfigError
from vitfleet.randomness import Address, Purpose

NO_TASK = -1


@dataclass(frozen=True, eq=False)
class TaskStreams:
    """The stream of tasks of every client."""

    class_to_task: Ints  # `[classes]`: the task of each class, −1 for a class that belongs to none
    task_order: Ints  # `[clients, tasks]`: the tasks in the order in which each client learns them
    train: ClientIndices  # with test: the samples of every client, task by task in the client's order
    test: ClientIndices
    class_counts: Ints  # `[clients, classes]`: training images over all tasks

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return int(self.task_order.shape[0])

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return int(self.task_order.shape[1])

    def arrays(self) -> tuple[Ints, ...]:
        """Return the arrays that define the streams; the class counts follow from them."""
        train, test = self.train, self.test
        return (self.class_to_task, self.task_order, train.indices, train.offsets, test.indices, test.offsets)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the streams: equal exactly if the tasks and images of every client are the same."""
        digest = sha256()
        for array in self.arrays():
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()


def make_task_streams(
    config: TasksConfig, clients: int, seed: int, train_labels: Ints, test_labels: Ints, num_classes: int
) -> TaskStreams:
    """Divide the classes among the tasks and draw the stream of each client.

    What a client holds of a task does not depend on the order in which it learns the tasks.
    """
    task_classes = _split_classes(config, seed, num_classes)
    task_order = np.stack([draw_task_order(config, seed, client) for client in range(clients)])
    train_of_class = [np.flatnonzero(train_labels == label) for label in range(num_classes)]
    test_of_class = [np.flatnonzero(test_labels == label) for label in range(num_classes)]
    train: list[Ints] = []
    test: list[Ints] = []
    for client in range(clients):
        for task in task_order[client].tolist():
            held = _draw_classes(config, seed, client, task, task_classes[task]).tolist()
            drawn = [_draw_samples(config, seed, client, label, train_of_class[label]) for label in held]
            train.append(np.sort(np.concatenate(drawn)))
            test.append(np.sort(np.concatenate([test_of_class[label] for label in held])))
    train_indices = ClientIndices.from_lists(train, config.count)
    return TaskStreams(
        assign_classes_to_tasks(config, seed, num_classes),
        task_order,
        train_indices,
        ClientIndices.from_lists(test, config.count),
        train_indices.class_counts(train_labels, num_classes),
    )


def assign_classes_to_tasks(config: TasksConfig, seed: int, num_classes: int) -> Ints:
    """Return the task of each class, −1 for a class that belongs to none."""
    class_to_task = np.full(num_classes, NO_TASK, np.int64)
    class_to_task[_split_classes(config, seed, num_classes)] = np.arange(config.count)[:, None]
    return class_to_task


def class_to_task(config: TasksConfig | None, seed: int, num_classes: int) -> tuple[int, ...]:
    """Return the task of each class, −1 for a class that belongs to none; empty without tasks."""
    return () if config is None else tuple(int(task) for task in assign_classes_to_tasks(config, seed, num_classes))


def draw_task_order(config: TasksConfig, seed: int, client: int) -> Ints:
    """Return the tasks in the order in which a client learns them."""
    address_client = client if config.order == "own" else -1
    return Address(seed, Purpose.TASK_ORDER, client=address_client).generator().permutation(config.count)


def _split_classes(config: TasksConfig, seed: int, num_classes: int) -> Ints:
    """Return the classes of each task, ``[tasks, classes per task]``."""
    needed = config.count * config.classes
    if needed > num_classes:
        raise ConfigError(
            "data.tasks.count",
            config.count,
            f"{config.count} tasks of data.tasks.classes = {config.classes} need {needed} classes, "
            f"the data has {num_classes}",
        )
    ordered = np.arange(num_classes)
    if config.split == "random":
        ordered = Address(seed, Purpose.TASKS).generator().permutation(num_classes)
    return ordered[:needed].reshape(config.count, config.classes)


def _draw_classes(config: TasksConfig, seed: int, client: int, task: int, task_classes: Ints) -> Ints:
    """Draw the classes of a task that a client holds."""
    rng = Address(seed, Purpose.TASK_CLASSES, client=client, epoch=task).generator()
    fewest, most = config.per_client
    return np.sort(rng.choice(task_classes, rng.integers(fewest, most + 1), replace=False))


def _draw_samples(config: TasksConfig, seed: int, client: int, label: int, samples: Ints) -> Ints:
    """Draw a client's share of a class: at least one image, if the class has any."""
    rng = Address(seed, Purpose.TASK_SAMPLES, client=client, epoch=label).generator()
    count = max(1, round_half_up(rng.uniform(*config.share) * len(samples)))
    return rng.permutation(samples)[:count]
