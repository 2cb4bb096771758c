"""Finding and reading sets: layouts, names, hold-outs, limits, and what is said when nothing is there."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vitfleet.config.schema import DataConfig
from vitfleet.data import tables
from vitfleet.data.sources import load
from vitfleet.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds data, or waits for a hub, by accident."""
    monkeypatch.delenv("VITFLEET_DATA", raising=False)
    monkeypatch.setattr(tables, "_why_unreachable", lambda endpoint: f"{endpoint} cannot be reached (a test)")


def picture(shade: int, side: int = 8, mode: str = "RGB", kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (side, side), (shade, shade, shade) if mode == "RGB" else shade).save(stream, kind)
    return stream.getvalue()


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def fill(folder: Path, count: int, shade: int = 100) -> None:
    for i in range(count):
        put(folder / f"{i:03}.jpg", picture(shade, kind="JPEG"))


def write_parquet(
    path: Path,
    labels: list[int] | list[str],
    names: list[str] | None = None,
    label: str = "label",
    image: str = "image",
    extra: dict[str, list[int] | list[str]] | None = None,
    first_shade: int = 0,
) -> None:
    """Write a file as the hub would; image i has shade ``first_shade + i``."""
    shots = [{"bytes": picture((first_shade + i) % 256), "path": None} for i in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {image: pa.array(shots, kind), label: pa.array(labels)}
    columns |= {name: pa.array(values) for name, values in (extra or {}).items()}
    table = pa.table(columns)
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def shades(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def distinct(values: torch.Tensor) -> list[int]:
    return sorted(set(values.flatten().tolist()))


def own(path: Path, **more: object) -> DataConfig:
    return DataConfig.model_validate({"name": "mine", "path": str(path), **more})


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


# Parquet


def test_parquet_files_named_as_on_the_hub(tmp_path: Path) -> None:
    root = tmp_path / "cifar10"
    names = ["plane", "car", "bird"]
    write_parquet(root / "data" / "train-00000-of-00002.parquet", [2, 0], names)
    write_parquet(root / "data" / "train-00001-of-00002.parquet", [1], names, first_shade=10)
    write_parquet(root / "data" / "test-00000-of-00001.parquet", [1, 1], names, first_shade=20)
    data = load(DataConfig(name="cifar10", dir=str(tmp_path)))
    assert data.classes == ("plane", "car", "bird")
    assert data.train.labels.tolist() == [2, 0, 1]
    assert shades(data.train.images) == [0, 1, 10]
    assert data.test.labels.tolist() == [1, 1]
    assert shades(data.test.images) == [20, 21]


def test_a_hub_download_with_a_folder_of_its_own_name(tmp_path: Path) -> None:
    root = tmp_path / "cifar10"
    write_parquet(root / "plain_text" / "train-00000-of-00001.parquet", [0, 1], image="img")
    write_parquet(root / "plain_text" / "test-00000-of-00001.parquet", [0], image="img")
    put(root / "README.md", b"card")
    assert len(load(DataConfig(name="cifar10", dir=str(tmp_path))).train) == 2
    write_parquet(root / "other" / "train.parquet", [0])
    with pytest.raises(DataError, match=r"several folders \(other, plain_text\)"):
        load(DataConfig(name="cifar10", dir=str(tmp_path)))


def test_the_variable_stands_in_for_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a" / "ucmerced" / "train.parquet", [0] * 5)
    write_parquet(tmp_path / "b" / "ucmerced" / "train.parquet", [0] * 10)
    monkeypatch.setenv("VITFLEET_DATA", str(tmp_path / "a"))
    assert len(load(DataConfig(name="ucmerced")).train) == 4
    assert len(load(DataConfig(name="ucmerced", dir=str(tmp_path / "b"))).train) == 8


def test_string_labels_are_numbered_over_both_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", ["pear", "apple", "pear"])
    write_parquet(tmp_path / "test.parquet", ["fig", "pear"])
    data = load(own(tmp_path))
    assert data.classes == ("apple", "fig", "pear")
    assert data.train.labels.tolist() == [2, 0, 2]
    assert data.test.labels.tolist() == [1, 2]


def test_a_split_is_named_by_a_whole_word(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train_a.parquet", [0, 0])
    write_parquet(tmp_path / "training_extra.parquet", [0], first_shade=90)
    write_parquet(tmp_path / "Test1.parquet", [0], first_shade=50)
    data = load(own(tmp_path))
    assert shades(data.train.images) == [0, 1]
    assert shades(data.test.images) == [50]


def test_single_parquet_file_without_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mine.parquet", [0, 2] * 5)
    data = load(own(tmp_path / "mine.parquet"))
    assert data.classes == ("0", "1", "2")
    assert data.train.labels.bincount(minlength=3).tolist() == [4, 0, 4]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [("client", [40, 7, 7], [40, 7, 7]), ("writer", ["w10", "w9", "w10"], [1, 0, 1])],
)
def test_a_column_gives_sources(
    tmp_path: Path, column: str, values: list[int] | list[str], expected: list[int]
) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1, 0], extra={column: values})
    write_parquet(tmp_path / "test.parquet", [0], extra={column: values[:1]})
    data = load(own(tmp_path))
    assert data.train.sources is not None
    assert data.test.sources is not None
    assert data.train.sources.tolist() == expected
    assert data.test.sources.tolist() == expected[:1]


def test_plain_binary_column_and_rows_without_an_image(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"image": pa.array([picture(1), None, picture(3), picture(4)]), "label": [0, 0, 0, 0]}),
        tmp_path / "train.parquet",
    )
    write_parquet(tmp_path / "test.parquet", [0])
    data = load(own(tmp_path, max_corrupt=0.5))
    assert shades(data.train.images) == [1, 3, 4]
    assert data.skipped == ("train.parquet:1",)


def test_parquet_that_names_files_beside_it(tmp_path: Path) -> None:
    put(tmp_path / "pictures" / "one.png", picture(33))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    row = {"bytes": None, "path": "pictures/one.png"}
    pq.write_table(pa.table({"image": pa.array([row, row], kind), "label": [0, 0]}), tmp_path / "train.parquet")
    assert shades(load(own(tmp_path, test_share=0.5)).train.images) == [33]


def test_parquet_that_cannot_work(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    write_parquet(file, [0, 1], label="kind")
    with pytest.raises(DataError, match=r"no label column: .*found image, kind"):
        load(own(file))
    write_parquet(file, [0, -1])
    with pytest.raises(DataError, match="labels from -1 to 0"):
        load(own(file))
    write_parquet(file, [0, 5], names=["a", "b"])
    with pytest.raises(DataError, match="labels from 0 to 5, but there are 2 classes"):
        load(own(file))
    put(file, b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as parquet"):
        load(own(file))


def test_miniimagenet_prefers_test_to_validation(tmp_path: Path) -> None:
    root = tmp_path / "miniimagenet" / "data"
    for split, first in (("train", 0), ("validation", 100), ("test", 200)):
        write_parquet(root / f"{split}-00000-of-00001.parquet", [0, 1], ["n01", "n02"], first_shade=first)
    data = load(DataConfig(name="miniimagenet", dir=str(tmp_path)))
    assert shades(data.train.images) == [0, 1]
    assert shades(data.test.images) == [200, 201]


# Named sets


def test_digits() -> None:
    data = load(DataConfig(name="digits"))
    from sklearn.datasets import load_digits

    original = load_digits()
    assert data.train.images.shape[1:] == (1, 8, 8)
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images.max() == 255
    everything = torch.cat([data.train.images, data.test.images]).double()
    assert everything.sum() == np.round(original.images * 255 / 16).sum()
    share = data.test.labels.bincount().numpy() / np.bincount(original.target)
    assert ((share > 0.18) & (share < 0.22)).all()


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="which the extra `sim` brings"):
        load(DataConfig(name="digits"))


@pytest.mark.parametrize("folder", ["fc100", "cifar100"])
def test_fc100_puts_classes_of_one_superclass_together(tmp_path: Path, folder: str) -> None:
    names = ["apple", "bear", "cherry", "dog"]
    coarse = [1, 0, 1, 0]
    labels = [3, 2, 1, 0]
    for split in ("train", "test"):
        extra: dict[str, list[int] | list[str]] = {"coarse_label": [coarse[label] for label in labels]}
        write_parquet(tmp_path / folder / f"{split}.parquet", labels, names, "fine_label", "img", extra=extra)
    data = load(DataConfig(name="fc100", dir=str(tmp_path)))
    assert data.classes == ("bear", "dog", "apple", "cherry")
    assert data.train.labels.tolist() == [1, 3, 0, 2]
    assert shades(data.train.images) == [0, 1, 2, 3]  # labels change, images do not move
    assert data.train.sources is not None
    assert data.train.sources.tolist() == [0, 1, 0, 1]


def test_fc100_needs_superclasses(tmp_path: Path) -> None:
    write_parquet(tmp_path / "fc100" / "train.parquet", [0, 1])
    with pytest.raises(DataError, match="coarse_label is missing"):
        load(DataConfig(name="fc100", dir=str(tmp_path)))
    write_parquet(tmp_path / "fc100" / "train.parquet", [0, 0], extra={"coarse_label": [0, 1]})
    with pytest.raises(DataError, match="several superclasses"):
        load(DataConfig(name="fc100", dir=str(tmp_path)))


@pytest.mark.parametrize("inner", ["core50", "core50/core50_128x128"])
def test_core50_layout(tmp_path: Path, inner: str) -> None:
    for session in (1, 2, 3, 7, 10, 11):
        for thing in (1, 2, 50):
            for frame in (0, 1):
                name = f"C_{session:02}_{thing:02}_{frame:03}.png"
                put(tmp_path / inner / f"s{session}" / f"o{thing}" / name, picture(session))
    data = load(DataConfig(name="core50", dir=str(tmp_path)))
    assert len(data.classes) == 50
    assert distinct(data.train.labels) == [0, 1, 49]
    assert data.train.sources is not None
    assert data.test.sources is not None
    assert distinct(data.train.sources) == [0, 1, 10]
    assert distinct(data.test.sources) == [2, 6, 9]
    assert torch.equal(data.train.images[:, 0, 0, 0].long(), data.train.sources + 1)
    assert len(data.train) == len(data.test) == 18


def test_core50_as_tasks_has_a_class_for_every_object_of_a_session(tmp_path: Path) -> None:
    for session, label in ((10, 2), (2, 1), (2, 10)):
        for frame in range(5):
            name = f"C_{session:02d}_{label:02d}_{frame:03d}.png"
            put(tmp_path / "core50" / f"s{session}" / f"o{label}" / name, picture(frame))
    put(tmp_path / "core50" / "s2" / "o1" / "C_02_01_009.png", picture(9))
    data = load(DataConfig(name="core50_sessions", dir=str(tmp_path)))
    assert data.classes == ("s2/o1", "s2/o10", "s10/o2")  # session after session
    assert torch.bincount(data.train.labels).tolist() == [5, 4, 4]
    assert torch.bincount(data.test.labels).tolist() == [1, 1, 1]


def test_core50_without_its_test_sessions(tmp_path: Path) -> None:
    put(tmp_path / "core50" / "s1" / "o1" / "C_01_01_000.png", picture(1))
    with pytest.raises(DataError, match="test sessions s3, s7, s10 are missing"):
        load(DataConfig(name="core50", dir=str(tmp_path)))


# Limits


def test_limit_draws_in_proportion_before_decoding(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0] * 60 + [1] * 30 + [2] * 10)
    write_parquet(tmp_path / "test.parquet", [0] * 20 + [1] * 20 + [2] * 20)
    data = load(own(tmp_path, limit=20))
    assert data.train.labels.bincount().tolist() == [12, 6, 2]
    assert len(data.test) == 4
    again = load(own(tmp_path, limit=20))
    assert shades(data.train.images) == shades(again.train.images)
    assert shades(data.train.images) == sorted(shades(data.train.images))
    assert len(load(own(tmp_path, limit=5)).test) == 3  # never fewer than classes
    assert len(load(own(tmp_path, limit=1000)).train) == 100


def test_limit_leaves_the_rest_unread(tmp_path: Path) -> None:
    for i in range(40):
        put(tmp_path / "train" / "a" / f"{i:03}.png", picture(i))
    fill(tmp_path / "test" / "a", 2)
    chosen = shades(load(own(tmp_path, limit=10)).train.images)
    assert len(chosen) == 10
    for i in set(range(40)) - set(chosen):
        put(tmp_path / "train" / "a" / f"{i:03}.png", b"damaged")
    assert shades(load(own(tmp_path, limit=10, max_corrupt=0)).train.images) == chosen


# Missing sets and the hub


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        load(DataConfig(name="cifar-01"))
    assert caught.value.key == "data.name"
    assert "did you mean cifar10?" in str(caught.value)
    assert "fashion_mnist" in str(caught.value)
    assert "data.path" in str(caught.value)


def test_missing_set_says_where_why_and_how(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(DataConfig(name="fc100", dir=str(tmp_path)))
    message = str(caught.value)
    assert f"{tmp_path / 'fc100'} is not there" in message
    assert f"{tmp_path / 'cifar100'} is not there" in message
    assert "cannot be reached (a test)" in message
    assert f"hf download --repo-type dataset uoft-cs/cifar100 --local-dir {tmp_path / 'cifar100'}" in message


def test_missing_set_without_a_directory_says_how_to_name_one() -> None:
    with pytest.raises(DataError, match=r"--local-dir DIR/cifar10;.*--data-dir DIR or set VITFLEET_DATA=DIR"):
        load(DataConfig(name="cifar10"))
    with pytest.raises(DataError, match="download core50_128x128"):
        load(DataConfig(name="core50"))


def test_missing_datasets_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="which the extra `sim` brings"):
        load(DataConfig(name="cifar10"))


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(names=["apple", "bear", "cherry"]),
            "coarse_label": datasets.ClassLabel(names=["animal", "fruit"]),
        }
    )

    def rows(labels: list[int], first: int) -> object:
        coarse = [0 if label == 1 else 1 for label in labels]
        shots = [{"bytes": picture(first + i), "path": None} for i in range(len(labels))]
        columns = {"img": shots, "fine_label": labels, "coarse_label": coarse}
        return datasets.Dataset.from_dict(columns, features=features)

    asked: list[str] = []

    def load_dataset(name: str) -> object:
        asked.append(name)
        return datasets.DatasetDict({"train": rows([2, 1, 0], 10), "test": rows([1], 50)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load(DataConfig(name="cifar100"))
    assert asked == ["uoft-cs/cifar100"]
    assert data.classes == ("apple", "bear", "cherry")
    assert data.train.labels.tolist() == [2, 1, 0]
    assert shades(data.train.images) == [10, 11, 12]
    assert shades(data.test.images) == [50]
    assert data.train.sources is None
    assert load(DataConfig(name="fc100")).classes == ("bear", "apple", "cherry")


@pytest.mark.parametrize("reachable", [True, False])
def test_hub_is_asked_offline_where_it_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, reachable: bool) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(tables, "_why_unreachable", lambda endpoint: "" if reachable else "it sleeps")
    seen: list[bool] = []

    def load_dataset(name: str) -> object:
        seen.append(datasets.config.HF_HUB_OFFLINE)
        raise RuntimeError("the transport broke\nwith details")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        load(DataConfig(name="cifar10"))
    assert seen == [not reachable]
    assert ("the transport broke" if reachable else "it sleeps") in str(caught.value)
    assert "with details" not in str(caught.value)
    assert datasets.config.HF_HUB_OFFLINE is False


# Real data


@pytest.mark.real
def test_real_ucmerced() -> None:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    directory = Path(os.environ.get("VITFLEET_DATA", beside))
    if not (directory / "ucmerced").is_dir():
        pytest.skip(f"no ucmerced in {directory}: set VITFLEET_DATA")
    data = load(DataConfig(name="ucmerced", dir=str(directory), limit=500))
    assert len(data.classes) == 21
    assert "airplane" in data.classes
    assert data.train.images.shape == (500, 3, 256, 256)
    assert len(data.test) == 100
    counts = data.train.labels.bincount(minlength=21)
    assert counts.min() >= 23
    assert counts.max() <= 24
    assert data.skipped == ()
    assert 20 < data.train.images.float().std() < 90  # photographs, not noise or blanks
