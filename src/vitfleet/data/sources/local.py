"""The images of one device, from its own folder or parquet files, with the class names of the run.

Decoded images stay in memory, and in a cache file for the next process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from vitfleet.data.decode import EncodedSplit, decode_split, split_off_test
from vitfleet.data.image_cache import read_decoded, write_decoded
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.sources.image_folder import read_image_folder
from vitfleet.data.sources.tables import has_parquet, read_parquet
from vitfleet.errors import DataError

MAX_CACHED_BYTES = 2**31  # more is decoded again, to save an edge device's storage


@dataclass(frozen=True)
class DataSpec:
    """What a run needs of a device's images."""

    classes: tuple[str, ...]
    channels: int
    image_size: int  # height and width in pixels
    test_share: float  # with max_corrupt: keys of the table `data`
    max_corrupt: float


def load_local(path: Path, spec: DataSpec) -> DataSet:
    """Read the images under a path: ``<class>/*``, ``train|test/<class>/*`` or parquet files.

    Without a test split a share of each class is held out. A device need not have images of every class, but none of a
    class that the run does not have.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    raw = read_parquet(path) if has_parquet(path) else read_image_folder(path)
    unknown = sorted(set(raw.classes) - set(spec.classes))
    if unknown:
        raise DataError(f"{path}: the run has no class {unknown[0]!r}; its classes are {', '.join(spec.classes)}")
    run_label = np.array([spec.classes.index(name) for name in raw.classes], dtype=np.int64)

    def decode(split: EncodedSplit, name: str) -> tuple[ImageSet, list[str]]:
        renumbered = replace(split, labels=run_label[split.labels] if len(split) else split.labels)
        label = f"{path} ({name})"
        images, skipped = decode_split(renumbered, spec.image_size, spec.channels, spec.max_corrupt, label)
        return replace(images, sources=None), skipped

    train_split, test_split = split_off_test(raw, spec.test_share)
    train, skipped_train = decode(train_split, "train")
    test, skipped_test = decode(test_split, "test")
    return DataSet(path.name, spec.classes, train, test, (*skipped_train, *skipped_test))


class LocalDataset:
    """The images of a device, decoded once until a file changes.

    ``free_bytes`` returns the largest size that the cache file may have now: images that do not fit are decoded again
    by the next process.
    """

    def __init__(
        self, path: Path, cache_folder: Path, free_bytes: Callable[[], int] = lambda: MAX_CACHED_BYTES
    ) -> None:
        self.path = path
        self.cache_folder = cache_folder
        self.free_bytes = free_bytes
        self._loaded: tuple[str, DataSet] | None = None

    def load(self, spec: DataSpec) -> DataSet:
        """Return the images; the same object as long as the files and the spec are the same."""
        state = _hash_files(self.path, spec)
        if self._loaded is None or self._loaded[0] != state:
            self._loaded = None  # free the old images before the new ones are read
            self._loaded = state, self._load(spec, self.cache_folder / f"images-{state}.safetensors")
        return self._loaded[1]

    def _load(self, spec: DataSpec, cache_file: Path) -> DataSet:
        splits = read_decoded(cache_file)
        if splits is not None:
            return DataSet(self.path.name, spec.classes, *splits)
        data = load_local(self.path, spec)
        self.cache_folder.mkdir(parents=True, exist_ok=True)
        for outdated in self.cache_folder.glob("images-*.safetensors"):
            outdated.unlink()
        write_decoded(data, cache_file, min(MAX_CACHED_BYTES, self.free_bytes()))
        return data


def _hash_files(path: Path, spec: DataSpec) -> str:
    """Return a hash that changes if a file or the spec changes."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    states = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return sha256(json.dumps([states, repr(spec)]).encode()).hexdigest()[:16]
