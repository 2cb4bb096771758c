"""Sizes of data sets that determine costs, without decoding images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from vitfleet.config.schema import DataConfig
from vitfleet.data.decode import probe_images, split_off_test
from vitfleet.data.image_folder import find_test_folder, read_image_folder
from vitfleet.data.images import DataSet
from vitfleet.data.parquet import has_parquet
from vitfleet.data.subsets import training_and_test_limit
from vitfleet.errors import DataError


@dataclass(frozen=True)
class DatasetSize:
    """Sizes of a data set that determine its costs.

    Attributes
    ----------
    side
        Height and width of an image, in pixels.
    samples, test_samples
        Number of training images, and of the images that accuracy is measured on.
    """

    num_classes: int
    channels: int
    side: int
    samples: int
    test_samples: int

    @classmethod
    def of(cls, data: DataSet) -> DatasetSize:
        """Return the sizes of a loaded data set."""
        train = data.train
        return cls(len(data.classes), train.channels, train.image_size, len(train), len(data.test))

    @property
    def image_bytes(self) -> int:
        """Bytes of all images, one per pixel and channel."""
        return (self.samples + self.test_samples) * self.channels * self.side**2


DATASET_SIZES = {
    "cifar10": DatasetSize(10, 3, 32, 50_000, 10_000),
    "cifar100": DatasetSize(100, 3, 32, 50_000, 10_000),
    "fc100": DatasetSize(100, 3, 32, 50_000, 10_000),
    "ucmerced": DatasetSize(21, 3, 256, 1_680, 420),
    "tinyimagenet": DatasetSize(200, 3, 64, 100_000, 10_000),
    "miniimagenet": DatasetSize(100, 3, 84, 50_000, 10_000),
    "core50": DatasetSize(50, 3, 128, 120_000, 45_000),
    "core50_sessions": DatasetSize(550, 3, 128, 120_000, 45_000),
    "fashion_mnist": DatasetSize(10, 1, 28, 60_000, 10_000),
    "digits": DatasetSize(10, 1, 8, 1_438, 359),
}


def known_size(config: DataConfig) -> DatasetSize | None:
    """Return the sizes of the configured data set if that takes no decoding: of a built-in set, or an image folder.

    ``None`` for any other data set, and for a folder that cannot be read: loading it says why.
    """
    if config.path is None:
        size = DATASET_SIZES.get(config.name)
    else:
        size = _folder_size(Path(config.path).expanduser(), config)
    return None if size is None else _subset(size, config)


def _folder_size(root: Path, config: DataConfig) -> DatasetSize | None:
    if not root.is_dir() or has_parquet(root):
        return None
    try:
        raw = read_image_folder(find_test_folder(root) if config.test_only else root)
        train, test = split_off_test(raw, config.test_share)
        probe = probe_images(train)
    except (DataError, OSError):
        return None
    tested = len(raw.train) if config.test_only and raw.test is None else len(test)
    return DatasetSize(len(raw.classes), probe.channels, probe.size, len(train), tested)


def _subset(size: DatasetSize, config: DataConfig) -> DatasetSize:
    """Return the sizes after ``data.limit`` and ``data.validation``."""
    if config.limit is not None:
        train, test = training_and_test_limit(config.limit, size.num_classes)
        size = replace(size, samples=min(train, size.samples), test_samples=min(test, size.test_samples))
    if config.validation:
        held_out = round(config.validation * size.samples)
        size = replace(size, samples=size.samples - held_out, test_samples=held_out)
    return size
