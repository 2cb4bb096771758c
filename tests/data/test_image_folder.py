"""Image folders: layouts, hold-outs, damaged files, sizes and colours."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from made_sets import encoded_image, grey_levels, own_images, unique_values, write_file, write_images, write_parquet
from vitfleet.config.schema import DataConfig
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import DataError

pytestmark = pytest.mark.usefixtures("isolated_data")


# Image folders


def test_folder_with_train_and_val_is_read_as_two_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        write_images(tmp_path / split / "cat", count, 40)
        write_images(tmp_path / split / "ant", count, 200)
    write_file(tmp_path / "train" / "cat" / ".DS_Store", b"x")
    write_file(tmp_path / "train" / "cat" / "._000.jpg", b"x")
    write_file(tmp_path / "train" / "cat" / "notes.txt", b"x")
    write_file(tmp_path / "train" / ".cache" / "000.jpg", encoded_image(1))
    write_file(tmp_path / "train" / "cat" / "LAST.JPEG", encoded_image(40, kind="JPEG"))
    data = load_dataset(own_images(tmp_path))
    assert data.name == "mine"
    assert data.classes == ("ant", "cat")
    assert data.train.labels.tolist() == [0] * 3 + [1] * 4
    assert grey_levels(data.train.images) == [200] * 3 + [40] * 4
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.train.sources is None
    assert data.skipped == ()


def test_folder_without_splits_holds_out_a_share_of_every_class(tmp_path: Path) -> None:
    for name, count in (("a", 10), ("b", 20), ("c", 1)):
        write_images(tmp_path / name, count)
    data = load_dataset(own_images(tmp_path, test_share=0.3))
    assert data.train.labels.bincount(minlength=3).tolist() == [7, 14, 1]
    assert data.test.labels.bincount(minlength=3).tolist() == [3, 6, 0]


def test_holdout_is_drawn_and_reproducible(tmp_path: Path) -> None:
    write_parquet(tmp_path / "all.parquet", [0, 1] * 20)
    first, again = load_dataset(own_images(tmp_path)), load_dataset(own_images(tmp_path))
    held = grey_levels(first.test.images)
    assert held == grey_levels(again.test.images)
    assert sorted(held + grey_levels(first.train.images)) == list(range(40))
    assert held != list(range(8))  # drawn, not cut off


def test_wrapper_folders_of_an_archive_are_skipped(tmp_path: Path) -> None:
    for name in ("beach", "forest"):
        write_file(
            tmp_path / "ucmerced" / "UCMerced_LandUse" / "Images" / name / "0.tif", encoded_image(9, kind="TIFF")
        )
        write_file(
            tmp_path / "ucmerced" / "UCMerced_LandUse" / "Images" / name / "1.tif", encoded_image(9, kind="TIFF")
        )
    data = load_dataset(DataConfig(name="ucmerced", dir=str(tmp_path)))
    assert data.classes == ("beach", "forest")


def test_folder_level_above_the_classes_is_the_source(tmp_path: Path) -> None:
    for client in ("client9", "client10"):
        write_images(tmp_path / "train" / client / "cat", 2)
        write_images(tmp_path / "train" / client / "dog", 1)
    write_images(tmp_path / "test" / "client10" / "dog", 1)
    data = load_dataset(own_images(tmp_path))
    assert data.classes == ("cat", "dog")
    assert data.train.sources is not None
    assert data.test.sources is not None
    assert data.train.sources.tolist() == [1, 1, 1, 0, 0, 0]  # files by name, numbers in natural order
    assert data.train.labels.tolist() == [0, 0, 1, 0, 0, 1]
    assert data.test.sources.tolist() == [1]


def test_test_class_that_is_not_in_train_is_rejected(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "cat", 2)
    write_images(tmp_path / "test" / "cat", 1)
    write_images(tmp_path / "test" / "zebra", 1)
    with pytest.raises(DataError, match="zebra"):
        load_dataset(own_images(tmp_path))


def test_mixed_layouts_are_rejected(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "cat", 2)
    write_images(tmp_path / "train" / "client" / "dog", 2)
    with pytest.raises(DataError, match=r"mixes two layouts.*'cat'.*'client'"):
        load_dataset(own_images(tmp_path))


def test_test_folder_without_train_folder_is_rejected(tmp_path: Path) -> None:
    write_images(tmp_path / "test" / "cat", 2)
    with pytest.raises(DataError, match="no folder 'train'"):
        load_dataset(own_images(tmp_path))


def test_single_common_inner_folder_is_not_read_as_a_class(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        write_images(tmp_path / "train" / name / "images", 2)
    with pytest.raises(DataError, match="'images'"):
        load_dataset(own_images(tmp_path))


def test_empty_class_is_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "cat", 3)
    (tmp_path / "yeti").mkdir()
    with caplog.at_level(logging.WARNING):
        data = load_dataset(own_images(tmp_path))
    assert data.classes == ("cat", "yeti")
    assert "1 classes have no training image: yeti" in caplog.text


@pytest.mark.parametrize("inner", ["", "cat", "train/cat"])
def test_folder_without_images_is_rejected(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError, match="neither parquet files nor images"):
        load_dataset(own_images(tmp_path))


def test_missing_path_and_other_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path = .*no such file or folder"):
        load_dataset(own_images(tmp_path / "absent"))
    write_file(tmp_path / "a.txt", b"x")
    with pytest.raises(DataError, match="neither a parquet file nor a folder"):
        load_dataset(own_images(tmp_path / "a.txt"))


def test_path_with_the_default_name_is_not_read_as_digits(tmp_path: Path) -> None:
    write_images(tmp_path / "pets" / "cat", 2)
    data = load_dataset(DataConfig(path=str(tmp_path / "pets")))
    assert data.name == "pets"
    assert data.train.channels == 3


# Damage, sizes, colours


def test_corrupt_images_are_skipped_up_to_max_corrupt(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "cat", 9)
    write_file(tmp_path / "train" / "cat" / "broken.jpg", encoded_image(1, kind="JPEG")[:100])
    write_images(tmp_path / "test" / "cat", 1)
    data = load_dataset(own_images(tmp_path, max_corrupt=0.1))
    assert data.skipped == ("train/cat/broken.jpg",)
    assert len(data.train) == 9
    with pytest.raises(DataError, match=r"mine \(train\): 1 of 10 .*train/cat/broken\.jpg"):
        load_dataset(own_images(tmp_path, max_corrupt=0.05))


def test_error_of_an_unreadable_split_names_the_data_set(tmp_path: Path) -> None:
    write_file(tmp_path / "cat" / "a.jpg", b"x")
    write_file(tmp_path / "cat" / "b.jpg", b"x")
    with pytest.raises(DataError, match=r"mine \(train\): none of"):
        load_dataset(own_images(tmp_path, max_corrupt=1))


def test_images_of_mixed_sizes_and_modes_are_stored_in_one_shape(tmp_path: Path) -> None:
    for i, (image_size, mode) in enumerate([(16, "RGB"), (16, "L"), (16, "RGB"), (30, "RGB"), (7, "L")]):
        write_file(tmp_path / "train" / "a" / f"{i}.png", encoded_image(50, image_size, mode))
    write_file(tmp_path / "test" / "a" / "0.png", encoded_image(60, 99, "L"))
    data = load_dataset(own_images(tmp_path))
    assert data.train.images.shape == (5, 3, 16, 16)
    assert unique_values(data.train.images) == [50]
    assert data.test.images.shape == (1, 3, 16, 16)
