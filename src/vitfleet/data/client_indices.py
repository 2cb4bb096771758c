"""What every client of a run holds, whether its images are dealt at once or task after task."""

from __future__ import annotations

from vitfleet.config.schema import Config
from vitfleet.data.images import DataSet
from vitfleet.data.partition import partition_dataset
from vitfleet.data.partition_io import ClientIndices
from vitfleet.data.tasks import make_task_streams


def client_indices(config: Config, data: DataSet) -> tuple[ClientIndices, ClientIndices]:
    """Return each client's training images and its test images, those of all its tasks one after the other."""
    tasks, clients = config.data.tasks, config.fleet.clients
    if tasks is None:
        partition = partition_dataset(config.data.partition, clients, config.seed, data)
        return partition.train, partition.test
    train_labels, test_labels = (split.labels.cpu().numpy() for split in (data.train, data.test))
    streams = make_task_streams(tasks, clients, config.seed, train_labels, test_labels, len(data.classes))
    return streams.train.all_tasks(), streams.test.all_tasks()
