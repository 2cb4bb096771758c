"""A device's own images: its folder or parquet files, under the classes that the server names.

Decoded once, they are kept in memory, and beside the device's other things for the process that comes next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from vitfleet.data.decode import Encoded, decode
from vitfleet.data.image_folder import image_folder
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.parquet import holds_parquet, parquet
from vitfleet.data.sources import split_holdout
from vitfleet.errors import DataError
from vitfleet.files import write_atomically

LARGEST_KEPT = 2**31  # bytes of pixels: beyond, an edge device's storage is worth more than the seconds


@dataclass(frozen=True)
class DataSpec:
    """What a run wants of a device's images.

    Attributes
    ----------
    classes, channels, side
        The run's classes by name, colour channels, pixels a side.
    test_share, max_corrupt
        Keys of the table ``data``.
    """

    classes: tuple[str, ...]
    channels: int
    image_size: int
    test_share: float
    max_corrupt: float


def load_local(path: Path, form: DataSpec) -> DataSet:
    """Read the images under a path.

    Parameters
    ----------
    path
        ``<class>/*``, ``train|test/<class>/*`` or parquet files; without a test split a share of each class is held
        out. A device need not have every class, nor images of both splits.

    Raises
    ------
    DataError
        Nothing is there, or it holds a class that the run does not know.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    found = parquet(path) if holds_parquet(path) else image_folder(path)
    strange = sorted(set(found.classes) - set(form.classes))
    if strange:
        raise DataError(f"{path}: the run has no class {strange[0]!r}; it knows {', '.join(form.classes)}")
    numbers = np.array([form.classes.index(name) for name in found.classes], dtype=np.int64)
    train, test = split_holdout(found.train, form.test_share) if found.test is None else (found.train, found.test)

    def read(split: Encoded, name: str) -> tuple[ImageSet, list[str]]:
        renumbered = replace(split, labels=numbers[split.labels] if len(split) else split.labels)
        images, lost = decode(renumbered, form.image_size, form.channels, form.max_corrupt, f"{path} ({name})")
        return replace(images, sources=None), lost

    trained, lost = read(train, "train")
    tested, lost_too = read(test, "test")
    return DataSet(path.name, form.classes, trained, tested, (*lost, *lost_too))


class LocalDataset:
    """A device's images: read when they have changed, else as they were when they were last read.

    Parameters
    ----------
    path
        Where they are: see :func:`load_local`.
    folder
        Where they are kept once they are decoded.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self._last: tuple[str, DataSet] | None = None

    def load(self, form: DataSpec) -> DataSet:
        """Return the images; as long as they are the same, the same object."""
        fingerprint = _fingerprint(self.path, form)
        if self._last is None or self._last[0] != fingerprint:
            self._last = None  # before the others are read
            self._last = fingerprint, self._load(form, self.folder / f"images-{fingerprint}.safetensors")
        return self._last[1]

    def _load(self, form: DataSpec, kept: Path) -> DataSet:
        splits = _read_kept(kept)
        if splits is not None:
            return DataSet(self.path.name, form.classes, *splits)
        data = load_local(self.path, form)
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("images-*.safetensors"):
            old.unlink()
        if data.train.images.numel() + data.test.images.numel() <= LARGEST_KEPT:
            parts = {"train": data.train, "test": data.test}
            tensors = {f"{part}.images": images.images for part, images in parts.items()}
            tensors |= {f"{part}.labels": images.labels for part, images in parts.items()}
            write_atomically(kept, save(tensors))
        return data


def _read_kept(file: Path) -> tuple[ImageSet, ImageSet] | None:
    """Return the two splits that were kept; ``None`` if they were not, or not whole."""
    try:
        tensors = load_file(file)
        train, test = (ImageSet(tensors[f"{part}.images"], tensors[f"{part}.labels"]) for part in ("train", "test"))
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
    return train, test


def _fingerprint(path: Path, form: DataSpec) -> str:
    """Return what changes when a file, or what is wanted of it, does."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    seen = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return sha256(json.dumps([seen, repr(form)]).encode()).hexdigest()[:16]
