"""Command lines, settings and configuration file of Flower's processes.

docs/fleet.md shows how to start the same processes with Flower's own commands.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitfleet.flower.certificates import Certs

# No telemetry, no update check, no installation of packages at run time; tasks are polled often.
FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
CONNECTION = "fleet"  # name of the connection to the SuperLink in Flower's configuration file


@dataclass(frozen=True)
class ServerSettings:
    """How clients reach the server.

    Attributes
    ----------
    host, port
        Address at which the proxy listens.
    home
        Folder of Flower's files.
    certs
        Certificates and keys. ``None`` means no encryption and no authentication.
    """

    host: str
    port: int
    home: Path
    certs: Certs | None


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes. They write their files to ``home``."""
    bin = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {**os.environ, **FLOWER_SETTINGS, "FLWR_HOME": str(home), "PATH": f"{bin}{os.pathsep}{path}"}


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
    command = [
        sys.executable,
        "-m",
        "vitfleet.flower.server.proxy",
        "--host",
        settings.host,
        "--port",
        str(settings.port),
    ]
    command += ["--superlink-port", str(superlink_port)]
    if settings.certs is None:
        return command
    certs = settings.certs
    return [*command, "--ca", str(certs.ca), "--cert", str(certs.server), "--key", str(certs.server_key)]


def client_command(
    server: str,
    name: str,
    data: Path,
    state: Path,
    certs: Certs | None,
    machine: dict[str, str | int],
    plugins: Sequence[Path] = (),
    limits: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts a client's SuperNode."""
    node_config: dict[str, str | int] = {"name": name, "data": str(data), "state": str(state / "runs"), **machine}
    if plugins:
        node_config["plugins"] = json.dumps([str(path.resolve()) for path in plugins])
    if limits:
        node_config["limits"] = json.dumps(list(limits))
    # Values are TOML: strings and numbers look the same in JSON.
    toml = " ".join(f"{key}={json.dumps(value)}" for key, value in node_config.items())
    command = ["flower-supernode", "--superlink", server, "--node-config", toml]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    if certs is None:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(certs.ca), "--auth-supernode-private-key", str(certs.node_key(name))]


def flower_config(settings: ServerSettings, superlink_port: int) -> str:
    """Return Flower's configuration file: how the command ``flwr`` reaches the SuperLink."""
    security = "insecure = true" if settings.certs is None else f'root-certificates = "{settings.certs.ca}"'
    address = f'address = "127.0.0.1:{superlink_port}"'
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{address}\n{security}\n'


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
