"""The built-in data sets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.registry import NoParams, register_dataset
from vitfleet.data.decode import EncodedSplit, RawDataset, encode_png
from vitfleet.data.images import DataSet
from vitfleet.data.sources.folder_layouts import read_core50, read_core50_sessions, read_miniimagenet
from vitfleet.data.sources.load import DataRequest, DatasetInfo, read_dataset
from vitfleet.data.sources.tables import ColumnNames
from vitfleet.errors import DataError

DIGITS = "digits"
DIGITS_IMAGE_SIZE = 8
CORE50_DOWNLOAD = "download core50_128x128.zip from CORe50's home page and unpack it"
SUPERCLASS_COLUMN = "coarse_label"


def order_by_superclass(raw: RawDataset) -> RawDataset:
    """Renumber the classes by (superclass, class); the source of an image is its superclass."""
    splits = [raw.train] if raw.test is None else [raw.train, raw.test]
    superclass = np.full(len(raw.classes), np.iinfo(np.int64).max)  # a class without images comes last
    for split in splits:
        if split.sources is None:
            raise DataError(f"fc100: the superclasses are unknown: column {SUPERCLASS_COLUMN} is missing")
        superclass[split.labels] = split.sources
    for split in splits:
        if (superclass[split.labels] != split.sources).any():
            raise DataError(f"fc100: {SUPERCLASS_COLUMN} puts one class into several superclasses")
    order = np.argsort(superclass, kind="stable")
    new_label = np.argsort(order)
    train, *test = [replace(split, labels=new_label[split.labels]) for split in splits]
    return RawDataset(tuple(raw.classes[i] for i in order.tolist()), train, test[0] if test else None)


DATASET_INFOS = (
    DatasetInfo("cifar10", "uoft-cs/cifar10"),
    DatasetInfo("cifar100", "uoft-cs/cifar100"),
    DatasetInfo("ucmerced", "blanchon/UC_Merced"),
    DatasetInfo("tinyimagenet", "zh-plus/tiny-imagenet"),
    DatasetInfo(
        "fc100",
        "uoft-cs/cifar100",
        folders=("fc100", "cifar100"),
        columns=ColumnNames(source=(SUPERCLASS_COLUMN,)),
        transform=order_by_superclass,
    ),
    DatasetInfo("miniimagenet", "timm/mini-imagenet", read_folder=read_miniimagenet),
    DatasetInfo("core50", read_folder=read_core50, download_hint=CORE50_DOWNLOAD),
    DatasetInfo(
        "core50_sessions", folders=("core50",), read_folder=read_core50_sessions, download_hint=CORE50_DOWNLOAD
    ),
    DatasetInfo("fashion_mnist", "zalando-datasets/fashion_mnist", channels=1),
)


def _register(info: DatasetInfo) -> None:
    @register_dataset(info.name)
    def read(params: NoParams, request: DataRequest) -> DataSet:
        return read_dataset(info, request)


for _info in DATASET_INFOS:
    _register(_info)


@register_dataset(DIGITS)
def digits(params: NoParams, request: DataRequest) -> DataSet:
    """Return scikit-learn's digits. They have no files: with ``data.path``, the images there are read instead."""
    path = request.config.path  # `digits` is the default name: a user who sets only a path means their own images
    if path is not None:
        return read_dataset(DatasetInfo(Path(path).resolve().stem, channels=None), request)
    return request.decode(DIGITS, _read_digits(), channels=1)


def _read_digits() -> RawDataset:
    # The file that scikit-learn's `load_digits` reads; importing scikit-learn takes seconds, with scipy and pandas.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits come with scikit-learn, which the extras `sim` and `flower` install")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.exists():
        raise DataError(f"digits come with scikit-learn, but {file} is missing; reinstall scikit-learn")
    return _encode_digits(file)


@cache
def _encode_digits(file: Path) -> RawDataset:
    """Read and encode the digits once in a process: its runs share them."""
    table = np.loadtxt(file, delimiter=",")
    images = table[:, :-1].reshape(-1, DIGITS_IMAGE_SIZE, DIGITS_IMAGE_SIZE)
    pixels: NDArray[np.uint8] = np.round(images * (255 / 16)).astype(np.uint8)
    labels: NDArray[np.int64] = table[:, -1].astype(np.int64)
    names = [f"{DIGITS}:{i}" for i in range(len(pixels))]
    # Encoded without loss, so that digits are read like every other data set.
    items = [encode_png(image[None]) for image in pixels]
    return RawDataset(tuple(str(digit) for digit in range(10)), EncodedSplit(items, names, labels), None)
