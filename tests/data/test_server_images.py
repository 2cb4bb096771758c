"""A server's own folder of images: nothing is trained with them, so all of them are test images."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_sets import grey_levels, own_images, write_images, write_parquet
from vitfleet.config import load_config
from vitfleet.config.schema import DataConfig
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import DataError, UserError


def write_classes(folder: Path, count: int = 10) -> None:
    for name, grey in (("ant", 30), ("cat", 60)):
        write_images(folder / name, count, grey)


def test_all_images_of_a_folder_count(tmp_path: Path) -> None:
    write_classes(tmp_path)
    data = load_dataset(own_images(tmp_path, test_only=True))
    assert data.test.labels.tolist() == [0] * 10 + [1] * 10
    assert data.classes == ("ant", "cat")
    assert len(load_dataset(own_images(tmp_path)).test) == 4  # where it trains, a share is held out


def test_all_images_of_a_parquet_file_count(tmp_path: Path) -> None:
    write_parquet(tmp_path / "common.parquet", [0, 1] * 5)
    data = load_dataset(own_images(tmp_path / "common.parquet", test_only=True))
    assert grey_levels(data.test.images) == list(range(10))


def test_test_split_of_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "test", 3)
    assert len(load_dataset(own_images(tmp_path, test_only=True)).test) == 6


def test_folder_with_test_images_alone(tmp_path: Path) -> None:
    write_classes(tmp_path / "test", 3)
    data = load_dataset(own_images(tmp_path, test_only=True))
    assert data.classes == ("ant", "cat")
    assert len(data.test) == 6
    with pytest.raises(DataError, match="no folder 'train' beside it"):
        load_dataset(own_images(tmp_path))


def test_named_set_is_divided_as_for_its_devices() -> None:
    own, shared = (load_dataset(DataConfig(limit=100, test_only=only)) for only in (True, False))
    assert own.test.labels.tolist() == shared.test.labels.tolist()
    assert len(own.test) == 20


def test_simulation_trains_with_its_images() -> None:
    with pytest.raises(UserError, match=r"data\.test_only = true: needs fleet\.kind = flower"):
        load_config("digits", {"data.test_only": True})
