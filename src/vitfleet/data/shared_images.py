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

from vitfleet.config.schema import DataConfig
from vitfleet.data.decoded_file import read_decoded, write_decoded
from vitfleet.data.images import DataSet
from vitfleet.files import read_json, write_atomically

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
    splits, tree = read_decoded(files[0]), read_json(files[1])
    return None if splits is None else DataSet(tree["name"], tuple(tree["classes"]), *splits, tuple(tree["skipped"]))


def write_shared(config: DataConfig, data: DataSet) -> None:
    """Write decoded images for other runs, unless nobody shares them or they take too much of the disk."""
    files = _files(config)
    if files is None:
        return
    folder = files[0].parent
    folder.mkdir(exist_ok=True)
    if not write_decoded(data, files[0], min(MAX_BYTES, shutil.disk_usage(folder).free // 2)):
        return
    tree = {"name": data.name, "classes": data.classes, "skipped": data.skipped}
    write_atomically(files[1], json.dumps(tree).encode())


def _files(config: DataConfig) -> tuple[Path, Path] | None:
    """Return the files of the images and of their description; ``None`` where nothing is shared."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    key = images_key(config)
    return Path(folder) / f"{key}.safetensors", Path(folder) / f"{key}.json"
