"""A device's own images: dealt and read back they are the shard they were; classes are found by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from conftest import MakeConfig
from vitfleet.data import local_dataset as own_room
from vitfleet.data.export import export_clients
from vitfleet.data.images import DataSet
from vitfleet.data.local_dataset import DataSpec, LocalDataset, load_local
from vitfleet.data.partition import Partition, partition_dataset
from vitfleet.data.sources import load
from vitfleet.errors import DataError

CLASSES = ("cat", "dog", "owl")
FORM = DataSpec(CLASSES, 3, 8, 0.2, 0.0)


def dealt(config: MakeConfig, clients: int, *more: str) -> tuple[DataSet, Partition]:
    made = config(f"fleet.clients={clients}", f"fleet.per_round={clients}", *more)
    data = load(made.data)
    return data, partition_dataset(made.data.partition, clients, 0, data)


def test_what_was_dealt_is_read_back_in_its_order(tiny_config: MakeConfig, tmp_path: Path) -> None:
    data, partition = dealt(tiny_config, 12, "data.partition.beta=0.05")
    names = [f"device-{client}" for client in range(12)]
    export_clients(data, (partition.train, partition.test), names, tmp_path)
    sizes = []
    for client, name in enumerate(names):
        own = load_local(tmp_path / name, DataSpec(data.classes, 1, data.train.image_size, 0.2, 0.0))
        for mine, whole, deal in ((own.train, data.train, partition.train), (own.test, data.test, partition.test)):
            index = torch.from_numpy(deal.for_client(client))
            assert torch.equal(mine.images, whole.images[index])
            assert torch.equal(mine.labels, whole.labels[index])
        sizes.append(len(own.test))
    assert 0 in sizes  # a device without test images can be read too


def picture(path: Path, colour: tuple[int, int, int], side: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).save(path)


def test_a_device_with_some_of_the_classes(tmp_path: Path) -> None:
    for number in range(5):
        picture(tmp_path / "owl" / f"{number}.png", (200, 0, 0))
        picture(tmp_path / "cat" / f"{number}.png", (0, 200, 0), side=30)
    own = load_local(tmp_path, FORM)
    assert own.classes == CLASSES
    assert own.train.images.shape == (8, 3, 8, 8)  # the run's size, whatever the pictures'
    assert sorted(own.train.labels.tolist()) == [0, 0, 0, 0, 2, 2, 2, 2]
    assert sorted(own.test.labels.tolist()) == [0, 2]
    red = own.train.images[:, 0].float().mean(dim=(1, 2)) > 100
    assert torch.equal(red, own.train.labels == 2)


def test_a_class_that_the_run_does_not_know_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "0.png", (0, 0, 0))
    picture(tmp_path / "yak" / "0.png", (0, 0, 0))
    with pytest.raises(DataError, match=r"no class 'yak'; it knows cat, dog, owl"):
        load_local(tmp_path, FORM)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        load_local(tmp_path / "nowhere", FORM)


def test_images_are_decoded_once_until_one_of_them_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        picture(tmp_path / "photos" / "cat" / f"{number}.png", (200, 0, 0))
    first = LocalDataset(tmp_path / "photos", tmp_path / "kept").load(FORM)
    read: list[Path] = []

    def counted(path: Path, form: DataSpec) -> DataSet:
        read.append(path)
        return load_local(path, form)

    monkeypatch.setattr(own_room, "load_local", counted)
    again = LocalDataset(tmp_path / "photos", tmp_path / "kept").load(FORM)
    assert not read
    for mine, theirs in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(mine.images, theirs.images)
        assert torch.equal(mine.labels, theirs.labels)
    picture(tmp_path / "photos" / "dog" / "0.png", (0, 0, 200))
    assert len(LocalDataset(tmp_path / "photos", tmp_path / "kept").load(FORM).train) == len(first.train) + 1
    LocalDataset(tmp_path / "photos", tmp_path / "kept").load(replace(FORM, image_size=4))
    assert len(read) == 2
    kept = list((tmp_path / "kept").iterdir())
    assert len(kept) == 1  # what is no longer true is not kept
    kept[0].write_bytes(b"half a file")
    LocalDataset(tmp_path / "photos", tmp_path / "kept").load(replace(FORM, image_size=4))
    assert len(read) == 3
