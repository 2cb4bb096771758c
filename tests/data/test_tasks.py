"""Task streams: classes, order and samples of every client's tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vitfleet.config.schema import TasksConfig
from vitfleet.data.partitions.client_indices import Ints
from vitfleet.data.partitions.saved import load_task_streams, save_task_streams
from vitfleet.data.tasks import NO_TASK, TaskStreams, make_task_streams
from vitfleet.errors import ConfigError, DataError
from vitfleet.files import TASKS_ARRAYS

CLASSES, TRAIN, TEST, CLIENTS = 30, 200, 40, 8
TRAIN_LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), TRAIN))
TEST_LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(CLASSES), TEST))
CONFIG = TasksConfig(count=5, classes=5, per_client=(2, 4), share=(0.05, 0.1))


def make(config: TasksConfig = CONFIG, seed: int = 0, clients: int = CLIENTS) -> TaskStreams:
    return make_task_streams(config, clients, seed, TRAIN_LABELS, TEST_LABELS, CLASSES)


def samples_of(streams: TaskStreams, client: int, task_index: int) -> tuple[Ints, Ints]:
    return streams.train.for_client(client, task_index), streams.test.for_client(client, task_index)


def test_classes_are_split_into_tasks() -> None:
    tasks = make().class_to_task
    assert np.bincount(tasks[tasks != NO_TASK]).tolist() == [5] * 5
    assert (tasks == NO_TASK).sum() == 5
    assert not np.array_equal(tasks, make(seed=1).class_to_task)
    listed = make(CONFIG.model_copy(update={"split": "listed"})).class_to_task
    assert listed.tolist() == [*np.repeat(np.arange(5), 5), *[NO_TASK] * 5]


def test_every_client_has_every_task_in_its_own_order() -> None:
    order = make().task_order
    assert all(sorted(row) == list(range(5)) for row in order.tolist())
    assert len({tuple(row) for row in order.tolist()}) > 1
    common = make(CONFIG.model_copy(update={"order": "common"})).task_order
    assert len({tuple(row) for row in common.tolist()}) == 1


def test_a_client_holds_some_classes_of_a_task_and_a_share_of_each() -> None:
    streams = make()
    class_counts, shares = set(), []
    for client in range(CLIENTS):
        for task_index in range(streams.num_tasks):
            train, test = samples_of(streams, client, task_index)
            classes, counts = np.unique(TRAIN_LABELS[train], return_counts=True)
            assert set(streams.class_to_task[classes]) == {streams.task_order[client, task_index]}
            class_counts.add(len(classes))
            shares += (counts / TRAIN).tolist()
            assert len(set(train.tolist())) == len(train)
            # Its test images are all those of its classes.
            assert np.array_equal(np.sort(test), np.flatnonzero(np.isin(TEST_LABELS, classes)))
    assert class_counts == {2, 3, 4}
    assert min(shares) >= 0.05
    assert max(shares) <= 0.1
    assert 0.06 < np.mean(shares) < 0.09


def test_class_counts_are_over_all_tasks() -> None:
    streams = make()
    for client in range(CLIENTS):
        images = np.concatenate([samples_of(streams, client, task_index)[0] for task_index in range(streams.num_tasks)])
        assert np.array_equal(streams.class_counts[client], np.bincount(TRAIN_LABELS[images], minlength=CLASSES))


def test_samples_of_a_task_depend_on_client_and_seed_only() -> None:
    """Neither the number of clients nor the order of tasks changes the samples of a client's task."""
    few, many = make(clients=3), make(clients=9)
    common = make(CONFIG.model_copy(update={"order": "common"}))
    for client in range(3):
        for task_index in range(few.num_tasks):
            train, _ = samples_of(few, client, task_index)
            assert np.array_equal(train, samples_of(many, client, task_index)[0])
            position = int(np.flatnonzero(common.task_order[client] == few.task_order[client, task_index])[0])
            assert np.array_equal(train, samples_of(common, client, position)[0])
    assert not np.array_equal(samples_of(few, 0, 0)[0], samples_of(make(seed=1, clients=3), 0, 0)[0])


def test_client_holds_at_least_one_image_of_a_small_class_and_none_of_an_empty_one() -> None:
    labels = np.array([0, 0, 1, 1, 1, 3])
    config = TasksConfig(count=2, classes=2, per_client=(2, 2), share=(0.05, 0.05), split="listed")
    streams = make_task_streams(config, 1, 0, labels, labels, 4)
    sizes = {
        int(streams.task_order[0, task_index]): len(samples_of(streams, 0, task_index)[0]) for task_index in range(2)
    }
    assert sizes == {0: 2, 1: 1}


def test_too_many_tasks_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data\.tasks\.count = 7: .* need 35 classes, the data has 30"):
        make(TasksConfig(count=7, classes=5))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"classes": 3}, r"data\.tasks\.per_client = \[2, 5\]: .* at most 3"),
        ({"per_client": (4, 3)}, r"per_client = \[4, 3\]"),
        ({"per_client": (0, 3)}, r"per_client = \[0, 3\]"),
        ({"share": (0.5, 1.2)}, r"share = \[0.5, 1.2\]: .* at most 1"),
    ],
)
def test_bounds_out_of_order_or_range_are_rejected(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TasksConfig.model_validate(table)


def test_saved_task_streams_are_loaded_unchanged_or_rejected(tmp_path: Path) -> None:
    streams = make()
    save_task_streams(streams, CONFIG, TRAIN_LABELS, TEST_LABELS, tmp_path)
    again = load_task_streams(tmp_path, TRAIN_LABELS, TEST_LABELS)
    assert again.fingerprint() == streams.fingerprint() != make(seed=1).fingerprint()
    assert np.array_equal(again.class_counts, streams.class_counts)
    assert np.array_equal(samples_of(again, 3, 2)[0], samples_of(streams, 3, 2)[0])
    with pytest.raises(DataError, match="made for other images"):
        load_task_streams(tmp_path, TRAIN_LABELS[::-1], TEST_LABELS)
    file = tmp_path / TASKS_ARRAYS
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF  # in the counts' last number
    data[-9000] ^= 0xFF
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match="damaged"):
        load_task_streams(tmp_path, TRAIN_LABELS, TEST_LABELS)
