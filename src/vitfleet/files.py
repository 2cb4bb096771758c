"""Writing files that survives a crash: a file is complete, or does not exist. Reading what may have been damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from vitfleet.errors import UserError

Data: TypeAlias = bytes | Iterable[bytes | memoryview]


def write_atomically(path: Path, data: Data) -> None:
    """Write a file such that after a crash at any moment it has either the old or the new contents.

    Parameters
    ----------
    data
        The contents, whole or in chunks.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    write_durably(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """Read a JSON file that vitfleet wrote.

    Raises
    ------
    UserError
        It is damaged.
    """
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error}); restore it from a copy") from None


def parse_json(text: bytes | str) -> Any:
    """Return what a JSON text says that somebody else may have written.

    Raises
    ------
    ValueError
        It is not JSON, or nested too deeply.
    """
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
