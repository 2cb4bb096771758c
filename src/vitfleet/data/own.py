"""A device's own images: its folder or parquet files, under the classes that the server names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from vitfleet.data.decode import Encoded, decode
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.layouts import image_folder
from vitfleet.data.sources import hold_out
from vitfleet.data.tables import holds_parquet, parquet
from vitfleet.errors import DataError


def load_own(
    path: Path, classes: tuple[str, ...], channels: int, side: int, share: float, max_corrupt: float
) -> DataSet:
    """Read the images under a path.

    Parameters
    ----------
    path
        ``<class>/*``, ``train|test/<class>/*`` or parquet files; without a test split a share of each class is held
        out. A device need not have every class, nor images of both splits.
    classes, channels, side
        The run's, as the server says them: a device's classes are found among them by their names.
    share, max_corrupt
        ``data.test_share`` and ``data.max_corrupt``.

    Raises
    ------
    DataError
        Nothing is there, or it holds a class that the run does not know.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    found = parquet(path) if holds_parquet(path) else image_folder(path)
    strange = sorted(set(found.classes) - set(classes))
    if strange:
        raise DataError(f"{path}: the run has no class {strange[0]!r}; it knows {', '.join(classes)}")
    numbers = np.array([classes.index(name) for name in found.classes], dtype=np.int64)
    train, test = hold_out(found.train, share) if found.test is None else (found.train, found.test)

    def read(split: Encoded, name: str) -> tuple[ImageSet, list[str]]:
        renumbered = replace(split, labels=numbers[split.labels] if len(split) else split.labels)
        return decode(renumbered, side, channels, max_corrupt, f"{path} ({name})")

    trained, lost = read(train, "train")
    tested, lost_too = read(test, "test")
    return DataSet(path.name, classes, trained, tested, (*lost, *lost_too))
