"""Flower's processes, as a person would start them: the same commands, with safe settings.

Nothing here is needed: docs/fleet.md shows the plain Flower commands that do the same.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import httpx

from vitfleet.errors import UserError
from vitfleet.flower.certificates import Certs
from vitfleet.system import die_with_parent

# Nothing is told to anybody, nothing is looked up, nothing is installed while running; tasks are looked for often.
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
ERROR_FILE = "complaint.txt"  # in a run's folder: what its owner must mend
MANY_COMMANDS = """
import json, sys
from flwr.cli.app import app
for command in json.load(sys.stdin):
    app(command, standalone_mode=False)
"""
LINK = "fleet"  # what the connection to our SuperLink is called
START_PATIENCE = 60.0
STOP_PATIENCE = 10.0
RESTART_PAUSE = 15.0


@dataclass(frozen=True)
class Endpoint:
    """Where devices reach the server; without ``certs`` nothing is encrypted, and nobody is asked who they are."""

    host: str
    port: int
    home: Path
    certs: Certs | None


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes; what they write goes to a folder of ours."""
    bin = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {**os.environ, **SETTINGS, "FLWR_HOME": str(home), "PATH": f"{bin}{os.pathsep}{path}"}


@contextmanager
def open_endpoint(endpoint: Endpoint, names: Sequence[str]) -> Iterator[None]:
    """Run a SuperLink on this machine, tell it the devices' keys, and open the gate before it.

    In this order: a device that comes before its key is known is sent away for good.
    """
    endpoint.home.mkdir(parents=True, exist_ok=True)
    inner = free_port()
    with _process(superlink_command(endpoint, inner), endpoint.home, "superlink.log") as link:
        await_health(endpoint, inner, link)
        (endpoint.home / "config.toml").write_text(connection(endpoint, inner))
        if endpoint.certs is not None:
            register(endpoint, endpoint.certs, names)
        with _process(proxy_command(endpoint, inner), endpoint.home, "gate.log") as gate:
            _await_port(endpoint, gate)
            yield


def superlink_command(endpoint: Endpoint, inner: int) -> list[str]:
    """Return the command that starts the SuperLink, on this machine's own loopback only."""
    certs = endpoint.certs
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(inner)]
    command += ["--disable-runtime-dependency-installation"]
    if certs is None:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(certs.ca), "--ssl-certfile", str(certs.server)]
    return [*command, "--ssl-keyfile", str(certs.server_key), "--enable-supernode-auth"]


def proxy_command(endpoint: Endpoint, inner: int) -> list[str]:
    """Return the command that opens the gate."""
    command = [sys.executable, "-m", "vitfleet.flower.proxy", "--host", endpoint.host, "--port", str(endpoint.port)]
    command += ["--link", str(inner)]
    if endpoint.certs is None:
        return command
    certs = endpoint.certs
    return [*command, "--ca", str(certs.ca), "--cert", str(certs.server), "--key", str(certs.server_key)]


def client_command(
    server: str, name: str, data: Path, state: Path, certs: Certs | None, machine: dict[str, str | int]
) -> list[str]:
    """Return the command that starts a device's SuperNode."""
    words: dict[str, str | int] = {"name": name, "data": str(data), "state": str(state / "runs"), **machine}
    # Values are TOML: JSON's texts and numbers are TOML's too.
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in words.items())
    command = ["flower-supernode", "--superlink", server, "--node-config", config]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    if certs is None:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(certs.ca), "--auth-supernode-private-key", str(certs.node_key(name))]


def connection(endpoint: Endpoint, inner: int) -> str:
    """Return Flower's configuration file: how the command ``flwr`` reaches the SuperLink."""
    security = "insecure = true" if endpoint.certs is None else f'root-certificates = "{endpoint.certs.ca}"'
    return f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "127.0.0.1:{inner}"\n{security}\n'


def register(endpoint: Endpoint, certs: Certs, names: Sequence[str]) -> None:
    """Tell the SuperLink the devices' public keys."""
    keys = {name: str(certs.node_public_key(name)) for name in names}
    flwr(endpoint, *(["supernode", "register", key, LINK, "--name", name] for name, key in keys.items()))


def start_run(endpoint: Endpoint, folder: Path, *options: str) -> int:
    """Start a run's ServerApp and return Flower's number for it; options go to ``flwr run``."""
    app = str(files("vitfleet") / "flower" / "app")
    words = f"folder={json.dumps(str(folder))}"
    return int(flwr(endpoint, ["run", app, LINK, "--run-config", words, *options])[0]["run-id"])


def state_of(endpoint: Endpoint, run: int) -> str:
    """Return what Flower says of a run, such as ``running`` or ``finished:completed``."""
    return str(flwr(endpoint, ["list", LINK, "--run-id", str(run)])[0]["runs"][0]["status"])


def flwr(endpoint: Endpoint, *commands: Sequence[str]) -> list[dict[str, Any]]:
    """Run Flower's command some times in one process, which takes seconds to start, and return what each answers."""
    wanted = [[*command, "--format", "json"] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", MANY_COMMANDS],
        input=json.dumps(wanted),
        env=environment(endpoint.home),
        capture_output=True,
        text=True,
        check=False,
    )
    answers = list(_objects(done.stdout))
    wrong = next((answer for answer in answers if not answer.get("success")), None)
    if wrong is not None or done.returncode or len(answers) != len(commands):
        said = str((wrong or {}).get("error-message") or (done.stderr or done.stdout).strip()[-500:])
        raise UserError(f"`flwr {shlex.join(wanted[max(0, len(answers) - 1)])}` failed: {said}")
    return answers


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that stand in a text, among other things."""
    place = text.find("{")
    while place >= 0:
        try:
            found, place = json.JSONDecoder().raw_decode(text, place)
            yield found
        except ValueError:
            place += 1
        place = text.find("{", place)


def await_health(endpoint: Endpoint, inner: int, link: subprocess.Popen[bytes]) -> None:
    """Wait until a SuperLink answers at its port."""
    trusted = ssl.create_default_context(cafile=str(endpoint.certs.ca)) if endpoint.certs else True
    address = f"{'https' if endpoint.certs else 'http'}://127.0.0.1:{inner}/health"
    end = time.monotonic() + START_PATIENCE
    with httpx.Client(verify=trusted, trust_env=False) as client:
        while time.monotonic() < end and link.poll() is None:
            try:
                if client.get(address).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
    raise UserError(f"the SuperLink did not start; {endpoint.home / 'superlink.log'} says why")


def _await_port(endpoint: Endpoint, gate: subprocess.Popen[bytes]) -> None:
    address = "127.0.0.1" if endpoint.host == "0.0.0.0" else endpoint.host
    end = time.monotonic() + START_PATIENCE
    while time.monotonic() < end and gate.poll() is None:
        try:
            socket.create_connection((address, endpoint.port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise UserError(f"port {endpoint.port} of {endpoint.host} cannot be opened; {endpoint.home / 'gate.log'} says why")


@contextmanager
def _process(command: list[str], home: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and whatever it starts, until the block ends."""
    with (home / log).open("ab") as file:
        process = subprocess.Popen(
            command,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield process
        finally:
            stop(process)


def stay(command: list[str], home: Path, say: Callable[[str], None]) -> NoReturn:
    """Run a device's SuperNode, and run it again whenever it ends: only a signal to us ends both.

    It ends when a new SuperLink does not know its number, and when the old one believes that it is still there: for a
    minute after it was killed.
    """
    home.mkdir(parents=True, exist_ok=True)
    while True:
        process = subprocess.Popen(command, env=environment(home), preexec_fn=die_with_parent)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        say(f"Flower's SuperNode ended (code {code}); it is started again in {RESTART_PAUSE:g} seconds")
        time.sleep(RESTART_PAUSE)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, politely first."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
