"""The images of every client of a run, whether they are partitioned once or task by task."""

from __future__ import annotations

from vitfleet.config.schema import Config
from vitfleet.data.images import DataSet
from vitfleet.data.partitions.assign import partition_dataset
from vitfleet.data.partitions.client_indices import ClientIndices
from vitfleet.data.tasks import make_task_streams


def assign_images(config: Config, data: DataSet) -> tuple[ClientIndices, ClientIndices]:
    """Return the training and the test images of each client, with those of all its tasks joined."""
    tasks, clients = config.data.tasks, config.fleet.clients
    if tasks is None:
        partition = partition_dataset(config.data.partition, clients, config.seed, data)
        return partition.train, partition.test
    train_labels, test_labels = (split.labels.cpu().numpy() for split in (data.train, data.test))
    streams = make_task_streams(tasks, clients, config.seed, train_labels, test_labels, len(data.classes))
    return streams.train.all_tasks(), streams.test.all_tasks()
