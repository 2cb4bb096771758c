"""Writing that survives being killed: a file is there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Data: TypeAlias = bytes | Iterable[bytes | memoryview]


def write_atomically(path: Path, data: Data) -> None:
    """Write a file, given whole or in parts, so that after a crash at any moment it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_durably(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def write_durably(path: Path, data: Data) -> None:
    """Write a file under a name that nobody knows yet; :func:`sync_folder` before anybody is told."""
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable (a rename is only as durable as the folder that holds it)."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
