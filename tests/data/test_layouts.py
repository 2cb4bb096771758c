"""MiniImageNet and multi-domain data sets in the layouts that they are distributed in, on small made files."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_sets import encoded_image, grey_levels, own_images, write_file, write_images, write_parquet
from vitfleet.config.registry import PARTITIONS
from vitfleet.config.schema import DataConfig
from vitfleet.data.images import DataSet
from vitfleet.data.partitions.assign import partition_dataset
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import DataError

pytestmark = pytest.mark.usefixtures("isolated_data")


def class_counts(data: DataSet) -> dict[str, tuple[int, int]]:
    """Return the number of training and test images of each class."""
    splits = [split.labels.bincount(minlength=len(data.classes)).tolist() for split in (data.train, data.test)]
    return {name: (splits[0][label], splits[1][label]) for label, name in enumerate(data.classes)}


# MiniImageNet


def write_csv_layout(root: Path) -> None:
    grey = 0
    for split, classes in (("train", ("n02", "n01")), ("val", ("n03",)), ("test", ("n04",))):
        rows = ["filename,label"]
        for name in classes:
            for number in range(5):
                write_file(root / "images" / f"{name}0000{number}.jpg", encoded_image(grey))
                rows.append(f"{name}0000{number}.jpg,{name}")
            grey += 10
        write_file(root / f"{split}.csv", "\n".join(rows).encode())


def test_miniimagenet_pools_the_classes_of_the_few_shot_lists(tmp_path: Path) -> None:
    write_csv_layout(tmp_path / "miniimagenet")
    write_file(tmp_path / "miniimagenet" / "images" / "unlisted.jpg", encoded_image(99))
    data = load_dataset(DataConfig(name="miniimagenet", dir=str(tmp_path)))
    assert class_counts(data) == {"n01": (4, 1), "n02": (4, 1), "n03": (4, 1), "n04": (4, 1)}
    greys = dict(zip(data.train.labels.tolist(), grey_levels(data.train.images), strict=True))
    assert greys == {0: 10, 1: 0, 2: 20, 3: 30}  # the list's first class has the greys of n02


def test_miniimagenet_pools_the_classes_of_the_few_shot_folders(tmp_path: Path) -> None:
    for split, name in (("train", "n01"), ("val", "n02"), ("test", "n03")):
        write_images(tmp_path / "miniimagenet" / split / name, 5)
    data = load_dataset(DataConfig(name="miniimagenet", dir=str(tmp_path)))
    assert class_counts(data) == {"n01": (4, 1), "n02": (4, 1), "n03": (4, 1)}


def test_miniimagenet_with_the_same_classes_in_both_splits_keeps_its_test_split(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("test", 2)):
        for name in ("n01", "n02"):
            write_images(tmp_path / "miniimagenet" / split / name, count)
    data = load_dataset(DataConfig(name="miniimagenet", dir=str(tmp_path)))
    assert class_counts(data) == {"n01": (5, 2), "n02": (5, 2)}


def test_miniimagenet_lists_that_do_not_fit_are_named(tmp_path: Path) -> None:
    root = tmp_path / "miniimagenet"
    write_csv_layout(root)
    (root / "images" / "n0300002.jpg").unlink()
    config = DataConfig(name="miniimagenet", dir=str(tmp_path))
    with pytest.raises(DataError, match=r"val\.csv names n0300002\.jpg, which is not in "):
        load_dataset(config)
    write_file(root / "test.csv", b"file,class\n")
    (root / "val.csv").unlink()
    with pytest.raises(DataError, match=r"test\.csv: must have the columns filename and label, found file, class"):
        load_dataset(config)


# Multi-domain folders


def partition_by_domain(data: DataSet, clients: int) -> list[list[int]]:
    """Return the greys of every client's training images."""
    partition = partition_dataset(PARTITIONS.make_params("source"), clients, 0, data)
    return [grey_levels(data.train.images[partition.train.for_client(client)]) for client in range(clients)]


@pytest.mark.parametrize("wrapper", ["", "images"], ids=["office-home", "office-31"])
def test_folders_of_domains_are_sources(tmp_path: Path, wrapper: str) -> None:
    for domain, grey in (("webcam", 30), ("amazon", 10), ("dslr", 20)):
        for name in ("bike", "mug"):
            write_images(tmp_path / domain / wrapper / name, 5, grey)
    data = load_dataset(own_images(tmp_path))
    assert data.classes == ("bike", "mug")
    assert class_counts(data) == {"bike": (12, 3), "mug": (12, 3)}
    clients = partition_by_domain(data, 3)
    assert [set(greys) for greys in clients] == [{10}, {20}, {30}]
    assert data.test.sources is not None


def test_lists_of_domains_decide_the_split(tmp_path: Path) -> None:
    lists: dict[str, list[str]] = {}
    for domain, grey in (("sketch", 50), ("clipart", 40)):
        for label, name in enumerate(("zebra", "axe")):
            for number in range(3):
                path = f"{domain}/{name}/{domain}_{number}.png"
                write_file(tmp_path / path, encoded_image(grey + number))
                split = "test" if number == 2 else "train"
                lists.setdefault(f"{domain}_{split}.txt", []).append(f"{path} {label}")
    for name, lines in lists.items():
        write_file(tmp_path / name, ("\n".join(lines) + "\n").encode())
    write_images(tmp_path / "sketch" / "unlisted class", 2)
    data = load_dataset(own_images(tmp_path))
    assert data.classes == ("axe", "zebra")
    assert class_counts(data) == {"axe": (4, 2), "zebra": (4, 2)}
    assert sorted(grey_levels(data.test.images)) == [42, 42, 52, 52]
    assert [sorted(set(greys)) for greys in partition_by_domain(data, 2)] == [[40, 41], [50, 51]]
    write_file(tmp_path / "clipart_test.txt", b"clipart/axe/none.png 0\n")
    with pytest.raises(DataError, match=r"clipart_test\.txt, line 1: .*none\.png does not exist"):
        load_dataset(own_images(tmp_path))
    write_file(tmp_path / "clipart_test.txt", b"\nclipart/axe/clipart_0.png\n")
    with pytest.raises(DataError, match=r"clipart_test\.txt, line 2: must be a path and the number of a class"):
        load_dataset(own_images(tmp_path))


def test_source_column_of_a_table_can_be_named(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_parquet(tmp_path / "all.parquet", [0, 1] * 5)
    table = pq.read_table(tmp_path / "all.parquet")
    pq.write_table(table.append_column("style", [["oil", "ink"] * 5]), tmp_path / "all.parquet")
    assert load_dataset(own_images(tmp_path)).train.sources is None
    sources = load_dataset(own_images(tmp_path, source_column="style")).train.sources
    assert sources is not None
    assert set(sources.tolist()) == {0, 1}
    with pytest.raises(DataError, match=r"no source column: expected one named era, found .*; set data\.source_column"):
        load_dataset(own_images(tmp_path, source_column="era"))
