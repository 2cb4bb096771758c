"""Parquet files: splits, labels, columns, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from made_sets import encoded_image, grey_levels, own_images, write_file, write_parquet
from vitfleet.config.schema import DataConfig
from vitfleet.data.export import export_clients
from vitfleet.data.partitions.client_indices import ClientIndices
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import DataError, UserError

pytestmark = pytest.mark.usefixtures("isolated_data")


def test_parquet_files_in_the_hubs_layout(tmp_path: Path) -> None:
    root = tmp_path / "cifar10"
    names = ["plane", "car", "bird"]
    write_parquet(root / "data" / "train-00000-of-00002.parquet", [2, 0], names)
    write_parquet(root / "data" / "train-00001-of-00002.parquet", [1], names, first_grey=10)
    write_parquet(root / "data" / "test-00000-of-00001.parquet", [1, 1], names, first_grey=20)
    data = load_dataset(DataConfig(name="cifar10", dir=str(tmp_path)))
    assert data.classes == ("plane", "car", "bird")
    assert data.train.labels.tolist() == [2, 0, 1]
    assert grey_levels(data.train.images) == [0, 1, 10]
    assert data.test.labels.tolist() == [1, 1]
    assert grey_levels(data.test.images) == [20, 21]


def test_parquet_files_in_one_inner_folder_of_any_name(tmp_path: Path) -> None:
    root = tmp_path / "cifar10"
    write_parquet(root / "plain_text" / "train-00000-of-00001.parquet", [0, 1], image="img")
    write_parquet(root / "plain_text" / "test-00000-of-00001.parquet", [0], image="img")
    write_file(root / "README.md", b"card")
    assert len(load_dataset(DataConfig(name="cifar10", dir=str(tmp_path))).train) == 2
    write_parquet(root / "other" / "train.parquet", [0])
    with pytest.raises(DataError, match=r"several folders \(other, plain_text\)"):
        load_dataset(DataConfig(name="cifar10", dir=str(tmp_path)))


def test_data_dir_overrides_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a" / "ucmerced" / "train.parquet", [0] * 5)
    write_parquet(tmp_path / "b" / "ucmerced" / "train.parquet", [0] * 10)
    monkeypatch.setenv("VITFLEET_DATA", str(tmp_path / "a"))
    assert len(load_dataset(DataConfig(name="ucmerced")).train) == 4
    assert len(load_dataset(DataConfig(name="ucmerced", dir=str(tmp_path / "b"))).train) == 8


def test_string_labels_are_numbered_over_both_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", ["pear", "apple", "pear"])
    write_parquet(tmp_path / "test.parquet", ["fig", "pear"])
    data = load_dataset(own_images(tmp_path))
    assert data.classes == ("apple", "fig", "pear")
    assert data.train.labels.tolist() == [2, 0, 2]
    assert data.test.labels.tolist() == [1, 2]


def test_split_name_must_be_a_whole_word_of_the_file_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train_a.parquet", [0, 0])
    write_parquet(tmp_path / "training_extra.parquet", [0], first_grey=90)
    write_parquet(tmp_path / "Test1.parquet", [0], first_grey=50)
    data = load_dataset(own_images(tmp_path))
    assert grey_levels(data.train.images) == [0, 1]
    assert grey_levels(data.test.images) == [50]


def test_single_parquet_file_without_class_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mine.parquet", [0, 2] * 5)
    data = load_dataset(own_images(tmp_path / "mine.parquet"))
    assert data.classes == ("0", "1", "2")
    assert data.train.labels.bincount(minlength=3).tolist() == [4, 0, 4]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [("client", [40, 7, 7], [40, 7, 7]), ("writer", ["w10", "w9", "w10"], [1, 0, 1])],
)
def test_source_column_gives_sources(
    tmp_path: Path, column: str, values: list[int] | list[str], expected: list[int]
) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1, 0], extra={column: values})
    write_parquet(tmp_path / "test.parquet", [0], extra={column: values[:1]})
    data = load_dataset(own_images(tmp_path))
    assert data.train.sources is not None
    assert data.test.sources is not None
    assert data.train.sources.tolist() == expected
    assert data.test.sources.tolist() == expected[:1]


def test_binary_column_with_an_empty_row(tmp_path: Path) -> None:
    pq.write_table(
        pa.table(
            {"image": pa.array([encoded_image(1), None, encoded_image(3), encoded_image(4)]), "label": [0, 0, 0, 0]}
        ),
        tmp_path / "train.parquet",
    )
    write_parquet(tmp_path / "test.parquet", [0])
    data = load_dataset(own_images(tmp_path, max_corrupt=0.5))
    assert grey_levels(data.train.images) == [1, 3, 4]
    assert data.skipped == ("train.parquet:1",)


def test_parquet_that_refers_to_image_files(tmp_path: Path) -> None:
    write_file(tmp_path / "pictures" / "one.png", encoded_image(33))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    row = {"bytes": None, "path": "pictures/one.png"}
    pq.write_table(pa.table({"image": pa.array([row, row], kind), "label": [0, 0]}), tmp_path / "train.parquet")
    assert grey_levels(load_dataset(own_images(tmp_path, test_share=0.5)).train.images) == [33]


def test_unusable_parquet_files_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    write_parquet(file, [0, 1], label="kind")
    with pytest.raises(DataError, match=r"no label column: .*found image, kind"):
        load_dataset(own_images(file))
    write_parquet(file, [0, -1])
    with pytest.raises(DataError, match="labels from -1 to 0"):
        load_dataset(own_images(file))
    write_parquet(file, [0, 5], names=["a", "b"])
    with pytest.raises(DataError, match="labels from 0 to 5, but there are 2 classes"):
        load_dataset(own_images(file))
    write_file(file, b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as parquet"):
        load_dataset(own_images(file))


def test_miniimagenet_prefers_test_to_validation(tmp_path: Path) -> None:
    root = tmp_path / "miniimagenet" / "data"
    for split, first in (("train", 0), ("validation", 100), ("test", 200)):
        write_parquet(root / f"{split}-00000-of-00001.parquet", [0, 1], ["n01", "n02"], first_grey=first)
    data = load_dataset(DataConfig(name="miniimagenet", dir=str(tmp_path)))
    assert grey_levels(data.train.images) == [0, 1]
    assert grey_levels(data.test.images) == [200, 201]


def test_writing_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.data.export.find_spec", lambda name: None)
    data = load_dataset(DataConfig(name="digits", limit=20))
    nothing = ClientIndices.from_lists([np.arange(2)], 1)
    with pytest.raises(UserError, match=r"--to parquet: needs pyarrow.*pip install -e '.\[parquet\]'"):
        export_clients(data, (nothing, nothing), ["a"], tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
