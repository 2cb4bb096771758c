"""Saved partitions: equal after loading, or rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vitfleet.config.registry import PARTITIONS
from vitfleet.data.partitions.assign import make_partition
from vitfleet.data.partitions.client_indices import ClientIndices, Partition
from vitfleet.data.partitions.partitioners import FilePartition
from vitfleet.data.partitions.saved import load_partition, save_partition
from vitfleet.errors import ConfigError, DataError

CONFIG = PARTITIONS.make_params("dirichlet", beta=0.05)
TRAIN = np.arange(200, dtype=np.int64) % 5
TEST = np.arange(50, dtype=np.int64) % 5
NAMES = ("ant", "bee", "crow", "dög", "elk")


@pytest.fixture
def partition() -> Partition:
    return make_partition(CONFIG, 20, 0, TRAIN, TEST, 5)


@pytest.fixture
def saved(partition: Partition, tmp_path: Path) -> Path:
    return save_partition(partition, CONFIG, TRAIN, TEST, NAMES, tmp_path / "run")


def partition_from_file(path: Path, clients: int = 20, train: object = TRAIN, test: object = TEST) -> Partition:
    return make_partition(
        FilePartition(path=str(path)), clients, 99, np.asarray(train), np.asarray(test), num_classes=5
    )


def test_saved_partition_is_loaded_unchanged(partition: Partition, saved: Path) -> None:
    for loaded in (
        load_partition(saved)[0],
        load_partition(saved.parent)[0],
        partition_from_file(saved),
        partition_from_file(saved.parent),
    ):
        assert loaded.fingerprint() == partition.fingerprint()
        np.testing.assert_array_equal(loaded.train.indices, partition.train.indices)
        np.testing.assert_array_equal(loaded.test.offsets, partition.test.offsets)
        np.testing.assert_array_equal(loaded.class_counts, partition.class_counts)


def test_equal_partitions_are_saved_as_equal_files(partition: Partition, saved: Path, tmp_path: Path) -> None:
    other = save_partition(partition, CONFIG, TRAIN, TEST, NAMES, tmp_path / "other")
    assert other.read_bytes() == saved.read_bytes()
    assert sorted(file.name for file in saved.parent.iterdir()) == ["partition.json", "partition.safetensors"]


def test_summary_holds_sizes_classes_and_hash(partition: Partition, saved: Path) -> None:
    summary = json.loads((saved.parent / "partition.json").read_text())
    sizes = partition.train.sizes()
    assert summary["partition"] == {"kind": "dirichlet", "beta": 0.05, "min_samples": 0}
    assert (summary["clients"], summary["train_samples"], summary["test_samples"]) == (20, 200, 50)
    assert summary["classes"] == list(NAMES)
    assert summary["sizes"] == {"min": sizes.min(), "median": np.median(sizes), "max": sizes.max()}
    assert summary["empty_clients"] == np.count_nonzero(sizes == 0) > 0
    assert summary["sha256"] == partition.fingerprint()
    assert summary["counts"] == partition.class_counts.tolist()


def test_fingerprint_depends_on_offsets_and_order() -> None:
    def fingerprint(train: list[int], offsets: list[int]) -> str:
        indices = ClientIndices(np.array(train), np.array(offsets))
        return Partition(indices, indices, np.zeros((2, 1), np.int64)).fingerprint()

    first = fingerprint([0, 1, 2], [0, 1, 3])
    assert fingerprint([0, 1, 2], [0, 2, 3]) != first
    assert fingerprint([0, 2, 1], [0, 1, 3]) != first


def test_load_rejects_a_damaged_byte(saved: Path) -> None:
    whole = saved.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for position in range(start, len(whole), 101):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            load_partition(saved)


def test_load_rejects_swapped_images(partition: Partition, saved: Path) -> None:
    # Every image is still assigned once and every size is the same: only the hash differs.
    indices = partition.train.indices
    swapped = indices.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    whole = saved.read_bytes()
    assert whole.count(indices.tobytes()) == 1
    saved.write_bytes(whole.replace(indices.tobytes(), swapped.tobytes()))
    with pytest.raises(DataError, match="damaged"):
        load_partition(saved)


@pytest.mark.parametrize("keep", [0, 5, 200, -8])
def test_load_rejects_a_truncated_file(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(DataError, match="damaged"):
        partition_from_file(saved)


def test_load_rejects_a_partition_that_misses_an_image(partition: Partition, tmp_path: Path) -> None:
    # The hash is right, but image 0 is assigned twice and another one not at all.
    indices = partition.train.indices.copy()
    indices[indices == 1] = 0
    wrong = replace(partition, train=ClientIndices(indices, partition.train.offsets))
    with pytest.raises(DataError, match="damaged"):
        load_partition(save_partition(wrong, CONFIG, TRAIN, TEST, NAMES, tmp_path))


def test_file_partition_rejects_another_number_of_clients(saved: Path) -> None:
    with pytest.raises(ConfigError, match="must be 20") as caught:
        partition_from_file(saved, clients=10)
    assert caught.value.key == "fleet.clients"


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (TRAIN[:-1], TEST, "200 training images, but the data has 199"),
        (TRAIN, TEST[:-1], "50 test images, but the data has 49"),
        (TRAIN[::-1], TEST, "labels differ"),
        (TRAIN, TEST[::-1], "labels differ"),
    ],
)
def test_file_partition_rejects_other_data(saved: Path, train: object, test: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        partition_from_file(saved, train=train, test=test)
    assert caught.value.key == "data.partition.path"


def test_file_partition_rejects_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no partition there"):
            partition_from_file(path)
        with pytest.raises(DataError):
            load_partition(path)
