"""Decoded images that several runs share: the first one decodes and writes a file, the others read it.

Decoding 60,000 small images takes 15 s of a processor, reading them back a tenth of a second.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from vitfleet.config.schema import DataConfig
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.files import read_json, write_atomically
from vitfleet.message import State
from vitfleet.wire import encoded_size, write_payload

VARIABLE = "VITFLEET_SHARED_IMAGES"  # names the folder, for this process and those that it starts
FOLDER = ".images"
MAX_BYTES = 2**32  # more is decoded again by every run
# What is done with the images once they are decoded. Any other key may decide which images there are.
LATER_KEYS = frozenset({"partition", "tasks", "augment", "validation"})


@contextmanager
def shared_images(folder: Path) -> Iterator[None]:
    """Let all runs within the context, and those of processes that it starts, share the images that they decode.

    Parameters
    ----------
    folder
        Where a folder with the images is made. It is removed at the end.
    """
    path, before = folder.resolve() / FOLDER, os.environ.get(VARIABLE)
    shutil.rmtree(path, ignore_errors=True)  # left by a process that was killed
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
        shutil.rmtree(path, ignore_errors=True)


def images_key(config: DataConfig) -> str:
    """Return what two tables ``data`` have in common if they name the same images."""
    text = config.model_dump_json(exclude=set(LATER_KEYS))
    return sha256(text.encode()).hexdigest()[:16]


def read_shared(config: DataConfig) -> DataSet | None:
    """Return the images that another run has decoded; ``None`` if there are none."""
    files = _files(config)
    if files is None or not files[1].exists():  # the second file is written last
        return None
    tensors, tree = load_file(files[0]), read_json(files[1])

    def split(name: str) -> ImageSet:
        return ImageSet(tensors[f"{name}.images"], tensors[f"{name}.labels"], tensors.get(f"{name}.sources"))

    return DataSet(tree["name"], tuple(tree["classes"]), split("train"), split("test"), tuple(tree["skipped"]))


def write_shared(config: DataConfig, data: DataSet) -> None:
    """Write decoded images for other runs, unless nobody shares them or they take too much of the disk."""
    files = _files(config)
    if files is None:
        return
    tensors: dict[str, Tensor] = {}
    for name, split in (("train", data.train), ("test", data.test)):
        tensors |= {f"{name}.images": split.images, f"{name}.labels": split.labels}
        if split.sources is not None:
            tensors[f"{name}.sources"] = split.sources
    folder = files[0].parent
    if encoded_size(State(tensors)) > min(MAX_BYTES, shutil.disk_usage(folder.parent).free // 2):
        return
    folder.mkdir(exist_ok=True)
    write_payload(files[0], State(tensors))
    tree = {"name": data.name, "classes": data.classes, "skipped": data.skipped}
    write_atomically(files[1], json.dumps(tree).encode())


def _files(config: DataConfig) -> tuple[Path, Path] | None:
    """Return the files of the images and of their description; ``None`` where nothing is shared."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    key = images_key(config)
    return Path(folder) / f"{key}.safetensors", Path(folder) / f"{key}.json"
