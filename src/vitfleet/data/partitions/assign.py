"""Which client holds which images.

The label-based partitions share one idea: a *share matrix* (classes x clients, rows sum to 1) holds the fraction of a
class that each client gets, and :func:`assign_by_shares` assigns the samples by it. The test images are assigned by the
shares that the training partition ended up with (a client's images of a class / all images of that class), so a
client's own test split follows its own training distribution, whatever the partition.

Why flwr-datasets' partitioners are not used here: ``PathologicalPartitioner`` drops classes that no client drew with
only a warning, and raises for classes with fewer samples than holders; ``ShardPartitioner`` drops the incomplete shard
by default; ``DirichletPartitioner`` reaches a minimum size by drawing again, and gives up after ten attempts; none
assigns the test set by the same shares; and all of them need ``datasets`` on the machine that trains. They serve as the
reference in the tests instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.base import PartitionParams
from vitfleet.config.registry import PARTITIONS
from vitfleet.config.schema import Config
from vitfleet.data.images import DataSet
from vitfleet.data.partitions.client_indices import ClientIndices, Ints, Partition
from vitfleet.data.tasks import NO_TASK, TaskStreams, assign_classes_to_tasks, draw_task_order, make_task_streams
from vitfleet.errors import ConfigError
from vitfleet.randomness import Address, Purpose

Floats: TypeAlias = NDArray[np.float64]

# Two splits, two random addresses: the split is the epoch of the address.
_TRAIN, _TEST = 0, 1


@dataclass(frozen=True)
class PartitionInput:
    """Arguments of a partition function.

    Attributes
    ----------
    labels, test_labels
        The class of each training and test image, in ``range(num_classes)``; a class may have no images.
    num_classes, clients
        Number of classes and of clients.
    rng
        Generator of all random draws; it depends on the run's seed alone.
    sources, test_sources
        Origin of each image (folder, session, writer) as a number; ``None`` if the data set does not record it.
    """

    labels: Ints
    test_labels: Ints
    num_classes: int
    clients: int
    rng: np.random.Generator
    sources: Ints | None = None
    test_sources: Ints | None = None


@dataclass(frozen=True)
class Owners:
    """The client of each image.

    Attributes
    ----------
    train
        The client of each training image.
    test
        The client of each test image, −1 to assign it by the training shares; ``None``: −1 for all.
    """

    train: Ints
    test: Ints | None = None


#: A partition function takes its parameter table and returns each training image's client, or both splits' owners.
PartitionFunction: TypeAlias = Callable[[Any, PartitionInput], Ints | Owners | Partition]


def make_partition(
    params: PartitionParams,
    clients: int,
    seed: int,
    train_labels: Ints,
    test_labels: Ints,
    num_classes: int,
    train_sources: Ints | None = None,
    test_sources: Ints | None = None,
    task: int = NO_TASK,
) -> Partition:
    """Assign every training and test image to one client, with the run's seed as the only source of randomness.

    The images may be those of one ``task``: each task is divided by draws of its own.

    Some partitions can leave a client without images (``dirichlet`` without ``min_samples``, a class with fewer images
    than holders). Labels are in ``range(num_classes)``; a class may have no images.
    """
    samples = len(train_labels)
    if not 1 <= clients <= samples:
        remedy = f"must be between 1 and {samples}, the number of training images"
        raise ConfigError("fleet.clients", clients, remedy)
    partition: PartitionFunction = PARTITIONS.entry_of(params).target
    rng = _generator(seed, _TRAIN, task)
    data = PartitionInput(train_labels, test_labels, num_classes, clients, rng, train_sources, test_sources)
    assigned = partition(params, data)
    if isinstance(assigned, Partition):
        return assigned
    owners = assigned if isinstance(assigned, Owners) else Owners(np.asarray(assigned, dtype=np.int64))
    _check_owners(owners, data, PARTITIONS.entry_of(params).name)
    train = ClientIndices.from_owners(owners.train, clients)
    class_counts = train.class_counts(train_labels, num_classes)
    test_owners = assign_by_shares(test_labels, training_shares(class_counts), _generator(seed, _TEST, task))
    if owners.test is not None:
        test_owners = np.where(owners.test >= 0, owners.test, test_owners).astype(np.int64)
    return Partition(train, ClientIndices.from_owners(test_owners, clients), class_counts)


def _check_owners(owners: Owners, data: PartitionInput, kind: str) -> None:
    """Check that a partition function returned one client for each image."""
    for split, labels, lowest in ((owners.train, data.labels, 0), (owners.test, data.test_labels, -1)):
        if split is None:
            continue
        if split.shape != labels.shape:
            problem = f"returned {split.shape} clients for {len(labels)} images; return one for each"
            raise ConfigError("data.partition.kind", kind, problem)
        if len(split) and not (lowest <= split.min() and split.max() < data.clients):
            problem = f"returned clients outside 0 … {data.clients - 1}, fleet.clients − 1"
            raise ConfigError("data.partition.kind", kind, problem)


def partition_dataset(params: PartitionParams, clients: int, seed: int, data: DataSet) -> Partition:
    """Assign a data set's images to the clients: see :func:`make_partition`."""
    return make_partition(params, clients, seed, *_labels_and_sources(data))


def assign_by_shares(labels: Ints, shares: Floats, rng: np.random.Generator) -> Ints:
    """Return the client of each sample, by a share matrix ``[classes, clients]`` whose rows sum to 1."""
    classes, clients = shares.shape
    counts = np.bincount(labels, minlength=classes)[:, None]
    offset = (rng.permutation(classes)[:, None] + rng.random()) / classes
    edges = np.cumsum(shares, axis=1)
    edges /= edges[:, -1:]  # x / x is exactly 1: clients without a share at the end of a row get nothing
    edges = np.minimum(np.floor(edges * counts + offset), counts)
    sizes = np.diff(edges, prepend=0.0, axis=1).astype(np.int64)
    owners = np.empty(len(labels), np.int64)
    owners[sort_by_label(labels, rng)] = np.repeat(np.tile(np.arange(clients), classes), sizes.ravel())
    return owners


def training_shares(class_counts: Ints) -> Floats:
    """Turn the class counts ``[clients, classes]`` of a partition into shares ``[classes, clients]``.

    A class without training images is shared evenly, because its test images have to be assigned, too.
    """
    clients = class_counts.shape[0]
    totals = class_counts.sum(axis=0)
    shares: Floats = np.where(totals > 0, class_counts / np.maximum(totals, 1), 1 / clients)
    return shares.T


def _generator(seed: int, split: int, task: int) -> np.random.Generator:
    return Address(seed, Purpose.PARTITION, round=task, epoch=split).generator()


def sort_by_label(labels: Ints, rng: np.random.Generator) -> Ints:
    """Return the indices that sort samples by label, in random order within a label."""
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def assign_tasks(
    config: Config,
    train_labels: Ints,
    test_labels: Ints,
    num_classes: int,
    train_sources: Ints | None = None,
    test_sources: Ints | None = None,
) -> TaskStreams:
    """Return the stream of tasks of every client: drawn by each, or tasks of all that the partition divides."""
    tasks, clients, seed = config.data.tasks, config.fleet.clients, config.seed
    assert tasks is not None
    if not tasks.partitioned:
        return make_task_streams(tasks, clients, seed, train_labels, test_labels, num_classes)
    class_to_task = assign_classes_to_tasks(tasks, seed, num_classes)
    order = draw_task_order(tasks, seed, client=0)  # that of every client
    held: list[tuple[Ints, Ints]] = []  # training and test images, task by task and within a task client by client
    for task in order.tolist():
        classes = np.flatnonzero(class_to_task == task)
        train, test = (np.flatnonzero(np.isin(labels, classes)) for labels in (train_labels, test_labels))
        partition = make_partition(
            config.data.partition,
            clients,
            seed,
            np.searchsorted(classes, train_labels[train]),
            np.searchsorted(classes, test_labels[test]),
            len(classes),
            None if train_sources is None else train_sources[train],
            None if test_sources is None else test_sources[test],
            task,
        )
        for client in range(clients):
            held.append((train[partition.train.for_client(client)], test[partition.test.for_client(client)]))
    by_client = [held[task * clients + client] for client in range(clients) for task in range(tasks.count)]
    train_indices = ClientIndices.from_lists([train for train, _ in by_client], tasks.count)
    test_indices = ClientIndices.from_lists([test for _, test in by_client], tasks.count)
    class_counts = train_indices.class_counts(train_labels, num_classes)
    return TaskStreams(class_to_task, np.tile(order, (clients, 1)), train_indices, test_indices, class_counts)


def assign_dataset_tasks(config: Config, data: DataSet) -> TaskStreams:
    """Return the stream of tasks of every client of a data set: see :func:`assign_tasks`."""
    return assign_tasks(config, *_labels_and_sources(data))


def assign_images(config: Config, data: DataSet) -> tuple[ClientIndices, ClientIndices]:
    """Return the training and the test images of each client, with those of all its tasks joined."""
    if config.data.tasks is None:
        partition = partition_dataset(config.data.partition, config.fleet.clients, config.seed, data)
        return partition.train, partition.test
    streams = assign_dataset_tasks(config, data)
    return streams.train.all_tasks(), streams.test.all_tasks()


def _labels_and_sources(data: DataSet) -> tuple[Ints, Ints, int, Ints | None, Ints | None]:
    return (
        data.train.labels.cpu().numpy(),
        data.test.labels.cpu().numpy(),
        len(data.classes),
        None if data.train.sources is None else data.train.sources.numpy(),
        None if data.test.sources is None else data.test.sources.numpy(),
    )
