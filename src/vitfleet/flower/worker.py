"""A device's worker: the process that stays, with torch, the model and the images in memory.

Flower starts a new process for every message. That one imports Flower and nothing else: it hands the message to the
worker, through a socket in the device's folder that only its owner can open, and waits for the answer. It starts the
worker when there is none, and again when there is none any more. A worker ends when Flower's process that starts
the others (its owner) has ended, or when nobody has asked it for some minutes.

What goes through the socket are the records of an envelope as Flower writes them, never pickle.
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

IDLE = 600.0  # seconds after which a worker that nobody asks gives its memory back
LOOK_EVERY = 1.0  # seconds between looks after the owner, where the system does not tell of its end
DEVICE, FAILURE = "device", "failure"  # records of our own, beside an envelope's
TEXT = "text"
_LENGTHS = struct.Struct("<IQ")  # of a record's name, of its bytes
Stream: TypeAlias = io.BufferedRWPair


class WorkerError(Exception):
    """A worker could not answer; says why."""


def ask(folder: Path, owner: int, device: ConfigRecord, content: RecordDict) -> RecordDict:
    """Let the worker of a folder answer a message, and return its answer.

    Parameters
    ----------
    owner
        Number of the process that the worker shall end with.
    device
        What is asked, and what the device says of itself: see :func:`vitfleet.flower.client_handler.answer`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"worker-{owner}.sock"
    with suppress(FileNotFoundError, ConnectionError, EOFError):  # there is none, or it has just ended: a new one then
        return _exchange(_connect(folder, name), device, content)
    _start(folder, name, owner)
    try:
        return _exchange(_connect(folder, name), device, content)
    except (ConnectionError, EOFError):
        raise WorkerError("the device's worker ended while it was at work; the device's log may say why") from None


def _connect(folder: Path, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with chdir(folder):  # a socket's address has room for a hundred letters, and a folder's may have more
        connection.connect(name)
    return connection


def _start(folder: Path, name: str, owner: int) -> None:
    """Start a worker, which is handed a socket that listens already: who connects need not wait until it is ready."""
    for stale in folder.glob("worker-*.sock"):
        stale.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o077)
        try:
            with chdir(folder):
                listener.bind(name)
        finally:
            os.umask(before)
        listener.listen()
        command = [sys.executable, "-m", "vitfleet.flower.worker", str(listener.fileno()), str(owner)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])


def _exchange(connection: socket.socket, device: ConfigRecord, content: RecordDict) -> RecordDict:
    with connection, connection.makefile("rwb") as stream:
        _write(stream, RecordDict({DEVICE: device, **content}))
        answer = _read(stream)
    if FAILURE in answer:
        raise WorkerError(str(answer.config_records[FAILURE][TEXT]))
    return answer


def _write(stream: Stream, content: RecordDict) -> None:
    """Write records, each as its name and its bytes; a record without a name ends them."""
    for name, record in content.items():
        key, data = name.encode(), record.deflate()
        stream.write(_LENGTHS.pack(len(key), len(data)))
        stream.write(key)
        stream.write(data)
    stream.write(_LENGTHS.pack(0, 0))
    stream.flush()


def _read(stream: Stream) -> RecordDict:
    content = RecordDict()
    while True:
        key, data = _LENGTHS.unpack(_take(stream, _LENGTHS.size))
        if not key:
            return content
        name = _take(stream, key).decode()
        content[name] = ConfigRecord.inflate(_take(stream, data))


def _take(stream: Stream, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


# The worker itself


def main() -> None:
    """Answer whoever connects, one after the other."""
    parser = argparse.ArgumentParser(description="Answer a device's messages; Flower's ClientApp starts this.")
    parser.add_argument("listener", type=int, help="number of the open socket to listen at")
    parser.add_argument("owner", type=int, help="number of the process to end with")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, and its end is ours
    threading.Thread(target=_end_with, args=(given.owner,), daemon=True).start()
    listener = socket.socket(fileno=given.listener)
    listener.settimeout(IDLE)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        connection.settimeout(None)
        with connection, connection.makefile("rwb") as stream, suppress(ConnectionError, EOFError):
            _serve(stream)


def _serve(stream: Stream) -> None:
    content = _read(stream)
    device = content.pop(DEVICE)
    assert isinstance(device, ConfigRecord)
    try:
        from vitfleet.flower.client_handler import answer  # some seconds, the first time

        reply = answer(device, content)
    except Exception as error:  # noqa: BLE001  (as Flower's own process does: the message fails, the device stays)
        traceback.print_exc()
        reply = RecordDict({FAILURE: ConfigRecord({TEXT: f"{type(error).__name__}: {error}"})})
    del content
    _write(stream, reply)


def _end_with(owner: int) -> None:
    """End this process, whatever it does, when its owner has ended."""
    try:
        select.select([os.pidfd_open(owner)], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not on Linux
        while _is_there(owner):
            time.sleep(LOOK_EVERY)
    os._exit(0)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
