"""Data sets from a user's own objects: tensors, arrays, and objects of the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfleet.data.decode import DecodeOptions, decode_dataset
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.sources.hub import read_splits
from vitfleet.data.sources.image_folder import TRAIN_SPLIT
from vitfleet.data.sources.tables import DEFAULT_COLUMNS
from vitfleet.data.subsets import draw_holdout
from vitfleet.errors import DataError

CHANNELS = (1, 3)
HF_OPTIONS = DecodeOptions(channels=None)


def from_tensors(
    images: Any,
    labels: Any,
    test: tuple[Any, Any] | None = None,
    class_names: Sequence[str] | None = None,
    name: str = "tensors",
    test_share: float = 0.2,
) -> DataSet:
    """Make a data set of tensors or arrays.

    Parameters
    ----------
    images
        Square images of 1 or 3 channels as ``[count, channels, size, size]``, ``[count, size, size, channels]`` or
        ``[count, size, size]``; uint8, or floating-point numbers in 0…1, which are stored as uint8.
    labels
        The class of each image, integers ``[count]``.
    test
        Images and labels of the test set; ``None``: hold out a share of every class.
    class_names
        Class names; default: ``"0"``, ``"1"``, … up to the largest label.
    name
        Name of the data set in messages and reports.
    test_share
        Share of every class that is held out if there is no test set.

    Raises
    ------
    DataError
        If shapes, types or labels do not fit; names the argument and the remedy.
    """
    train_images, train_labels = _as_images(images, "images"), _as_labels(labels, "labels", len(images))
    if test is None:
        held_out = torch.from_numpy(draw_holdout(train_labels.numpy(), test_share))
        test_images, test_labels = train_images[held_out], train_labels[held_out]
        train_images, train_labels = train_images[~held_out], train_labels[~held_out]
    else:
        test_images, test_labels = _as_images(test[0], "test images"), _as_labels(test[1], "test labels", len(test[0]))
    if train_images.shape[1:] != test_images.shape[1:]:
        shapes = f"{list(train_images.shape[1:])} and {list(test_images.shape[1:])}"
        raise DataError(f"{name}: training and test images have different shapes, {shapes}; resize them to one")
    if not len(train_images) or not len(test_images):
        counts = f"{len(train_images)} training and {len(test_images)} test images"
        raise DataError(f"{name}: {counts} are too few; pass more images, or a test set")
    largest = int(torch.cat([train_labels, test_labels]).max())
    names = tuple(str(label) for label in range(largest + 1)) if class_names is None else tuple(class_names)
    if largest >= len(names):
        raise DataError(f"{name}: labels go up to {largest}, but class_names has {len(names)} names")
    return DataSet(name, names, ImageSet(train_images, train_labels), ImageSet(test_images, test_labels))


def from_hf(
    dataset: Any,
    image_column: str | None = None,
    label_column: str | None = None,
    name: str = "datasets",
    options: DecodeOptions = HF_OPTIONS,
    source_column: str | None = None,
) -> DataSet:
    """Make a data set of a ``datasets.Dataset`` or ``datasets.DatasetDict``.

    Parameters
    ----------
    dataset
        A ``DatasetDict`` with a split ``train`` and perhaps ``test``, ``valid``, ``validation`` or ``val``; or one
        ``Dataset``, of which test images are held out.
    image_column, label_column
        The columns; default: ``image`` or ``img``, and ``fine_label``, ``label``, ``labels`` or ``class``.
    name
        Name of the data set in messages and reports.
    options
        How images are decoded; by default greyscale images stay greyscale.
    source_column
        The column of sources; default: ``source``, ``client``, ``writer``, ``user`` or ``domain``, if there is one.

    Raises
    ------
    DataError
        If a split or column is missing or of another type.
    """
    splits = dataset if isinstance(dataset, Mapping) else {TRAIN_SPLIT: dataset}
    for split, rows in splits.items():
        if not hasattr(rows, "column_names") or not hasattr(rows, "__len__"):
            kind = type(rows).__name__
            raise DataError(f"{name}: split '{split}' is a {kind}; pass a datasets.Dataset, loaded without streaming")
    try:
        raw = read_splits(splits, DEFAULT_COLUMNS.override(image_column, label_column, source_column))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    return decode_dataset(name, raw, options)


def fingerprint(data: DataSet) -> str:
    """Return the SHA-256 of a data set's class names, images, labels and sources.

    A run that is resumed with data passed as an object verifies by it that the data is the same.
    """
    digest = sha256()
    for class_name in data.classes:
        digest.update(class_name.encode() + b"\0")
    for split in (data.train, data.test):
        for tensor in (split.images, split.labels, split.sources):
            if tensor is None:
                digest.update(b"none")
                continue
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            array: Any = tensor.detach().cpu().contiguous().numpy()
            digest.update(array)
    return digest.hexdigest()


def _as_images(images: Any, argument: str) -> Tensor:
    """Return images as uint8 ``[count, channels, size, size]``."""
    tensor = _as_tensor(images, argument)
    shape = list(tensor.shape)
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    elif tensor.dim() == 4 and shape[1] not in CHANNELS and shape[3] in CHANNELS:
        tensor = tensor.permute(0, 3, 1, 2)
    if tensor.dim() != 4 or tensor.shape[1] not in CHANNELS:
        layouts = "[count, channels, size, size], [count, size, size, channels] or [count, size, size]"
        raise DataError(f"{argument}: must be {layouts} with 1 or 3 channels, not {shape}")
    if tensor.shape[2] != tensor.shape[3] or not tensor.shape[2]:
        raise DataError(f"{argument}: must be square, not {tensor.shape[2]} x {tensor.shape[3]}; crop or resize them")
    if tensor.dtype == torch.uint8:
        return tensor.contiguous()
    if not tensor.is_floating_point():
        raise DataError(f"{argument}: must be uint8, or floating-point numbers in 0…1, not {tensor.dtype}")
    if tensor.numel() and not (float(tensor.min()) >= 0 and float(tensor.max()) <= 1):  # also false for NaN
        bounds = f"{float(tensor.min()):.4g}…{float(tensor.max()):.4g}"
        raise DataError(f"{argument}: floating-point numbers must be in 0…1, not in {bounds}; pass them unnormalised")
    return (tensor * 255).round().to(torch.uint8).contiguous()


def _as_labels(labels: Any, argument: str, count: int) -> Tensor:
    """Return labels as int64 ``[count]``."""
    tensor = _as_tensor(labels, argument)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"{argument}: must be integers, not {tensor.dtype}")
    if tensor.shape != (count,):
        raise DataError(f"{argument}: must be one integer per image, [{count}], not {list(tensor.shape)}")
    if count and int(tensor.min()) < 0:
        raise DataError(f"{argument}: must not be negative; the smallest is {int(tensor.min())}")
    return tensor.to(torch.int64)


def _as_tensor(values: Any, argument: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return torch.from_numpy(np.ascontiguousarray(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{argument}: must be a tensor or an array of numbers ({error})") from error
