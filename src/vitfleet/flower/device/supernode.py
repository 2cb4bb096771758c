"""The log of a client's SuperNode: cut when it is long, and read for why a SuperNode ended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vitfleet.flower.processes import cut_log, is_long

HEAD_BYTES = 2**14  # what a SuperNode writes while it connects
TAIL_BYTES = 2**16  # what it writes when it ends

ACTIVATED = "SuperNode ID:"
ENDED = "SuperNode terminated gracefully"
NOT_REACHED = "Connection attempt failed"


class SuperNodeLog:
    """A file to which SuperNodes append, one after the other. What a server sends can make it grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = 0  # where the current SuperNode's text begins
        self._head = ""  # what it wrote first, if that has been cut off

    def open(self) -> BinaryIO:
        """Open the file for the next SuperNode."""
        self.cut()
        file = self.path.open("ab")  # it must append: the file can become shorter meanwhile
        self._began, self._head = file.tell(), ""
        return file

    def cut(self) -> None:
        """Begin a long file anew, also while a SuperNode writes to it."""
        if not is_long(self.path):
            return
        with suppress(FileNotFoundError), self.path.open("rb") as file:  # deleted
            file.seek(self._began)
            self._head = self._head or file.read(HEAD_BYTES).decode(errors="replace")
        cut_log(self.path)
        self._began = 0

    def text(self) -> str:
        """Return what the current SuperNode wrote; of much text only its beginning and its end."""
        return self._head + read_log_from(self.path, self._began)


def read_log_from(path: Path, position: int) -> str:
    """Return what was added to a log after a position; of much text only its beginning and its end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(position)
            if size - position <= HEAD_BYTES + TAIL_BYTES:
                return file.read().decode(errors="replace")
            head = file.read(HEAD_BYTES)
            file.seek(-TAIL_BYTES, 2)
            return f"{head.decode(errors='replace')}\n{file.read().decode(errors='replace')}"
    except FileNotFoundError:  # deleted
        return ""


def ending_cause(log: str, name: str, key: Path | None) -> str | None:
    """Return why a SuperNode ended and what to do, in a sentence; ``None`` if its log does not show it.

    A server answers a key that it does not know and a key that is in use in the same way, so that the sentence names
    both.

    Parameters
    ----------
    log
        What the SuperNode wrote from its start to its end.
    name, key
        The client's name and the file of its private key; ``None`` without authentication.
    """
    if "Failed to activate SuperNode" in log and key is not None:
        return (
            f"the server does not accept the key {key} of client {name}: it does not know the key (then run "
            f"`vitfleet certs DIR --names {name}` on the server with its folder DIR, copy DIR/ca.crt and "
            f"DIR/nodes/{name} to this machine and start the server again), or a client with the same key is "
            "connected, as this one is for a minute after it was killed"
        )
    if "WRONG_VERSION_NUMBER" in log:
        return "the server does not use TLS: start it without --insecure, or this client with --insecure"
    if "401 Unauthorized" in log and "send-node-heartbeat" in log:
        return "the server was started again"
    before, ended, _ = log.partition(ENDED)
    if ended and key is not None and ACTIVATED not in before and NOT_REACHED not in before:
        return f"the server did not accept the signature of client {name}: is the clock of this machine right?"
    return None
