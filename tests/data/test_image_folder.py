"""Images in folders: layouts, hold-outs, damaged files, sizes and colours."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from made_sets import distinct, fill, own, picture, put, shades, write_parquet
from vitfleet.config.schema import DataConfig
from vitfleet.data.sources import load
from vitfleet.errors import DataError

pytestmark = pytest.mark.usefixtures("nowhere")


# Image folders


def test_folder_with_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        fill(tmp_path / split / "cat", count, 40)
        fill(tmp_path / split / "ant", count, 200)
    put(tmp_path / "train" / "cat" / ".DS_Store", b"x")
    put(tmp_path / "train" / "cat" / "._000.jpg", b"x")
    put(tmp_path / "train" / "cat" / "notes.txt", b"x")
    put(tmp_path / "train" / ".cache" / "000.jpg", picture(1))
    put(tmp_path / "train" / "cat" / "LAST.JPEG", picture(40, kind="JPEG"))
    data = load(own(tmp_path))
    assert data.name == "mine"
    assert data.classes == ("ant", "cat")
    assert data.train.labels.tolist() == [0] * 3 + [1] * 4
    assert shades(data.train.images) == [200] * 3 + [40] * 4
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.train.sources is None
    assert data.skipped == ()


def test_folder_without_splits_holds_out_a_share_of_every_class(tmp_path: Path) -> None:
    for name, count in (("a", 10), ("b", 20), ("c", 1)):
        fill(tmp_path / name, count)
    data = load(own(tmp_path, test_share=0.3))
    assert data.train.labels.bincount(minlength=3).tolist() == [7, 14, 1]
    assert data.test.labels.bincount(minlength=3).tolist() == [3, 6, 0]


def test_hold_out_parts_the_set_and_repeats(tmp_path: Path) -> None:
    write_parquet(tmp_path / "all.parquet", [0, 1] * 20)
    first, again = load(own(tmp_path)), load(own(tmp_path))
    held = shades(first.test.images)
    assert held == shades(again.test.images)
    assert sorted(held + shades(first.train.images)) == list(range(40))
    assert held != list(range(8))  # drawn, not cut off


def test_wrapper_folders_of_an_archive_are_stepped_into(tmp_path: Path) -> None:
    for name in ("beach", "forest"):
        put(tmp_path / "ucmerced" / "UCMerced_LandUse" / "Images" / name / "0.tif", picture(9, kind="TIFF"))
        put(tmp_path / "ucmerced" / "UCMerced_LandUse" / "Images" / name / "1.tif", picture(9, kind="TIFF"))
    data = load(DataConfig(name="ucmerced", dir=str(tmp_path)))
    assert data.classes == ("beach", "forest")


def test_a_level_above_the_classes_is_the_source(tmp_path: Path) -> None:
    for client in ("client9", "client10"):
        fill(tmp_path / "train" / client / "cat", 2)
        fill(tmp_path / "train" / client / "dog", 1)
    fill(tmp_path / "test" / "client10" / "dog", 1)
    data = load(own(tmp_path))
    assert data.classes == ("cat", "dog")
    assert data.train.sources is not None
    assert data.test.sources is not None
    assert data.train.sources.tolist() == [1, 1, 1, 0, 0, 0]  # files by name, numbers in natural order
    assert data.train.labels.tolist() == [0, 0, 1, 0, 0, 1]
    assert data.test.sources.tolist() == [1]


def test_test_class_unknown_to_train_is_named(tmp_path: Path) -> None:
    fill(tmp_path / "train" / "cat", 2)
    fill(tmp_path / "test" / "cat", 1)
    fill(tmp_path / "test" / "zebra", 1)
    with pytest.raises(DataError, match="zebra"):
        load(own(tmp_path))


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "train" / "cat", 2)
    fill(tmp_path / "train" / "client" / "dog", 2)
    with pytest.raises(DataError, match=r"mixes two layouts.*'cat'.*'client'"):
        load(own(tmp_path))


def test_test_without_train_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "test" / "cat", 2)
    with pytest.raises(DataError, match="no folder 'train'"):
        load(own(tmp_path))


def test_class_folder_that_is_no_source_is_refused(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        fill(tmp_path / "train" / name / "images", 2)
    with pytest.raises(DataError, match="'images'"):
        load(own(tmp_path))


def test_empty_class_is_legal_but_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path / "cat", 3)
    (tmp_path / "yeti").mkdir()
    with caplog.at_level(logging.WARNING):
        data = load(own(tmp_path))
    assert data.classes == ("cat", "yeti")
    assert "1 classes have no training image: yeti" in caplog.text


@pytest.mark.parametrize("inner", ["", "cat", "train/cat"])
def test_no_image_at_all(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError, match="neither parquet files nor images"):
        load(own(tmp_path))


def test_path_that_is_not_there_or_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path = .*no such file or folder"):
        load(own(tmp_path / "absent"))
    put(tmp_path / "a.txt", b"x")
    with pytest.raises(DataError, match="neither a parquet file nor a folder"):
        load(own(tmp_path / "a.txt"))


def test_path_under_the_default_name_is_not_taken_for_digits(tmp_path: Path) -> None:
    fill(tmp_path / "pets" / "cat", 2)
    data = load(DataConfig(path=str(tmp_path / "pets")))
    assert data.name == "pets"
    assert data.train.channels == 3


# Damage, sizes, colours


def test_corrupt_images_are_counted_and_named(tmp_path: Path) -> None:
    fill(tmp_path / "train" / "cat", 9)
    put(tmp_path / "train" / "cat" / "broken.jpg", picture(1, kind="JPEG")[:100])
    fill(tmp_path / "test" / "cat", 1)
    data = load(own(tmp_path, max_corrupt=0.1))
    assert data.skipped == ("train/cat/broken.jpg",)
    assert len(data.train) == 9
    with pytest.raises(DataError, match=r"mine \(train\): 1 of 10 .*train/cat/broken\.jpg"):
        load(own(tmp_path, max_corrupt=0.05))


def test_nothing_readable_says_which_set(tmp_path: Path) -> None:
    put(tmp_path / "cat" / "a.jpg", b"x")
    put(tmp_path / "cat" / "b.jpg", b"x")
    with pytest.raises(DataError, match=r"mine \(train\): none of"):
        load(own(tmp_path, max_corrupt=1))


def test_mixed_sizes_and_greys_are_stored_alike(tmp_path: Path) -> None:
    for i, (side, mode) in enumerate([(16, "RGB"), (16, "L"), (16, "RGB"), (30, "RGB"), (7, "L")]):
        put(tmp_path / "train" / "a" / f"{i}.png", picture(50, side, mode))
    put(tmp_path / "test" / "a" / "0.png", picture(60, 99, "L"))
    data = load(own(tmp_path))
    assert data.train.images.shape == (5, 3, 16, 16)
    assert distinct(data.train.images) == [50]
    assert data.test.images.shape == (1, 3, 16, 16)
