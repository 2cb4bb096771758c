"""Flower's processes on the server: their command lines, their start, and calls of the command ``flwr``.

docs/fleet.md shows how to start the same processes with Flower's own commands.
"""

from __future__ import annotations

import errno
import json
import shlex
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx

from vitfleet.errors import UserError
from vitfleet.flower.certificates import Certs
from vitfleet.flower.processes import environment, free_port, stop_process_group
from vitfleet.system import die_with_parent

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.1
SUPERLINK_LOG, PROXY_LOG = "superlink.log", "proxy.log"
CONNECTION = "fleet"  # name of the connection to the SuperLink in Flower's configuration file
# Starting ``flwr`` takes seconds, so one process runs several commands.
RUN_COMMANDS = """
import json, sys
from flwr.cli.app import app
for command in json.load(sys.stdin):
    app(command, standalone_mode=False)
"""


@dataclass(frozen=True)
class ServerSettings:
    """How clients reach the server."""

    host: str
    port: int
    home: Path  # folder of Flower's files
    certs: Certs | None  # ``None`` means no encryption and no authentication


def superlink_command(settings: ServerSettings, superlink_port: int) -> list[str]:
    """Return the command that starts the SuperLink. It listens on this machine's loopback only."""
    certs = settings.certs
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(superlink_port)]
    command += ["--disable-runtime-dependency-installation"]
    if certs is None:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(certs.ca), "--ssl-certfile", str(certs.server)]
    return [*command, "--ssl-keyfile", str(certs.server_key), "--enable-supernode-auth"]


def proxy_command(settings: ServerSettings, superlink_port: int) -> list[str]:
    """Return the command that starts the proxy between clients and the SuperLink."""
    command = [sys.executable, "-m", "vitfleet.flower.server.proxy", "--host", settings.host]
    command += ["--port", str(settings.port), "--superlink-port", str(superlink_port)]
    if settings.certs is None:
        return command
    certs = settings.certs
    return [*command, "--ca", str(certs.ca), "--cert", str(certs.server), "--key", str(certs.server_key)]


def flower_config(settings: ServerSettings, superlink_port: int) -> str:
    """Return Flower's configuration file: how the command ``flwr`` reaches the SuperLink."""
    security = "insecure = true" if settings.certs is None else f'root-certificates = "{settings.certs.ca}"'
    address = f'address = "127.0.0.1:{superlink_port}"'
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{address}\n{security}\n'


def _check_free(settings: ServerSettings) -> None:
    """Refuse a port at which another program listens: the clients would be its."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the proxy does: after a server that has ended
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"port {settings.port} of {settings.host} cannot be opened ({error.strerror})"
                ) from None
            raise UserError(
                f"port {settings.port} is in use by another program; stop it, or choose another --port"
            ) from None


def check_running(settings: ServerSettings, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Raise an error if one of the server's processes has ended, by the name of its log: clients cannot reach it."""
    for log, process in processes.items():
        if process.poll() is not None:
            raise UserError(f"a process of the server has ended; see {settings.home / log}")


@contextmanager
def running_server(settings: ServerSettings, names: Sequence[str]) -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """Run a SuperLink on this machine, register the clients' keys, and run the proxy in front of it.

    The order matters: a client that connects before its key is registered is rejected permanently.
    """
    _check_free(settings)
    settings.home.mkdir(parents=True, exist_ok=True)
    superlink_port = free_port()
    with _running(superlink_command(settings, superlink_port), settings.home, SUPERLINK_LOG) as superlink:
        wait_for_superlink(settings, superlink_port, superlink)
        (settings.home / "config.toml").write_text(flower_config(settings, superlink_port))
        if settings.certs is not None:
            register_clients(settings, settings.certs, names)
        with _running(proxy_command(settings, superlink_port), settings.home, PROXY_LOG) as proxy:
            _wait_for_proxy(settings, proxy)
            yield {SUPERLINK_LOG: superlink, PROXY_LOG: proxy}


def wait_for_superlink(settings: ServerSettings, port: int, superlink: subprocess.Popen[bytes]) -> None:
    """Wait until a SuperLink answers at its port, unless it ends or takes too long."""
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


def check_address(host: str, port: int) -> None:
    """Raise an error if no server can listen at this address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port {port}: is in use by another program; choose another, and give it to the clients: "
                f"--server HOST:{port + 1}"
            ) from None
        if error.errno == errno.EACCES:
            raise UserError(f"--port {port}: is not open to you ({error.strerror}); choose one above 1023") from None
        raise UserError(f"--host {host}: is no address of this machine; 0.0.0.0 listens at all of them") from None


def _wait_for_proxy(settings: ServerSettings, proxy: subprocess.Popen[bytes]) -> None:
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            socket.create_connection((host, settings.port), timeout=1).close()
            check_running(settings, {PROXY_LOG: proxy})
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


def register_clients(settings: ServerSettings, certs: Certs, names: Sequence[str]) -> None:
    """Register the clients' public keys with the SuperLink."""
    keys = {name: str(certs.node_public_key(name)) for name in names}
    run_flwr(settings, *(["supernode", "register", key, CONNECTION, "--name", name] for name, key in keys.items()))


def start_run(settings: ServerSettings, folder: Path, *options: str) -> int:
    """Start a run's ServerApp with ``flwr run`` and these options; return Flower's id of the run."""
    app = str(files("vitfleet") / "flower" / "app")
    run_config = f"folder={json.dumps(str(folder))}"
    return int(run_flwr(settings, ["run", app, CONNECTION, "--run-config", run_config, *options])[0]["run-id"])


def run_status(settings: ServerSettings, flower_run_id: int) -> str:
    """Return Flower's status of a run, such as ``running`` or ``finished:completed``."""
    command = ["list", CONNECTION, "--run-id", str(flower_run_id)]
    return str(run_flwr(settings, command)[0]["runs"][0]["status"])


def run_flwr(settings: ServerSettings, *commands: Sequence[str]) -> list[dict[str, Any]]:
    """Run ``flwr`` commands in one process and return the JSON output of each."""
    with_format = [[*command, "--format", "json"] for command in commands]
    completed = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS],
        input=json.dumps(with_format),
        env=environment(settings.home),
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = list(_json_objects(completed.stdout))
    failed = next((output for output in outputs if not output.get("success")), None)
    if failed is not None or completed.returncode or len(outputs) != len(commands):
        reason = (failed or {}).get("error-message") or (completed.stderr or completed.stdout).strip()[-500:]
        raise UserError(f"`flwr {shlex.join(with_format[max(0, len(outputs) - 1)])}` failed: {reason}")
    return outputs


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, skipping everything else."""
    position = text.find("{")
    while position >= 0:
        try:
            parsed, position = json.JSONDecoder().raw_decode(text, position)
            yield parsed
        except ValueError:
            position += 1
        position = text.find("{", position)
