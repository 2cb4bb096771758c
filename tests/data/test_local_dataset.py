"""The images of one device: export, import, class names, cache."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from conftest import MakeConfig
from made_sets import write_file
from vitfleet.data.export import export_clients
from vitfleet.data.images import DataSet
from vitfleet.data.partitions.assign import partition_dataset
from vitfleet.data.partitions.client_indices import Partition
from vitfleet.data.sources import local
from vitfleet.data.sources.load import load_dataset
from vitfleet.data.sources.local import DataSpec, LocalDataset, load_local
from vitfleet.errors import DataError, UserError

CLASSES = ("cat", "dog", "owl")
SPEC = DataSpec(CLASSES, 3, 8, 0.2, 0.0)


def load_and_partition(config: MakeConfig, clients: int, *overrides: str) -> tuple[DataSet, Partition]:
    made = config(f"fleet.clients={clients}", f"fleet.per_round={clients}", *overrides)
    data = load_dataset(made.data)
    return data, partition_dataset(made.data.partition, clients, 0, data)


def test_exported_images_are_read_back_in_order(tiny_config: MakeConfig, tmp_path: Path) -> None:
    data, partition = load_and_partition(tiny_config, 12, "data.partition.beta=0.05")
    names = [f"device-{client}" for client in range(12)]
    export_clients(data, (partition.train, partition.test), names, tmp_path)
    sizes = []
    for client, name in enumerate(names):
        local = load_local(tmp_path / name, DataSpec(data.classes, 1, data.train.image_size, 0.2, 0.0))
        for images, whole, indices in (
            (local.train, data.train, partition.train),
            (local.test, data.test, partition.test),
        ):
            index = torch.from_numpy(indices.for_client(client))
            assert torch.equal(images.images, whole.images[index])
            assert torch.equal(images.labels, whole.labels[index])
        sizes.append(len(local.test))
    assert 0 in sizes  # a device without test images can be read, too


def write_image(path: Path, colour: tuple[int, int, int], image_size: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (image_size, image_size), colour).save(path)


def test_device_with_some_of_the_runs_classes(tmp_path: Path) -> None:
    for number in range(5):
        write_image(tmp_path / "owl" / f"{number}.png", (200, 0, 0))
        write_image(tmp_path / "cat" / f"{number}.png", (0, 200, 0), image_size=30)
    local = load_local(tmp_path, SPEC)
    assert local.classes == CLASSES
    assert local.train.images.shape == (8, 3, 8, 8)  # the run's size, whatever the files' size
    assert sorted(local.train.labels.tolist()) == [0, 0, 0, 0, 2, 2, 2, 2]
    assert sorted(local.test.labels.tolist()) == [0, 2]
    red = local.train.images[:, 0].float().mean(dim=(1, 2)) > 100
    assert torch.equal(red, local.train.labels == 2)


def test_class_that_the_run_does_not_have_is_rejected(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "0.png", (0, 0, 0))
    write_image(tmp_path / "yak" / "0.png", (0, 0, 0))
    with pytest.raises(DataError, match=r"no class 'yak'; its classes are cat, dog, owl"):
        load_local(tmp_path, SPEC)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        load_local(tmp_path / "nowhere", SPEC)


def test_images_are_decoded_once_until_one_of_them_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_image(tmp_path / "photos" / "cat" / f"{number}.png", (200, 0, 0))
    first = LocalDataset(tmp_path / "photos", tmp_path / "cache").load(SPEC)
    read: list[Path] = []

    def counting_load(path: Path, spec: DataSpec) -> DataSet:
        read.append(path)
        return load_local(path, spec)

    monkeypatch.setattr(local, "load_local", counting_load)
    again = LocalDataset(tmp_path / "photos", tmp_path / "cache").load(SPEC)
    assert not read
    for before, after in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(before.images, after.images)
        assert torch.equal(before.labels, after.labels)
    write_image(tmp_path / "photos" / "dog" / "0.png", (0, 0, 200))
    assert len(LocalDataset(tmp_path / "photos", tmp_path / "cache").load(SPEC).train) == len(first.train) + 1
    LocalDataset(tmp_path / "photos", tmp_path / "cache").load(replace(SPEC, image_size=4))
    assert len(read) == 2
    cached = list((tmp_path / "cache").iterdir())
    assert len(cached) == 1  # outdated files are deleted
    cached[0].write_bytes(b"half a file")
    LocalDataset(tmp_path / "photos", tmp_path / "cache").load(replace(SPEC, image_size=4))
    assert len(read) == 3


def test_images_exported_as_folders_are_the_same(tiny_config: MakeConfig, tmp_path: Path) -> None:
    data, partition = load_and_partition(tiny_config, 12, "data.partition.beta=0.05")
    names = [f"device-{client}" for client in range(12)]
    assigned = (partition.train, partition.test)
    export_clients(data, assigned, names, tmp_path, "folders")
    sizes = []
    spec = DataSpec(data.classes, 1, data.train.image_size, 0.2, 0.0)
    for client, name in enumerate(names):
        if not len(partition.train.for_client(client)):
            with pytest.raises(DataError, match=f"{name} holds neither parquet files nor images"):
                load_local(tmp_path / name, spec)
            continue
        local = load_local(tmp_path / name, spec)
        for images, whole, indices in zip((local.train, local.test), (data.train, data.test), assigned, strict=True):
            expected = whole.take(torch.from_numpy(indices.for_client(client)))
            order = torch.argsort(expected.labels, stable=True)  # folders are read class by class
            assert torch.equal(images.images, expected.images[order])
            assert torch.equal(images.labels, expected.labels[order])
        sizes.append(len(local.test))
    assert 0 in sizes  # an empty folder `test` is an empty split, not a missing one
    with pytest.raises(UserError, match="device-0: exists already; remove it"):
        export_clients(data, assigned, names, tmp_path, "folders")


def test_class_that_cannot_be_a_folder_is_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    data, partition = load_and_partition(tiny_config, 2)
    data = replace(data, classes=("a/b", *data.classes[1:]))
    with pytest.raises(UserError, match="class 'a/b' cannot be a folder's name; use --to parquet"):
        export_clients(data, (partition.train, partition.test), ["x", "y"], tmp_path, "folders")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "train.parquet", b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow; .*pip install -e '.\[parquet\]'"):
        load_local(tmp_path, SPEC)
