"""`vitfleet server` and `vitfleet client` as their users start them: real processes, every option."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import click
import pytest
import typer.main

import vitfleet
from conftest import Command
from test_refused import tls_server
from vitfleet.cli.base import app
from vitfleet.flower.certificates import Certs
from vitfleet.flower.processes import free_port, stop_process_group
from vitfleet.flower.server.processes import check_address

PATIENCE_S = 240.0  # a busy machine takes a minute to start so many processes
CLIENT_METHOD = """
from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.methods.averaging.fedavg import WeightAveraging


@register_method("mine", MethodParams, title="Mine")
class Mine(WeightAveraging[MethodParams]):
    pass
"""
SMALL = (
    *("-o", "rounds=3", "-o", "train.epochs=1", "-o", "eval.clients=0", "-o", "fleet.join_s=200"),
    *("-o", "machine.device=cpu", "-o", "method.name=mine"),
)


def options_of(command: str) -> set[str]:
    """Return the options that a command has."""
    application = typer.main.get_command(app)
    assert isinstance(application, click.Group)
    return {
        max(parameter.opts, key=len)
        for parameter in application.commands[command].params
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts
    }


@dataclass
class Commands:
    """The command's processes in a folder, each with its output in a file."""

    executable: Path
    environment: dict[str, str]
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        output: IO[bytes]
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [str(self.executable), *map(str, arguments)],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a process has printed a text."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.output(name):
            assert self.processes[name].poll() is None, self.everything()
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.2)

    def everything(self) -> str:
        return "\n".join(f"--- {name}\n{self.output(name)}" for name in self.processes)


@pytest.fixture
def commands(executable: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(executable, {**environment, "HOME": str(tmp_path / "home")}, tmp_path)
    try:
        yield commands
    finally:
        for process in commands.processes.values():
            stop_process_group(process)


@pytest.fixture
def fleet_folder(vitfleet: Command, tmp_path: Path) -> Path:
    """Return a folder with a fleet's keys, the clients' images, the server's, and a method of the users' own."""
    names, limit = "garden,kitchen,common", "data.limit=150"
    for arguments in (
        ("certs", "fleet", "--host", "127.0.0.1", "--names", "garden,kitchen"),
        ("export-data", "start-fedavg", "--out", "my photos", "--names", names, "-o", limit),
    ):
        result = vitfleet(tmp_path, *arguments)
        assert result.returncode == 0, result.stderr
    (tmp_path / "mine.py").write_text(CLIENT_METHOD)
    return tmp_path


def client_of(name: str, port: int, more: Sequence[str]) -> list[str]:
    return ["client", "--server", f"127.0.0.1:{port}", "--name", name, "--data", f"my photos/{name}", *more]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fleet_folder")
def test_a_fleet_with_every_option(commands: Commands) -> None:
    """A device that is switched off between two rounds is named at the server, and is waited for."""
    port = free_port()
    server = [
        *("server", "start-fedavg", *SMALL, "-o", "data.path=my photos/common", "--plugin", "mine.py"),
        *("--out", "run", "--data-dir", "nowhere", "--seed", "3", "--certs", "fleet", "--host", "127.0.0.1"),
        *("--port", str(port), "--names", "garden,kitchen", "--yes", "--trust-plugins"),
    ]
    more = [
        *("--certs", "fleet", "--device", "cpu", "--threads", "1", "--plugin", "mine.py"),
        *("--limit", "epochs=2", "--limit", "image_size=8"),
        *("--pretrained", str(Path(vitfleet.__file__).parent / "weights" / "digits.safetensors")),
    ]
    clients = {name: [*client_of(name, port, more), "--state", f"state of {name}"] for name in ("garden", "kitchen")}
    for command, used in (("server", server), ("client", clients["garden"])):
        assert options_of(command) - {"--insecure", "--override"} <= set(used)

    running = commands.start("server", *server)
    for name, arguments in clients.items():
        commands.start(name, *arguments)
    commands.wait_for("server", "round 1/3")
    commands.processes["garden"].send_signal(signal.SIGINT)
    assert commands.processes["garden"].wait(PATIENCE_S) == 130, commands.everything()
    commands.wait_for("server", "garden lost, waiting up to 60 s")
    commands.start("garden", *clients["garden"])
    assert running.wait(PATIENCE_S) == 0, commands.everything()

    summary = json.loads((commands.folder / "run" / "summary.json").read_text())
    assert (summary["total"]["participations"], summary["total"]["failures"]) == (6, 0)
    assert "the server asks to train Mine for up to 3 rounds of 1 epochs" in commands.output("kitchen")
    assert "round 3: trained on" in commands.output("garden")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fleet_without_certificates(commands: Commands, fleet_folder: Path) -> None:
    """With the other options' defaults. What a client's owner does not allow is refused with the reason."""
    port = free_port()
    (fleet_folder / "fleet" / "ca.crt").unlink()
    server = commands.start(
        *("server", "server", "start-fedavg", *SMALL, "-o", "rounds=1", "-o", "data.path=my photos/common"),
        *("--plugin", "mine.py", "--port", str(port), "--names", "garden,kitchen", "--insecure", "--out", "run"),
    )
    limits = {"garden": [], "kitchen": ["--limit", "width=16"]}
    for name, limit in limits.items():
        commands.start(name, *client_of(name, port, ["--insecure", "--plugin", "mine.py", *limit]))
    assert server.wait(PATIENCE_S) == 0, commands.everything()
    assert "asks for width = 32 (embedding width of the model); this client's owner allows 16" in (
        commands.output("server")
    ), commands.everything()
    assert (fleet_folder / "home" / ".vitfleet" / "garden" / "runs" / "activity.log").exists()


@pytest.mark.timeout(900)
def test_a_client_that_will_never_be_accepted_ends_with_the_reason(commands: Commands, fleet_folder: Path) -> None:
    """What a client's own plug-in or a server with TLS refuses does not change by trying again."""
    (fleet_folder / "broken.py").write_text("import package_that_is_not_there\n")
    broken = commands.start("broken", *client_of("garden", 1, ["--plugin", "broken.py"]))
    assert broken.wait(PATIENCE_S) == 2, commands.everything()
    assert "broken.py" in commands.output("broken")
    assert "package_that_is_not_there" in commands.output("broken")
    assert "Traceback" not in commands.output("broken")

    certs = Certs(fleet_folder / "fleet")
    with tls_server(certs) as address:
        plain = commands.start("plain", *client_of("garden", int(address.rpartition(":")[2]), ["--insecure"]))
        assert plain.wait(PATIENCE_S) == 2, commands.everything()
    assert f"the server at {address} uses TLS: start this client without --insecure" in commands.output("plain")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fleet_folder")
def test_who_presses_ctrl_c_again_reads_no_traceback_and_leaves_nothing_behind(commands: Commands) -> None:
    """The process that keeps a client connected has no torch in its memory."""
    port = free_port()
    options = [*SMALL, "-o", "data.path=my photos/common", "--plugin", "mine.py", "--names", "garden,kitchen"]
    commands.start("server", "server", "start-fedavg", *options, "--port", str(port), "--insecure", "--out", "run")
    commands.wait_for("server", "waiting for garden, kitchen")
    client = commands.start("garden", *client_of("garden", port, ["--insecure", "--plugin", "mine.py"]))
    commands.wait_for("garden", "garden: waiting for")
    if (maps := Path(f"/proc/{client.pid}/maps")).exists():
        assert "torch" not in maps.read_text()
    for name in ("garden", "server"):
        process = commands.processes[name]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.1)
        assert process.wait(PATIENCE_S) == 130, commands.everything()
    assert "Traceback" not in commands.everything()
    assert commands.output("server").count("Stopped. To resume") == 1
    check_address("127.0.0.1", port)  # nobody listens there any more
