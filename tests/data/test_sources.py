"""Data sets by name: built-in ones, limits, the hub, errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from made_sets import encoded_image, grey_levels, own_images, unique_values, write_file, write_images, write_parquet
from vitfleet.config.schema import DataConfig
from vitfleet.data.sources import hub
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("isolated_data")


# Named data sets


def test_digits_are_scikit_learns() -> None:
    data = load_dataset(DataConfig(name="digits"))
    from sklearn.datasets import load_digits

    original = load_digits()
    assert data.train.images.shape[1:] == (1, 8, 8)
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images.max() == 255
    everything = torch.cat([data.train.images, data.test.images]).double()
    expected = np.round(original.images * 255 / 16).reshape(-1, 64)
    assert sorted(everything.reshape(-1, 64).tolist()) == sorted(expected.tolist())
    share = data.test.labels.bincount().numpy() / np.bincount(original.target)
    assert ((share > 0.18) & (share < 0.22)).all()


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="which the extras `sim` and `flower` install"):
        load_dataset(DataConfig(name="digits"))


@pytest.mark.parametrize("folder", ["fc100", "cifar100"])
def test_fc100_orders_classes_by_superclass(tmp_path: Path, folder: str) -> None:
    names = ["apple", "bear", "cherry", "dog"]
    coarse = [1, 0, 1, 0]
    labels = [3, 2, 1, 0]
    for split in ("train", "test"):
        extra: dict[str, list[int] | list[str]] = {"coarse_label": [coarse[label] for label in labels]}
        write_parquet(tmp_path / folder / f"{split}.parquet", labels, names, "fine_label", "img", extra=extra)
    data = load_dataset(DataConfig(name="fc100", dir=str(tmp_path)))
    assert data.classes == ("bear", "dog", "apple", "cherry")
    assert data.train.labels.tolist() == [1, 3, 0, 2]
    assert grey_levels(data.train.images) == [0, 1, 2, 3]  # labels change, images do not move
    assert data.train.sources is not None
    assert data.train.sources.tolist() == [0, 1, 0, 1]


def test_fc100_rejects_missing_and_contradictory_superclasses(tmp_path: Path) -> None:
    write_parquet(tmp_path / "fc100" / "train.parquet", [0, 1])
    with pytest.raises(DataError, match="coarse_label is missing"):
        load_dataset(DataConfig(name="fc100", dir=str(tmp_path)))
    write_parquet(tmp_path / "fc100" / "train.parquet", [0, 0], extra={"coarse_label": [0, 1]})
    with pytest.raises(DataError, match="several superclasses"):
        load_dataset(DataConfig(name="fc100", dir=str(tmp_path)))


@pytest.mark.parametrize("inner", ["core50", "core50/core50_128x128"])
def test_core50_reads_objects_as_classes_and_sessions_as_sources(tmp_path: Path, inner: str) -> None:
    for session in (1, 2, 3, 7, 10, 11):
        for thing in (1, 2, 50):
            for frame in (0, 1):
                name = f"C_{session:02}_{thing:02}_{frame:03}.png"
                write_file(tmp_path / inner / f"s{session}" / f"o{thing}" / name, encoded_image(session))
    data = load_dataset(DataConfig(name="core50", dir=str(tmp_path)))
    assert len(data.classes) == 50
    assert unique_values(data.train.labels) == [0, 1, 49]
    assert data.train.sources is not None
    assert data.test.sources is not None
    assert unique_values(data.train.sources) == [0, 1, 10]
    assert unique_values(data.test.sources) == [2, 6, 9]
    assert torch.equal(data.train.images[:, 0, 0, 0].long(), data.train.sources + 1)
    assert len(data.train) == len(data.test) == 18


def test_core50_sessions_has_a_class_for_every_object_of_a_session(tmp_path: Path) -> None:
    for session, label in ((10, 2), (2, 1), (2, 10)):
        for frame in range(5):
            name = f"C_{session:02d}_{label:02d}_{frame:03d}.png"
            write_file(tmp_path / "core50" / f"s{session}" / f"o{label}" / name, encoded_image(frame))
    write_file(tmp_path / "core50" / "s2" / "o1" / "C_02_01_009.png", encoded_image(9))
    data = load_dataset(DataConfig(name="core50_sessions", dir=str(tmp_path)))
    assert data.classes == ("s2/o1", "s2/o10", "s10/o2")  # session after session
    assert torch.bincount(data.train.labels).tolist() == [5, 4, 4]
    assert torch.bincount(data.test.labels).tolist() == [1, 1, 1]


def test_core50_without_its_test_sessions_is_rejected(tmp_path: Path) -> None:
    write_file(tmp_path / "core50" / "s1" / "o1" / "C_01_01_000.png", encoded_image(1))
    with pytest.raises(DataError, match="test sessions s3, s7, s10 are missing"):
        load_dataset(DataConfig(name="core50", dir=str(tmp_path)))


# Limits


def test_limit_draws_every_class_in_proportion(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0] * 60 + [1] * 30 + [2] * 10)
    write_parquet(tmp_path / "test.parquet", [0] * 20 + [1] * 20 + [2] * 20)
    data = load_dataset(own_images(tmp_path, limit=20))
    assert data.train.labels.bincount().tolist() == [12, 6, 2]
    assert len(data.test) == 4
    again = load_dataset(own_images(tmp_path, limit=20))
    assert grey_levels(data.train.images) == grey_levels(again.train.images)
    assert grey_levels(data.train.images) == sorted(grey_levels(data.train.images))
    assert len(load_dataset(own_images(tmp_path, limit=5)).test) == 3  # never fewer than classes
    assert len(load_dataset(own_images(tmp_path, limit=1000)).train) == 100


def test_limit_does_not_read_the_other_images(tmp_path: Path) -> None:
    for i in range(40):
        write_file(tmp_path / "train" / "a" / f"{i:03}.png", encoded_image(i))
    write_images(tmp_path / "test" / "a", 2)
    chosen = grey_levels(load_dataset(own_images(tmp_path, limit=10)).train.images)
    assert len(chosen) == 10
    for i in set(range(40)) - set(chosen):
        write_file(tmp_path / "train" / "a" / f"{i:03}.png", b"damaged")
    assert grey_levels(load_dataset(own_images(tmp_path, limit=10, max_corrupt=0)).train.images) == chosen


# Missing data sets and the hub


def test_unknown_name_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataset(DataConfig(name="cifar-01"))
    assert caught.value.key == "data.name"
    assert "did you mean cifar10?" in str(caught.value)
    assert "fashion_mnist" in str(caught.value)
    assert "data.path" in str(caught.value)


def test_missing_data_set_names_places_reasons_and_download(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(DataConfig(name="fc100", dir=str(tmp_path)))
    message = str(caught.value)
    assert f"{tmp_path / 'fc100'} does not exist" in message
    assert f"{tmp_path / 'cifar100'} does not exist" in message
    assert "cannot be reached (a test)" in message
    assert f"hf download --repo-type dataset uoft-cs/cifar100 --local-dir {tmp_path / 'cifar100'}" in message


def test_missing_data_set_without_a_directory_names_the_option() -> None:
    with pytest.raises(DataError, match=r"--local-dir DIR/cifar10;.*--data-dir DIR or set VITFLEET_DATA=DIR"):
        load_dataset(DataConfig(name="cifar10"))
    with pytest.raises(DataError, match="download core50_128x128"):
        load_dataset(DataConfig(name="core50"))


def test_missing_datasets_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="which the extra `sim` installs"):
        load_dataset(DataConfig(name="cifar10"))


def test_named_data_set_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
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
        cells = [{"bytes": encoded_image(first + i), "path": None} for i in range(len(labels))]
        columns = {"img": cells, "fine_label": labels, "coarse_label": coarse}
        return datasets.Dataset.from_dict(columns, features=features)

    requested: list[str] = []

    def load_from_hub(name: str) -> object:
        requested.append(name)
        return datasets.DatasetDict({"train": rows([2, 1, 0], 10), "test": rows([1], 50)})

    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)
    data = load_dataset(DataConfig(name="cifar100"))
    assert requested == ["uoft-cs/cifar100"]
    assert data.classes == ("apple", "bear", "cherry")
    assert data.train.labels.tolist() == [2, 1, 0]
    assert grey_levels(data.train.images) == [10, 11, 12]
    assert grey_levels(data.test.images) == [50]
    assert data.train.sources is None
    assert load_dataset(DataConfig(name="fc100")).classes == ("bear", "apple", "cherry")


@pytest.mark.parametrize("reachable", [True, False])
def test_hub_cache_is_used_if_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, reachable: bool) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_why_unreachable", lambda endpoint: "" if reachable else "no network")
    offline: list[bool] = []

    def load_from_hub(name: str) -> object:
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise RuntimeError("the transport broke\nwith details")

    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)
    with pytest.raises(DataError) as caught:
        load_dataset(DataConfig(name="cifar10"))
    assert offline == [not reachable]
    assert ("the transport broke" if reachable else "no network") in str(caught.value)
    assert "with details" not in str(caught.value)
    assert datasets.config.HF_HUB_OFFLINE is False


# Any data set of the hub


def hub_rows(greys: list[int], labels: list[str]) -> Any:
    datasets = pytest.importorskip("datasets")
    cells = [{"bytes": encoded_image(grey), "path": None} for grey in greys]
    features = datasets.Features({"photo": datasets.Image(), "species": datasets.Value("string")})
    return datasets.Dataset.from_dict({"photo": cells, "species": labels}, features=features)


@pytest.fixture
def hub_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace the hub by one data set with unusual names of splits and columns; return what is requested of it."""
    datasets = pytest.importorskip("datasets")
    requests: list[tuple[str, ...]] = []

    def load_from_hub(*names: str) -> object:
        requests.append(names)
        return datasets.DatasetDict(
            {"learn": hub_rows([1, 2], ["emu", "yak"]), "exam": hub_rows([3], ["yak"]), "test": hub_rows([4], ["emu"])}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)
    return requests


COLUMNS = {"image_column": "photo", "label_column": "species"}


def test_hf_name_loads_any_data_set_of_the_hub(hub_requests: list[tuple[str, ...]]) -> None:
    config = DataConfig.model_validate(
        {"name": "hf:ann/birds", "train_split": "learn", "test_split": "exam", **COLUMNS}
    )
    data = load_dataset(config)
    assert hub_requests == [("ann/birds",)]
    assert (data.name, data.classes) == ("ann/birds", ("emu", "yak"))
    assert grey_levels(data.train.images) == [1, 2]
    assert data.train.labels.tolist() == [0, 1]
    assert grey_levels(data.test.images) == [3]


def test_hf_name_with_a_config_requests_that_config(hub_requests: list[tuple[str, ...]]) -> None:
    data = load_dataset(DataConfig.model_validate({"name": "hf:ann/birds:large", "train_split": "learn", **COLUMNS}))
    assert hub_requests == [("ann/birds", "large")]
    assert grey_levels(data.test.images) == [4]  # `test` is the default


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_split": "learn"}, r"learn has no image column: .*found photo, species; set data\.image_column"),
        ({"train_split": "learn", "image_column": "photo"}, r"learn has no label column: .*; set data\.label_column"),
        (COLUMNS, r"has no split 'train', only learn, exam, test; set data\.train_split"),
        ({"train_split": "learn", "test_split": "quiz", **COLUMNS}, r"has no split 'quiz', .*; set data\.test_split"),
    ],
)
def test_hf_name_with_missing_columns_or_splits_names_the_key(
    hub_requests: list[tuple[str, ...]], keys: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=r"data\.name = 'hf:ann/birds': the Hugging Face hub \(ann/birds\): " + message):
        load_dataset(DataConfig.model_validate({"name": "hf:ann/birds", **keys}))


@pytest.mark.parametrize("name", ["hf:birds", "hf:", "hf:ann/birds/large", "hf:/birds"])
def test_hf_name_without_owner_or_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="must be hf:owner/name or hf:owner/name:config"):
        load_dataset(DataConfig(name=name))


def test_columns_of_parquet_files_can_be_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", ["emu", "yak"], label="species", image="photo")
    write_parquet(tmp_path / "test.parquet", ["yak"], label="species", image="photo")
    data = load_dataset(own_images(tmp_path, **COLUMNS))
    assert data.classes == ("emu", "yak")
    with pytest.raises(DataError, match=r"train\.parquet has no label column: .*set data\.label_column"):
        load_dataset(own_images(tmp_path, image_column="photo"))


# Real data


@pytest.mark.real
def test_real_ucmerced_is_read() -> None:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    directory = Path(os.environ.get("VITFLEET_DATA", beside))
    if not (directory / "ucmerced").is_dir():
        pytest.skip(f"no ucmerced in {directory}: set VITFLEET_DATA")
    data = load_dataset(DataConfig(name="ucmerced", dir=str(directory), limit=500))
    assert len(data.classes) == 21
    assert "airplane" in data.classes
    assert data.train.images.shape == (500, 3, 256, 256)
    assert len(data.test) == 100
    counts = data.train.labels.bincount(minlength=21)
    assert counts.min() >= 23
    assert counts.max() <= 24
    assert data.skipped == ()
    assert 20 < data.train.images.float().std() < 90  # photographs, not noise or blanks
