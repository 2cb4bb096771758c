"""Data sets from tensors, arrays and objects of the datasets library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from made_sets import grey_levels
from vitfleet.data.from_objects import fingerprint, from_hf, from_tensors
from vitfleet.errors import DataError

RGB = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 8), dtype=np.uint8)
LABELS = np.arange(20) % 4
TEST = (RGB[:5], LABELS[:5])


# Tensors and arrays


def test_from_tensors_keeps_pixels_and_labels() -> None:
    data = from_tensors(RGB, LABELS, test=TEST, class_names=["a", "b", "c", "d"], name="mine")
    assert (data.name, data.classes, data.skipped) == ("mine", ("a", "b", "c", "d"), ())
    assert torch.equal(data.train.images, torch.from_numpy(RGB))
    assert data.train.labels.tolist() == LABELS.tolist()
    assert data.train.labels.dtype == torch.int64
    assert torch.equal(data.test.images, torch.from_numpy(RGB[:5]))
    assert data.train.sources is None


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor, lambda values: np.asarray(values).tolist()])
def test_from_tensors_accepts_arrays_tensors_and_lists_of_labels(convert: Any) -> None:
    data = from_tensors(torch.from_numpy(RGB), convert(LABELS), test=TEST)
    assert data.train.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    "images",
    [
        RGB.transpose(0, 2, 3, 1),
        np.ascontiguousarray(RGB.transpose(0, 2, 3, 1)),
        torch.from_numpy(RGB).permute(0, 2, 3, 1),
    ],
    ids=["view", "array", "tensor"],
)
def test_from_tensors_accepts_channels_last(images: Any) -> None:
    data = from_tensors(images, LABELS, test=TEST)
    assert torch.equal(data.train.images, torch.from_numpy(RGB))
    assert data.train.images.is_contiguous()


def test_from_tensors_accepts_greyscale_without_a_channel_axis() -> None:
    data = from_tensors(RGB[:, 0], LABELS, test=(RGB[:5, :1], LABELS[:5]))
    assert torch.equal(data.train.images, torch.from_numpy(RGB[:, :1]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_from_tensors_stores_floats_as_uint8(dtype: Any) -> None:
    grey = np.array([0, 0.2, 0.5, 1.0]).astype(dtype).reshape(4, 1, 1, 1) * np.ones((1, 1, 2, 2), dtype)
    data = from_tensors(grey, [0, 0, 1, 1], test=(grey, [0, 0, 1, 1]))
    assert data.train.images.dtype == torch.uint8
    assert grey_levels(data.train.images) == [0, 51, 128, 255]


def test_from_tensors_holds_out_a_share_of_every_class_without_a_test_set() -> None:
    data = from_tensors(RGB, LABELS, test_share=0.4)
    assert data.train.labels.bincount().tolist() == [3] * 4
    assert data.test.labels.bincount().tolist() == [2] * 4
    again = from_tensors(RGB, LABELS, test_share=0.4)
    assert torch.equal(data.test.images, again.test.images)
    pixels = {image.numpy().tobytes() for image in torch.cat([data.train.images, data.test.images])}
    assert pixels == {image.tobytes() for image in RGB}


def test_from_tensors_names_classes_by_the_largest_label_of_both_splits() -> None:
    assert from_tensors(RGB, LABELS, test=(RGB[:1], [6])).classes == tuple("0123456")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": RGB[0]}, r"\[count, channels, size, size\].* with 1 or 3 channels, not \[3, 8, 8\]|labels"),
        ({"images": RGB[..., :6]}, r"images: must be square, not 8 x 6; crop or resize"),
        ({"images": np.repeat(RGB, 2, axis=1)}, r"images: must be .* 1 or 3 channels, not \[20, 6, 8, 8\]"),
        ({"images": RGB[:, 0, 0]}, r"images: must be .* not \[20, 8\]"),
        (
            {"images": RGB.astype(np.int64)},
            r"images: must be uint8, or floating-point numbers in 0…1, not torch\.int64",
        ),
        ({"images": RGB.astype(np.float32)}, r"images: floating-point numbers must be in 0…1, not in 0…255"),
        ({"images": RGB / 127.5 - 1}, r"in 0…1, not in -1…1; pass them unnormalised"),
        ({"images": np.full(RGB.shape, np.nan)}, r"in 0…1, not in nan…nan"),
        ({"images": ["cat.png"] * 20}, r"images: must be a tensor or an array of numbers"),
        ({"labels": LABELS[:-1]}, r"labels: must be one integer per image, \[20\], not \[19\]"),
        ({"labels": np.eye(20)[:, 0] > 0}, r"labels: must be integers, not torch\.bool"),
        ({"labels": LABELS / 2}, r"labels: must be integers, not torch\.float64"),
        ({"labels": LABELS - 1}, r"labels: must not be negative; the smallest is -1"),
        ({"labels": LABELS[:, None]}, r"labels: must be one integer per image, \[20\], not \[20, 1\]"),
        ({"class_names": ["a", "b"]}, r"labels go up to 3, but class_names has 2 names"),
        ({"test": (RGB[:, :1], LABELS)}, r"different shapes, \[3, 8, 8\] and \[1, 8, 8\]"),
        ({"test": (RGB, LABELS[:3])}, r"test labels: must be one integer per image, \[20\], not \[3\]"),
        ({"test": (RGB[:0], LABELS[:0])}, r"20 training and 0 test images are too few"),
        ({"images": RGB[:1], "labels": [0], "test": None}, r"1 training and 0 test images are too few"),
    ],
)
def test_from_tensors_rejects_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_tensors(**{"images": RGB, "labels": LABELS, "test": TEST, **change})


# Objects of the datasets library


def rows(greys: list[int], labels: list[Any], mode: str = "RGB", **columns: list[Any]) -> Any:
    datasets = pytest.importorskip("datasets")
    images = [Image.new(mode, (6, 6), (grey,) * 3 if mode == "RGB" else grey) for grey in greys]
    table = datasets.Dataset.from_dict({"image": images, "label": labels, **columns})
    return table.cast_column("image", datasets.Image())


def test_from_hf_reads_the_splits_of_a_dict_with_class_names() -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["ant", "bee"])
    splits = datasets.DatasetDict(
        {
            "train": rows([10, 20, 30], [1, 0, 1]).cast_column("label", names),
            "validation": rows([40], [0]).cast_column("label", names),
            "unlabelled": rows([50], [0]),
        }
    )
    data = from_hf(splits, name="insects")
    assert (data.name, data.classes) == ("insects", ("ant", "bee"))
    assert grey_levels(data.train.images) == [10, 20, 30]
    assert data.train.images.shape == (3, 3, 6, 6)
    assert data.train.labels.tolist() == [1, 0, 1]
    assert grey_levels(data.test.images) == [40]


def test_from_hf_holds_out_test_images_of_a_single_dataset() -> None:
    data = from_hf(rows(list(range(20)), [0, 1] * 10))
    assert data.classes == ("0", "1")
    assert sorted(grey_levels(data.train.images) + grey_levels(data.test.images)) == list(range(20))
    assert data.test.labels.bincount().tolist() == [2, 2]


def test_from_hf_follows_selected_and_shuffled_rows() -> None:
    data = from_hf({"train": rows(list(range(9)), ["a"] * 9).select([7, 2, 4]), "test": rows([50], ["a"])})
    assert grey_levels(data.train.images) == [7, 2, 4]


def test_from_hf_keeps_greyscale_images_greyscale() -> None:
    data = from_hf({"train": rows([1, 2], [0, 0], mode="L"), "test": rows([3], [0], mode="L")})
    assert data.train.channels == data.test.channels == 1


def test_from_hf_reads_the_named_columns() -> None:
    train = rows([1, 2], [0, 0], species=["yak", "emu"]).rename_column("image", "photo")
    test = rows([3], [0], species=["emu"]).rename_column("image", "photo")
    data = from_hf({"train": train, "test": test}, image_column="photo", label_column="species")
    assert data.classes == ("emu", "yak")
    assert data.train.labels.tolist() == [1, 0]


def test_from_hf_reads_images_that_are_files(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    paths = []
    for grey in (5, 6):
        Image.new("RGB", (4, 4), (grey,) * 3).save(tmp_path / f"{grey}.png")
        paths.append(str(tmp_path / f"{grey}.png"))
    table = datasets.Dataset.from_dict({"image": paths, "label": [0, 0]}).cast_column("image", datasets.Image())
    assert grey_levels(from_hf({"train": table, "test": table}).train.images) == [5, 6]


def test_from_hf_rejects_missing_columns_and_splits() -> None:
    table = rows([1, 2], [0, 0])
    with pytest.raises(
        DataError, match=r"datasets: train has no image column: .*; set data\.image_column \(image_column="
    ):
        from_hf(table.rename_column("image", "photo"))
    with pytest.raises(DataError, match=r"no label column: .*found image, kind"):
        from_hf(table.rename_column("label", "kind"))
    with pytest.raises(DataError, match="has no split 'train', only test"):
        from_hf({"test": table})
    with pytest.raises(DataError, match=r"split 'train' is a list; pass a datasets\.Dataset"):
        from_hf([1, 2, 3])


def test_from_hf_rejects_a_streamed_dataset() -> None:
    with pytest.raises(DataError, match=r"IterableDataset; pass a datasets\.Dataset, loaded without streaming"):
        from_hf(rows([1, 2], [0, 0]).to_iterable_dataset())


def test_from_hf_rejects_a_column_without_images() -> None:
    with pytest.raises(DataError, match=r"column 'label' holds .*not images"):
        from_hf(rows([1, 2], [0.5, 0.5]), image_column="label")


# Fingerprints


def make(images: NDArray[np.uint8] = RGB, labels: Any = LABELS, **arguments: Any) -> str:
    return fingerprint(from_tensors(images, labels, **{"test": TEST, **arguments}))


def test_fingerprint_is_the_same_for_equal_data() -> None:
    assert make() == make(RGB.copy(), LABELS.copy(), name="another name")
    assert make() == make(RGB.transpose(0, 2, 3, 1))
    assert len(make()) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"images": np.where(np.arange(RGB.size).reshape(RGB.shape) == 777, RGB ^ 1, RGB)},
        {"labels": np.where(np.arange(20) == 7, 0, LABELS)},
        {"images": RGB[::-1]},
        {"test": (RGB[:4], LABELS[:4])},
        {"test": (RGB[5:10], LABELS[:5])},
        {"class_names": ["a", "b", "c", "d"]},
    ],
    ids=["one bit", "one label", "order", "fewer test images", "other test images", "class names"],
)
def test_fingerprint_changes_with_any_content(change: dict[str, Any]) -> None:
    assert make(**change) != make()


def test_fingerprint_depends_on_sources() -> None:
    data = from_tensors(RGB, LABELS, test=TEST)
    sourced = replace(data, train=replace(data.train, sources=torch.zeros(20, dtype=torch.int64)))
    assert fingerprint(sourced) != fingerprint(data)
