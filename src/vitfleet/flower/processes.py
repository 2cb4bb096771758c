"""Start and stop Flower's processes."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import httpx

from vitfleet.errors import UserError
from vitfleet.flower.device.activity import ActivityReader
from vitfleet.flower.device.supernode import SuperNodeLog
from vitfleet.flower.processes import environment, free_port
from vitfleet.flower.server.processes import (
    ServerSettings,
    flower_config,
    proxy_command,
    register_clients,
    superlink_command,
)
from vitfleet.system import die_with_parent

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
RESTART_DELAY_S = 15.0
POLL_INTERVAL_S = 0.1
REPORT_INTERVAL_S = 0.5
SUPERLINK_LOG, PROXY_LOG, SUPERNODE_LOG = "superlink.log", "proxy.log", "supernode.log"


@contextmanager
def running_server(settings: ServerSettings, names: Sequence[str]) -> Iterator[None]:
    """Run a SuperLink on this machine, register the clients' keys, and run the proxy in front of it.

    The order matters: a client that connects before its key is registered is rejected permanently.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    superlink_port = free_port()
    with _running(superlink_command(settings, superlink_port), settings.home, SUPERLINK_LOG) as superlink:
        wait_for_superlink(settings, superlink_port, superlink)
        (settings.home / "config.toml").write_text(flower_config(settings, superlink_port))
        if settings.certs is not None:
            register_clients(settings, settings.certs, names)
        with _running(proxy_command(settings, superlink_port), settings.home, PROXY_LOG) as proxy:
            _wait_for_proxy(settings, proxy)
            yield


def wait_for_superlink(settings: ServerSettings, port: int, superlink: subprocess.Popen[bytes]) -> None:
    """Wait until a SuperLink answers at its port.

    Raises
    ------
    UserError
        If it has ended, or does not answer in time.
    """
    verify = ssl.create_default_context(cafile=str(settings.certs.ca)) if settings.certs else True
    url = f"{'https' if settings.certs else 'http'}://127.0.0.1:{port}/health"
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(verify=verify, trust_env=False) as client:
        while time.monotonic() < deadline and superlink.poll() is None:
            with suppress(httpx.TransportError):  # it does not listen yet
                if client.get(url).is_success:
                    return
            time.sleep(POLL_INTERVAL_S)
    raise UserError(f"the SuperLink did not start; see {settings.home / SUPERLINK_LOG}")


def _wait_for_proxy(settings: ServerSettings, proxy: subprocess.Popen[bytes]) -> None:
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            socket.create_connection((host, settings.port), timeout=1).close()
            return
        except OSError:
            time.sleep(POLL_INTERVAL_S)
    raise UserError(f"port {settings.port} of {settings.host} cannot be opened; see {settings.home / PROXY_LOG}")


@contextmanager
def _running(command: list[str], home: Path, log_name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own until the block ends."""
    with (home / log_name).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield process
        finally:
            stop_process_group(process)


def run_forever(
    command: list[str],
    home: Path,
    activity: Path,
    report: Callable[[str], None],
    explain: Callable[[str], str | None] = lambda log: None,
) -> NoReturn:
    """Run a client's SuperNode and restart it whenever it ends. Only a signal to this process ends both.

    Flower's own output goes to ``supernode.log`` in ``home``: see :class:`SuperNodeLog`.

    A SuperNode ends when a restarted SuperLink does not know its id, and when the SuperLink still believes that the
    same node is connected: for a minute after it was killed.

    Parameters
    ----------
    activity
        The file with the client's own lines, which are passed to ``report``.
    explain
        Returns why a SuperNode ended, from what it wrote to its log; see :mod:`vitfleet.flower.device.supernode`.
    """
    home.mkdir(parents=True, exist_ok=True)
    lines, supernode_log = ActivityReader(activity), SuperNodeLog(home / SUPERNODE_LOG)

    def show_news() -> None:
        supernode_log.cut()
        for line in lines.new_lines():
            report(line)

    while True:
        with supernode_log.open() as log:
            process = subprocess.Popen(
                command, env=environment(home), stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        try:
            code = _wait_and_poll(process, show_news)
        except KeyboardInterrupt:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # it waits for a server that is gone
                process.kill()
                process.wait()
            raise
        cause = explain(supernode_log.text()) or f"Flower's SuperNode ended with code {code}"
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
