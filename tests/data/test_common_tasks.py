"""Tasks that are those of all clients, whose images a partition divides (``data.tasks.partitioned``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vitfleet.config.load import from_tree
from vitfleet.config.schema import Config
from vitfleet.data.partitions.assign import assign_tasks, make_partition
from vitfleet.data.tasks import TaskStreams
from vitfleet.errors import UserError

CLASSES, CLIENTS, TASKS = 12, 5, 3
TRAIN = np.random.default_rng(0).integers(0, CLASSES, 900)
TEST = np.random.default_rng(1).integers(0, CLASSES, 240)
TABLE = {"count": TASKS, "classes": 4, "order": "common", "partitioned": True}
PARTITIONS: dict[str, dict[str, Any]] = {
    "skewed": {"kind": "dirichlet", "beta": 0.1},
    "at least some": {"kind": "dirichlet", "beta": 0.1, "min_samples": 5},
    "iid": {"kind": "iid"},
    "two classes each": {"kind": "classes", "per_client": 2},
}


def config_of(partition: dict[str, Any], **tasks: Any) -> Config:
    data = {"name": "digits", "tasks": {**TABLE, **tasks}, "partition": partition}
    return from_tree({"data": data, "fleet": {"clients": CLIENTS, "per_round": 2}})


def streams_of(config: Config) -> TaskStreams:
    return assign_tasks(config, TRAIN, TEST, CLASSES)


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_image_of_a_task_is_on_one_client_as_the_partition_divides_the_task(name: str) -> None:
    config = config_of(PARTITIONS[name])
    streams = streams_of(config)
    assert np.array_equal(streams.task_order, np.tile(streams.task_order[0], (CLIENTS, 1)))
    for position, task in enumerate(streams.task_order[0].tolist()):
        classes = np.flatnonzero(streams.class_to_task == task)
        for held, labels in ((streams.train, TRAIN), (streams.test, TEST)):
            of_clients = [held.for_client(client, position) for client in range(CLIENTS)]
            assert np.array_equal(np.sort(np.concatenate(of_clients)), np.flatnonzero(np.isin(labels, classes)))
        images = np.flatnonzero(np.isin(TRAIN, classes))
        alone = make_partition(
            config.data.partition,
            CLIENTS,
            config.seed,
            np.searchsorted(classes, TRAIN[images]),
            np.searchsorted(classes, TEST[np.isin(TEST, classes)]),
            len(classes),
            task=task,
        )
        for client in range(CLIENTS):
            expected = images[alone.train.for_client(client)]
            assert np.array_equal(streams.train.for_client(client, position), expected)


def test_tasks_are_divided_by_draws_of_their_own_and_do_not_depend_on_the_order() -> None:
    sizes = streams_of(config_of(PARTITIONS["skewed"])).train.sizes().reshape(CLIENTS, TASKS)
    assert len({tuple(column) for column in sizes.T.tolist()}) == TASKS
    assert (sizes == 0).any(), "a skewed partition leaves clients without images of a task"


@pytest.mark.parametrize(
    ("partition", "tasks", "reason"),
    [
        (PARTITIONS["iid"], {"order": "own"}, "needs data.tasks.order = common"),
        (PARTITIONS["iid"], {"partitioned": False, "per_client": [1, 2]}, "data.tasks.partitioned = true"),
        (PARTITIONS["iid"], {"share": [0.2, 0.3]}, "data.tasks.share: has no effect"),
        (PARTITIONS["iid"], {"keep_models": True}, "must be false"),
        ({"kind": "file", "path": "anywhere"}, {}, "is one of all images"),
    ],
)
def test_what_does_not_fit_is_refused(partition: dict[str, Any], tasks: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        config_of(partition, **tasks)
