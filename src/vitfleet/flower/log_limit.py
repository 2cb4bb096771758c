"""Limit the size of Flower's logs: the other end of a connection can make them grow.

A SuperLink logs every request that reaches it, also a stranger's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 2**22  # of a log; a longer one is begun anew, and its last part is kept in a second file


def is_long(path: Path) -> bool:
    """Whether a log has to be cut."""
    try:
        return path.stat().st_size > MAX_BYTES
    except FileNotFoundError:  # deleted
        return False


def cut_log(path: Path) -> None:
    """Begin a long log anew, also while a process writes to it, which must have opened it to append."""
    if not is_long(path):
        return
    with suppress(FileNotFoundError):  # deleted
        with path.open("rb") as file:
            file.seek(-MAX_BYTES, 2)
            with suppress(OSError):  # a full disk: then the file is cut all the same
                path.with_suffix(".old.log").write_bytes(file.read(MAX_BYTES))
        os.truncate(path, 0)
