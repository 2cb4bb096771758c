"""A client's worker: a process that persists between messages, with torch, the model and the images in memory.

Flower starts a new process for every message. That process imports Flower and nothing else. It passes the message to
the worker through a socket in the client's folder, which only the folder's owner can open, and waits for the reply. It
starts a worker if none is running. A worker exits when Flower's parent process (the SuperNode) has ended, or after some
minutes without a message.

The socket carries the records of a message as Flower serializes them, never pickle.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from contextlib import chdir, suppress
from pathlib import Path
from typing import TypeAlias

from flwr.app import ConfigRecord, RecordDict

from vitfleet.errors import printable

IDLE_TIMEOUT_S = 600.0  # an idle worker exits, which frees its memory
MAX_TRACEBACK = 100  # last lines of an error's traceback that are logged; a server chooses what causes it
PARENT_POLL_S = 1.0  # where the system cannot signal the end of another process
SETTINGS, FAILURE = "settings", "failure"  # records added to those of a message
_LENGTHS = struct.Struct("<IQ")  # of a record's name, of its bytes
SocketFile: TypeAlias = io.BufferedRWPair


class WorkerError(Exception):
    """A worker could not handle a message; names the reason."""


def call_worker(folder: Path, parent: int, settings: ConfigRecord, content: RecordDict) -> RecordDict:
    """Let the worker of a folder handle a message, and return the content of its reply.

    The worker ends with the process ``parent``. :func:`vitfleet.flower.device.handler.handle_message` lists the
    settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"worker-{parent}.sock"
    with suppress(FileNotFoundError, ConnectionError, EOFError):  # no worker, or one that has just ended
        return _call(_connect(folder, name), settings, content)
    _start_worker(folder, name, parent)
    try:
        return _call(_connect(folder, name), settings, content)
    except (ConnectionError, EOFError):
        raise WorkerError("the client's worker ended while handling a message; see the client's log") from None


def _connect(folder: Path, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with chdir(folder):  # a socket's path may have about 100 characters, a folder's path more
        connection.connect(name)
    return connection


def _start_worker(folder: Path, name: str, parent: int) -> None:
    """Start a worker and pass it a listening socket: a caller can connect before the worker is ready."""
    for stale in folder.glob("worker-*.sock"):
        stale.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        umask = os.umask(0o077)
        try:
            with chdir(folder):
                listener.bind(name)
        finally:
            os.umask(umask)
        listener.listen()
        path = str((folder / name).resolve())
        command = [sys.executable, "-m", "vitfleet.flower.device.worker", str(listener.fileno()), str(parent), path]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])


def _call(connection: socket.socket, settings: ConfigRecord, content: RecordDict) -> RecordDict:
    with connection, connection.makefile("rwb") as file:
        _write_records(file, RecordDict({SETTINGS: settings, **content}))
        reply = _read_records(file)
    if FAILURE in reply:
        raise WorkerError(str(reply.config_records[FAILURE]["reason"]))
    return reply


def _write_records(file: SocketFile, content: RecordDict) -> None:
    """Write each record as its name and its bytes; a record without a name is the end marker."""
    for name, record in content.items():
        key, data = name.encode(), record.deflate()
        file.write(_LENGTHS.pack(len(key), len(data)))
        file.write(key)
        file.write(data)
    file.write(_LENGTHS.pack(0, 0))
    file.flush()


def _read_records(file: SocketFile) -> RecordDict:
    content = RecordDict()
    while True:
        key_length, data_length = _LENGTHS.unpack(_read_exactly(file, _LENGTHS.size))
        if not key_length:
            return content
        name = _read_exactly(file, key_length).decode()
        content[name] = ConfigRecord.inflate(_read_exactly(file, data_length))


def _read_exactly(file: SocketFile, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise EOFError
    return data


# The worker process


def main() -> None:
    """Handle messages, one connection after the other."""
    parser = argparse.ArgumentParser(description="Handle a client's messages; Flower's ClientApp starts this process.")
    parser.add_argument("listener", type=int, help="file descriptor of the listening socket")
    parser.add_argument("parent", type=int, help="id of the process with which this one ends")
    parser.add_argument("path", type=Path, help="the socket's file, removed in the end")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and thereby this process
    threading.Thread(target=_exit_with_parent, args=(arguments.parent, arguments.path), daemon=True).start()
    listener = socket.socket(fileno=arguments.listener)
    listener.settimeout(IDLE_TIMEOUT_S)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            arguments.path.unlink(missing_ok=True)  # before the socket is closed: the next caller may make a new one
            return
        connection.settimeout(None)
        with connection, connection.makefile("rwb") as file, suppress(ConnectionError, EOFError):
            _serve(file)


def _serve(file: SocketFile) -> None:
    content = _read_records(file)
    settings = content.pop(SETTINGS)
    assert isinstance(settings, ConfigRecord)
    try:
        from vitfleet.flower.device.handler import handle_message, hard_limits  # takes seconds the first time

        with hard_limits(settings):
            reply = handle_message(settings, content)
    except Exception as error:  # noqa: BLE001  (as in Flower's own process: the message fails, the client continues)
        print(
            *map(printable, traceback.format_exc().split("\n")[-MAX_TRACEBACK:]), sep="\n", file=sys.stderr, flush=True
        )
        reply = RecordDict({FAILURE: ConfigRecord({"reason": failure_of(error)})})
    del content
    _write_records(file, reply)


def failure_of(error: Exception) -> str:
    """Return what the server is told of an error. Its text may name files of this device: the log has it."""
    return f"the client's worker failed ({type(error).__name__}); see the client's log"


def _exit_with_parent(parent: int, path: Path) -> None:
    """Remove the socket's file and exit this process, whatever it is doing, when its parent has ended."""
    try:
        select.select([os.pidfd_open(parent)], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not on Linux
        while _is_running(parent):
            time.sleep(PARENT_POLL_S)
    with suppress(OSError):  # the folder may be gone
        path.unlink(missing_ok=True)
    os._exit(0)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
