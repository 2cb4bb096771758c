"""The runs of a comparison decode their images once, and get the same images."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitfleet
from made_photos import draw_photos
from vitfleet.config.registry import DATASETS, Origin
from vitfleet.config.schema import DataConfig, TasksConfig
from vitfleet.data import decode, image_cache
from vitfleet.data.image_cache import VARIABLE, images_key, read_shared, shared_images
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.sources import load
from vitfleet.data.sources.load import load_dataset


@pytest.fixture
def photos(tmp_path: Path) -> DataConfig:
    draw_photos(tmp_path / "photos", ("grass", "roof", "sea"), 10)
    (tmp_path / "photos" / "sea" / "broken.png").write_bytes(b"not an image")
    return DataConfig(name="mine", path=str(tmp_path / "photos"), max_corrupt=0.5)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which every decoding appends the name of its data set."""
    names: list[str] = []

    def record(name: str, *args: Any, **kwargs: Any) -> DataSet:
        names.append(name)
        return decode.decode_dataset(name, *args, **kwargs)

    monkeypatch.setattr(load, "decode_dataset", record)
    return names


def assert_equal(first: DataSet, second: DataSet) -> None:
    assert (first.name, first.classes, first.skipped) == (second.name, second.classes, second.skipped)
    for one, other in ((first.train, second.train), (first.test, second.test)):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert (one.sources is None) == (other.sources is None)
        assert one.sources is None or other.sources is None or torch.equal(one.sources, other.sources)


def test_images_are_decoded_once_and_the_same_for_all(photos: DataConfig, decoded: list[str], tmp_path: Path) -> None:
    alone = load_dataset(photos)
    assert alone.skipped
    decoded.clear()
    with shared_images([photos, photos]):
        first, second = load_dataset(photos), load_dataset(photos)
        validation = load_dataset(photos.model_copy(update={"validation": 0.2}))
        assert decoded == ["mine"], "validation images are held out of the same images"
        load_dataset(photos.model_copy(update={"limit": 12}))
        load_dataset(photos.model_copy(update={"limit": 12}))
        assert decoded == ["mine"] * 3, "a limit gives other images, which are not shared here"
    assert_equal(first, alone)
    assert_equal(second, alone)
    assert len(validation.train) < len(alone.train)
    assert VARIABLE not in os.environ
    load_dataset(photos)
    assert decoded == ["mine"] * 4, "nothing is shared outside of a comparison"


def test_sources_of_images_are_shared(photos: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4), torch.arange(4))
    data = DataSet("mine", ("a", "b", "c", "d"), images, images)
    monkeypatch.setattr(load, "_load", lambda request: data)
    with shared_images([photos, photos]):
        load_dataset(photos)
        shared = read_shared(photos)
    assert shared is not None
    assert_equal(shared, data)


def test_only_what_is_done_later_with_the_images_may_differ(photos: DataConfig) -> None:
    later = {"validation": 0.1, "tasks": TasksConfig()}
    assert images_key(photos.model_copy(update=later)) == images_key(photos)
    for key, value in {"limit": 5, "path": "other", "name": "other", "test_share": 0.4, "max_corrupt": 0.1}.items():
        assert images_key(photos.model_copy(update={key: value})) != images_key(photos), key


def test_a_file_that_cannot_be_written_or_read_costs_only_time(
    photos: DataConfig, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object) -> bool:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch, shared_images([photos, photos]):
        patch.setattr(image_cache, "write_decoded", full_disk)
        load_dataset(photos)
        load_dataset(photos)
    assert decoded == ["mine", "mine"]
    with shared_images([photos, photos]):
        load_dataset(photos)
        folder = Path(os.environ[VARIABLE]) / images_key(photos)
        for name, content in (("data.json", b"{"), ("images.safetensors", b"damaged")):
            before = (folder / name).read_bytes()
            (folder / name).write_bytes(content)
            assert read_shared(photos) is None
            (folder / name).write_bytes(before)
        assert read_shared(photos) is not None
        shutil.rmtree(folder)
        assert read_shared(photos) is None


def test_comparisons_that_overlap_share_nothing_wrong(photos: DataConfig) -> None:
    first, second = shared_images([photos, photos]), shared_images([photos, photos])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    load_dataset(photos)
    assert read_shared(photos) is None


def test_a_users_data_set_may_use_every_key(photos: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, held_out = DataConfig(), DataConfig(validation=0.2)
    assert images_key(plain) == images_key(held_out)
    entry = DATASETS.get("digits")
    assert entry is not None
    own = replace(entry, origin=Origin("mine"))
    monkeypatch.setitem(DATASETS._entries, "digits", own)
    assert images_key(plain) != images_key(held_out)


def test_images_that_take_too_much_of_the_disk_are_decoded_again(
    photos: DataConfig, decoded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.data.image_cache.MAX_BYTES", 100)
    with shared_images([photos, photos]):
        load_dataset(photos)
        load_dataset(photos)
    assert decoded == ["mine", "mine"]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.usefixtures("without_figure_files")
def test_a_comparison_decodes_once(
    jobs: int, photos: DataConfig, decoded: list[str], tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    keys = [key for key in tiny_overrides if not key.startswith("data.")]
    comparison = vitfleet.compare(
        "digits",
        overrides=[*keys, f"data.path={photos.path}", "data.max_corrupt=0.5", "data.partition.kind=iid", "rounds=1"],
        seeds=(0, 1),
        jobs=jobs,
        out=tmp_path / "both",
    )
    assert len(comparison.left) == 0
    assert decoded == ["photos"], "with several processes, before they start"
