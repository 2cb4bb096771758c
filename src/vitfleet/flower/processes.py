"""What the processes of server and clients have in common: environment, ports, names, logs, their end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from vitfleet.errors import UserError

# No telemetry, no update check, no installation of packages at run time; tasks are polled often.
FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
STOP_TIMEOUT_S = 10.0
MAX_LOG_BYTES = 2**22  # a longer log is begun anew, and its last part is kept in a second file
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # files and folders are named after clients
SHOWN_NAME = 80  # characters of a wrong name in a message


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes. They write their files to ``home``."""
    bin = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {**os.environ, **FLOWER_SETTINGS, "FLWR_HOME": str(home), "PATH": f"{bin}{os.pathsep}{path}"}


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_client_name(name: str) -> None:
    """Raise an error if a client cannot have this name."""
    if not CLIENT_NAME.fullmatch(name):
        shown = name if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]}…"
        raise UserError(
            f"{shown!r}: a client's name must have at most 63 characters: letters, digits, '.', '_', '-'; "
            "the first a letter or digit"
        )


def is_long(log: Path) -> bool:
    """Whether a log of Flower has to be cut: the other end of a connection can make it grow."""
    try:
        return log.stat().st_size > MAX_LOG_BYTES
    except FileNotFoundError:  # deleted
        return False


def cut_log(log: Path) -> None:
    """Begin a long log anew, also while a process writes to it, which must have opened it to append."""
    if not is_long(log):
        return
    with suppress(FileNotFoundError):  # deleted
        with log.open("rb") as file:
            file.seek(-MAX_LOG_BYTES, 2)
            with suppress(OSError):  # a full disk: then the file is cut all the same
                log.with_suffix(".old.log").write_bytes(file.read(MAX_LOG_BYTES))
        os.truncate(log, 0)


def stop_process_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it started: with SIGTERM, then with SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
