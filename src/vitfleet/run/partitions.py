"""The partition of a run: made once, saved in the run's folder, and loaded from there when the run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.schema import Config, TasksConfig
from vitfleet.data.images import DataSet, Shard
from vitfleet.data.partitions.assign import partition_dataset
from vitfleet.data.partitions.client_indices import ClientIndices, Partition
from vitfleet.data.partitions.partitioners import FilePartition
from vitfleet.data.partitions.saved import (
    PARTITION_FILE,
    TASKS_FILE,
    load_task_streams,
    save_partition,
    save_task_streams,
)
from vitfleet.data.tasks import TaskStreams, make_task_streams

RunPartition: TypeAlias = Partition | TaskStreams


def open_partition(config: Config, data: DataSet, folder: Path) -> RunPartition:
    """Return the images of each client, or of each client's tasks. A resumed run has the ones it started with."""
    tasks = config.data.tasks
    return _open_task_streams(tasks, config, data, folder) if tasks else _open_partition(config, data, folder)


def empty_partition(config: Config) -> Partition:
    """Return the partition of a server whose clients have their own images: it holds none."""
    nothing = ClientIndices.empty(config.fleet.clients, config.num_tasks)
    return Partition(nothing, nothing, np.zeros((config.fleet.clients, 0), dtype=np.int64))


def train_shard(
    data: DataSet, partition: RunPartition, client: int, task_index: int, accumulate: bool = False
) -> Shard:
    """Return a client's training images of a task.

    Parameters
    ----------
    accumulate
        Return those of all its tasks up to this one: see ``Method.accumulates_tasks``.
    """
    select = partition.train.up_to_task if accumulate else partition.train.for_client
    return Shard(data.train, torch.from_numpy(select(client, task_index)).to(data.train.labels.device))


def train_labels(
    data: DataSet, partition: RunPartition, client: int, task_index: int, accumulate: bool = False
) -> NDArray[np.int64]:
    """Return the labels of the images that :func:`train_shard` returns."""
    labels: NDArray[np.int64] = train_shard(data, partition, client, task_index, accumulate).labels.cpu().numpy()
    return labels


def partition_file(config: Config) -> str:
    """Return the name of the file that describes a run's partition."""
    return TASKS_FILE if config.data.tasks else PARTITION_FILE


def _open_partition(config: Config, data: DataSet, folder: Path) -> Partition:
    is_saved = (folder / PARTITION_FILE).exists()
    kind = FilePartition(path=str(folder)) if is_saved else config.data.partition
    partition = partition_dataset(kind, config.fleet.clients, config.seed, data)
    if not is_saved:
        train, test = (split.labels.cpu().numpy() for split in (data.train, data.test))
        save_partition(partition, config.data.partition, train, test, data.classes, folder)
    return partition


def _open_task_streams(tasks: TasksConfig, config: Config, data: DataSet, folder: Path) -> TaskStreams:
    train, test = (split.labels.cpu().numpy() for split in (data.train, data.test))
    if (folder / TASKS_FILE).exists():
        return load_task_streams(folder, train, test)
    streams = make_task_streams(tasks, config.fleet.clients, config.seed, train, test, len(data.classes))
    save_task_streams(streams, tasks, train, test, folder)
    return streams
