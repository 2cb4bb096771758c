"""Sets by their names: the known ones, limits, the hub, and what is said when nothing is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from made_sets import distinct, fill, own, picture, put, shades, write_parquet
from vitfleet.config.schema import DataConfig
from vitfleet.data import parquet
from vitfleet.data.sources import load
from vitfleet.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("nowhere")


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
    monkeypatch.setattr(parquet, "_why_unreachable", lambda endpoint: "" if reachable else "it sleeps")
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
