"""A client's SuperNode: how it is started, kept running, and why it ended."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.flower.activity import ActivityReader
from vitfleet.flower.certificates import Certs
from vitfleet.flower.processes import STOP_TIMEOUT_S, cut_log, environment, free_port, is_long
from vitfleet.system import die_with_parent

SUPERNODE_LOG = "supernode.log"
SETTINGS_FILE = "client.toml"  # what the owner chose, for Flower's process
RESTART_DELAY_S = 15.0
REPORT_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 15.0  # between two looks at a server that has not accepted the client yet
HEAD_BYTES = 2**14  # what a SuperNode writes while it connects
TAIL_BYTES = 2**16  # what it writes when it ends

STARTED = "Started server process"
ACTIVATED = "SuperNode ID:"
ENDED = "SuperNode terminated gracefully"
NOT_REACHED = "Connection attempt failed"


def client_command(
    server: str,
    name: str,
    data: Path,
    state: Path,
    certs: Certs | None,
    machine: dict[str, str | int],
    plugins: Sequence[Path] = (),
    limits: Sequence[str] = (),
    pretrained: Path | None = None,
) -> list[str]:
    """Write a client's settings to a file, and return the command that starts its SuperNode with them.

    On the command line Flower takes no value with a quote in it.
    """
    settings: dict[str, str | int] = {"name": name, "data": str(data), "state": str(state / "runs"), **machine}
    settings["plugins"] = json.dumps([str(path.resolve()) for path in plugins])
    settings["limits"] = json.dumps(list(limits))
    if pretrained is not None:
        settings["pretrained"] = str(pretrained.resolve())
    # Strings and numbers look the same in TOML as in JSON.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items()]
    state.mkdir(parents=True, exist_ok=True)
    file = state / SETTINGS_FILE
    write_atomically(file, "".join(lines).encode())
    command = ["flower-supernode", "--superlink", server, "--node-config", str(file)]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    if certs is None:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(certs.ca), "--auth-supernode-private-key", str(certs.node_key(name))]


def run_forever(
    command: list[str],
    home: Path,
    activity: Path,
    report: Callable[[str], None],
    explain: Callable[[str], str | None] = lambda log: None,
    check: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Run a client's SuperNode and restart it whenever it ends. A signal ends both, and what no new attempt changes.

    Flower's own output goes to ``supernode.log`` in ``home``: see :class:`SuperNodeLog`. The client's own lines, in the
    file ``activity``, are passed to ``report``; ``explain`` returns why a SuperNode ended, see :func:`ending_cause`.
    ``check`` looks at the server now and then until it has accepted the client; it raises what ends the client.

    A SuperNode ends when a restarted SuperLink does not know its id, and when the SuperLink still believes that the
    same node is connected: for a minute after it was killed.
    """
    home.mkdir(parents=True, exist_ok=True)
    lines, supernode_log = ActivityReader(activity), SuperNodeLog(home / SUPERNODE_LOG)

    checked = time.monotonic()

    def watch() -> None:
        nonlocal checked
        supernode_log.cut()
        for line in lines.new_lines():
            report(line)
        if time.monotonic() >= checked + CHECK_INTERVAL_S:
            checked = time.monotonic()
            if ACTIVATED not in supernode_log.text():
                check()

    while True:
        with supernode_log.open() as log:
            process = subprocess.Popen(
                command, env=environment(home), stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        try:
            code = _wait_and_poll(process, watch)
        except (KeyboardInterrupt, UserError):
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # it waits for a server that is gone
                process.kill()
                process.wait()
            raise
        text = supernode_log.text()
        if STARTED not in text:
            reason = (text.strip().splitlines() or [f"code {code}"])[-1]
            raise UserError(f"Flower's SuperNode cannot start: {reason} (see {supernode_log.path})")
        cause = explain(text) or f"Flower's SuperNode ended with code {code}"
        report(f"{cause} (see {supernode_log.path}); trying again in {RESTART_DELAY_S:g} seconds")
        time.sleep(RESTART_DELAY_S)


def _wait_and_poll(process: subprocess.Popen[bytes], poll: Callable[[], None]) -> int:
    """Wait until a process ends, and call a function now and then, for the last time after the end."""
    while True:
        code = process.poll()
        poll()
        if code is not None:
            return code
        time.sleep(REPORT_INTERVAL_S)


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
        """Return what the current SuperNode wrote; only the beginning and the end of a long text."""
        return self._head + read_log_from(self.path, self._began)


def read_log_from(path: Path, position: int) -> str:
    """Return the text of a log after a position; only the beginning and the end of a long one."""
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
    both. ``key`` is the file of the client's private key; ``None`` without authentication.
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
