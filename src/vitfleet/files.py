"""Files: their names in the folder of a run, writing that survives a crash, reading what may have been damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from vitfleet.errors import UserError

Data: TypeAlias = bytes | Iterable[bytes | memoryview]

# The folder of a run.
CONFIG_FILE = "config.json"  # the resolved configuration; a folder that has one can be resumed
ABOUT_FILE = "about.json"  # the command, the versions, the processor
PLUGINS_FILE = "plugins.json"  # origin and hash of every component that is not part of vitfleet
MACHINE_FILE = "machine.json"  # device, precision and threads as the run began
DATA_FILE = "data.json"  # names of the classes and form of the images
DEVICES_FILE = "devices.json"  # the simulated device of each client
PARTITION_FILE, PARTITION_ARRAYS = "partition.json", "partition.safetensors"  # the images of each client
TASKS_FILE, TASKS_ARRAYS = "tasks.json", "tasks.safetensors"  # those of each task
PATCHES_FIGURE = "patches.png"
CHECKPOINT_FOLDER, CHECKPOINT_FILE = "checkpoint", "checkpoint/checkpoint.json"
RECORDS_FILE = "records.jsonl"  # a line per round; equal runs write equal bytes
TIMINGS_FILE = "timings.jsonl"  # how long each round took
BASE_FILE = "base.safetensors"  # what every client received once
MODEL_FILE, BEST_MODEL_FILE = "model.safetensors", "best.safetensors"
SUMMARY_FILE = "summary.json"  # is written last: a run that has one is finished
OUTPUT_FILE = "output.txt"  # what a run printed that had a process of its own
# The folder of a comparison.
COMPARISON_FILE = "compare.json"
COMPARISON_TABLE = "compare.csv"


def write_atomically(path: Path, data: Data) -> None:
    """Write a file, whole or in chunks: after a crash at any moment it has either the old or the new contents."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_durably(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def refuse_links(*folders: Path) -> None:
    """Refuse folders that are links or hold some: what is written or removed there would be elsewhere."""
    for folder in folders:
        entries = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
        for path in (folder, *entries):
            if path.is_symlink():
                raise UserError(f"{path}: is a link; put what it links to in its place, or remove it")


def make_folder(folder: Path, option: str = "--out") -> Path:
    """Create the folder that an option of a command names, and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {folder}: cannot be created ({error.strerror})") from None
    return folder


def read_json(path: Path) -> Any:
    """Read a JSON file that vitfleet wrote; it is a :class:`UserError` if it is damaged."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error}); restore it from a copy") from None


def parse_json(text: bytes | str) -> Any:
    """Return what a JSON text from elsewhere says; a ``ValueError`` if it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_durably(path: Path, data: Data) -> None:
    """Write a new file and make its contents durable. Its name is durable only after :func:`sync_folder`."""
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable: new names, and renames."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_atomically(path: Path, target: Path) -> None:
    """Make a path a symbolic link to a file in the same folder or below it, replacing what the path was."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.relative_to(path.parent))  # relative: the folder can be moved
    temporary.replace(path)
    sync_folder(path.parent)
