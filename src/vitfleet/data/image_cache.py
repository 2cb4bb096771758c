"""Decoded images in files: the cache of a device, and what several runs of a comparison share.

Decoding 60,000 small images takes 15 s of a processor, reading them back a tenth of a second. Of several runs the first
one decodes and writes a file, the others read it. A file only saves time: where it cannot be written or read, a run
decodes its images itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitfleet.config.registry import DATASETS
from vitfleet.config.schema import DataConfig
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.message import State
from vitfleet.wire import encoded_size, write_payload

VARIABLE = "VITFLEET_SHARED_IMAGES"  # names the folder, for this process and those that it starts
MAX_BYTES = 2**32  # more is decoded again by every run
# What is done with the images once they are decoded. Any other key may decide which images there are.
LATER_KEYS = frozenset({"partition", "tasks", "augment", "validation"})


def write_decoded(data: DataSet, file: Path, max_bytes: int) -> bool:
    """Write both splits of a data set if the file has at most ``max_bytes``; return whether it was written."""
    tensors: dict[str, Tensor] = {}
    for name, split in (("train", data.train), ("test", data.test)):
        tensors |= {f"{name}.images": split.images, f"{name}.labels": split.labels}
        if split.sources is not None:
            tensors[f"{name}.sources"] = split.sources
    if encoded_size(State(tensors)) > max_bytes:
        return False
    write_payload(file, State(tensors))
    return True


def read_decoded(file: Path) -> tuple[ImageSet, ImageSet] | None:
    """Return the training and the test images of a file; ``None`` if there is no file or if it is damaged."""
    try:
        tensors = load_file(file)
        train, test = (
            ImageSet(tensors[f"{name}.images"], tensors[f"{name}.labels"], tensors.get(f"{name}.sources"))
            for name in ("train", "test")
        )
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
    return train, test


@contextmanager
def shared_images(configs: Iterable[DataConfig]) -> Iterator[list[DataConfig]]:
    """Let runs within the context, and those of processes that it starts, share the images that they decode.

    Of the tables ``data`` of the runs, those are yielded whose images are shared: a single run shares none.
    """
    keys = [(images_key(config), config) for config in configs]
    counts = Counter(key for key, _ in keys)
    shared = {key: config for key, config in keys if counts[key] > 1}
    before = os.environ.get(VARIABLE)
    with TemporaryDirectory(prefix="vitfleet-images-", ignore_cleanup_errors=True) as folder:
        for key in shared:
            (Path(folder) / key).mkdir()
        os.environ[VARIABLE] = folder
        try:
            yield list(shared.values())
        finally:
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before


def images_key(config: DataConfig) -> str:
    """Return a key of the images that a table ``data`` names: tables that name the same ones have the same key.

    The loader of a user's own data set receives the whole table and may use any key of it.
    """
    entry = DATASETS.get(config.name)
    later = LATER_KEYS if entry is None or entry.origin.built_in else frozenset[str]()
    return sha256(config.model_dump_json(exclude=set(later)).encode()).hexdigest()[:16]


def read_shared(config: DataConfig) -> DataSet | None:
    """Return the images that another run has decoded; ``None`` if there are none."""
    folder = _folder(config)
    if folder is None:
        return None
    try:
        tree = json.loads((folder / "data.json").read_bytes())  # is written last
        splits = read_decoded(folder / "images.safetensors")
    except (OSError, ValueError):
        return None
    return None if splits is None else DataSet(tree["name"], tuple(tree["classes"]), *splits, tuple(tree["skipped"]))


def write_shared(config: DataConfig, data: DataSet) -> None:
    """Write decoded images for other runs, where they are shared and do not take too much of the disk."""
    folder = _folder(config)
    if folder is None:
        return
    with suppress(OSError):  # a full disk, a quota: the other runs decode the images themselves
        room = shutil.disk_usage(folder).free // 2
        if write_decoded(data, folder / "images.safetensors", min(MAX_BYTES, room)):
            tree = {"name": data.name, "classes": data.classes, "skipped": data.skipped}
            (folder / "data.json").write_text(json.dumps(tree))


def _folder(config: DataConfig) -> Path | None:
    """Return the folder of the images of a table ``data``; ``None`` where they are not shared."""
    parent = os.environ.get(VARIABLE)
    folder = Path(parent) / images_key(config) if parent else None
    return folder if folder is not None and folder.is_dir() else None
