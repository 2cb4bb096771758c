"""The clients of a run: which of them train, and in a simulation the images and the device of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.fleet import DeviceName
from vitfleet.config.schema import Config, FleetConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, MEGABYTE, RoundWorkload, workload_seconds
from vitfleet.data.images import DataSet, Shard
from vitfleet.data.partitions.assign import assign_dataset_tasks, partition_dataset
from vitfleet.data.partitions.client_indices import ClientIndices, Partition
from vitfleet.data.partitions.partitioners import FilePartition
from vitfleet.data.partitions.saved import load_task_streams, save_partition, save_task_streams
from vitfleet.data.tasks import TaskStreams
from vitfleet.files import DEVICES_FILE, PARTITION_FILE, TASKS_FILE, write_atomically
from vitfleet.message import Numbers
from vitfleet.randomness import Address, Purpose

RunPartition: TypeAlias = Partition | TaskStreams


def held_out_clients(config: Config) -> list[int]:
    """Return the clients that never train (``fleet.held_out``), in ascending order.

    They depend on the seed and their number alone.
    """
    if not config.fleet.num_held_out:
        return []
    rng = Address(config.seed, Purpose.HELD_OUT_CLIENTS).generator()
    chosen = rng.choice(config.fleet.clients, config.fleet.num_held_out, replace=False)
    return [int(client) for client in np.sort(chosen)]


def training_clients(config: Config) -> list[int]:
    """Return all other clients, in ascending order."""
    held_out = set(held_out_clients(config))
    return [client for client in range(config.fleet.clients) if client not in held_out]


def open_partition(config: Config, data: DataSet, folder: Path) -> RunPartition:
    """Return the images of each client, or of each client's tasks.

    They are saved in the run's folder: a resumed run has the ones it started with.
    """
    labels = data.train.labels.cpu().numpy(), data.test.labels.cpu().numpy()
    if (tasks := config.data.tasks) is not None:
        if (folder / TASKS_FILE).exists():
            return load_task_streams(folder, *labels)
        streams = assign_dataset_tasks(config, data)
        save_task_streams(streams, tasks, *labels, folder)
        return streams
    is_saved = (folder / PARTITION_FILE).exists()
    kind = FilePartition(path=str(folder)) if is_saved else config.data.partition
    partition = partition_dataset(kind, config.fleet.clients, config.seed, data)
    if not is_saved:
        save_partition(partition, config.data.partition, *labels, data.classes, folder)
    return partition


def empty_partition(config: Config) -> Partition:
    """Return the partition of a server whose clients have their own images: it holds none."""
    nothing = ClientIndices.empty(config.fleet.clients, config.num_tasks)
    return Partition(nothing, nothing, np.zeros((config.fleet.clients, 0), dtype=np.int64))


@dataclass(frozen=True)
class ClientImages:
    """The training images of each client of a simulation."""

    config: Config
    data: DataSet
    partition: RunPartition
    # Whether a client trains on the images of all its tasks so far: see ``Method.accumulates_tasks``
    accumulates_tasks: bool

    def shard(self, client: int, task_index: int) -> Shard:
        """Return the images that a client trains on in a task."""
        train = self.partition.train
        select = train.up_to_task if self.accumulates_tasks else train.for_client
        index = torch.from_numpy(select(client, task_index)).to(self.data.train.labels.device)
        return Shard(self.data.train, index)

    def labels(self, client: int, round: int) -> NDArray[np.int64]:
        """Return the labels of the images that a client trains on in a round."""
        return self.shard(client, self.config.task_index(round)).labels.cpu().numpy()

    def labels_by_task(self) -> list[NDArray[np.int64]]:
        """Return the labels of the client with most images, in each of its tasks."""
        largest, train = int(self.partition.class_counts.sum(axis=1).argmax()), self.partition.train
        labels = self.data.train.labels.cpu().numpy()
        return [labels[train.for_client(largest, task)] for task in range(self.config.num_tasks)]


@dataclass(frozen=True)
class VirtualFleet:
    """The devices of simulated clients: how long a round takes on each, and whether it has the memory."""

    config: FleetConfig
    devices: Sequence[DeviceName]  # of each client
    memory_bytes: int  # that a client needs to train
    cost_model: CostModel
    images: ClientImages

    def seconds(self, round: int, client: int, down_bytes: int, client_metrics: Numbers | None) -> float:
        """Return how long a client takes to receive, train and send, computed from costs alone.

        ``client_metrics`` are the numbers in its last update; ``None`` if it has not sent one yet.
        """
        labels, task_index = self.images.labels(client, round), self.images.config.task_index(round)
        dry_run_result = self.cost_model.dry_run(round, client, labels, task_index, client_metrics)
        flops = self.cost_model.round_flops(dry_run_result, len(labels))
        workload = RoundWorkload(down_bytes, flops, self.cost_model.up_bytes(dry_run_result))
        bandwidth = None if self.config.bandwidth is None else self.config.bandwidth * MEGABYTE
        return workload_seconds(HARDWARE_PROFILES[self.devices[client]], workload, bandwidth)

    def failure_reason(self, client: int) -> str | None:
        """Return why a client can never train; ``None`` if it can."""
        device = HARDWARE_PROFILES[self.devices[client]]
        if device.holds(self.memory_bytes):
            return None
        return f"out of memory: training needs {self.memory_bytes / 2**30:.2f} GiB, the device is a {device.title}"

    @property
    def usable_clients(self) -> list[int]:
        """The clients that can train."""
        return [client for client in range(len(self.devices)) if self.failure_reason(client) is None]

    def write(self, folder: Path) -> None:
        """Write ``devices.json``: each client's device, and the clients without enough memory."""
        out_of_memory = sorted(set(range(len(self.devices))) - set(self.usable_clients))
        tree = {"clients": list(self.devices), "peak_memory_bytes": self.memory_bytes, "out_of_memory": out_of_memory}
        write_atomically(folder / DEVICES_FILE, json.dumps(tree).encode())
