"""Calls of Flower's command ``flwr``: register clients, start a run, query its status."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitfleet.errors import UserError
from vitfleet.flower.certificates import Certs
from vitfleet.flower.processes import environment
from vitfleet.flower.server.processes import CONNECTION, ServerSettings

# Starting ``flwr`` takes seconds, so one process runs several commands.
RUN_COMMANDS = """
import json, sys
from flwr.cli.app import app
for command in json.load(sys.stdin):
    app(command, standalone_mode=False)
"""


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
    """Run ``flwr`` commands in one process and return the JSON output of each.

    Raises
    ------
    UserError
        If a command fails.
    """
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
