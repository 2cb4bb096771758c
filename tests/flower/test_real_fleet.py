"""Real processes on this machine's loopback: a SuperLink behind its gate, two SuperNodes, TLS, keys."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from chaos import server_state
from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.data.assignment import assign_images
from vitfleet.data.export import export_clients
from vitfleet.data.sources import load
from vitfleet.flower.certificates import Certs, make_certs
from vitfleet.flower.processes import Endpoint, client_command, environment, free_port, open_endpoint, start_run, stop
from vitfleet.flower.server import follow
from vitfleet.run.folder import create
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

NAMES = ("garden", "kitchen")
TWO = ("rounds=2", "fleet.clients=2", "fleet.per_round=2", "eval.clients=0")
METHODS = {
    "eftvit": ("method.name=eftvit", "method.local_layers=1", "train.mask_ratio=0.5"),
    "transfl": ("method.name=transfl", "method.k=1"),
    "fedvit": (
        "method.name=fedvit",
        "method.head_epochs=1",
        "train.epochs=2",
        "data.tasks.count=2",
        "data.tasks.classes=2",
        "data.tasks.per_client=[1,2]",
        "data.tasks.rounds_per_task=1",
    ),
}


@dataclass
class Site:
    """A folder with a fleet's keys, its devices' images, and what each of them keeps; and the door to the server."""

    folder: Path
    certs: Certs
    endpoint: Endpoint
    processes: list[subprocess.Popen[bytes]]

    def join(self, name: str, certs: Certs) -> subprocess.Popen[bytes]:
        """Start a device."""
        home = self.folder / "devices" / name
        home.mkdir(parents=True, exist_ok=True)
        data = self.folder / "data" / name
        machine: dict[str, str | int] = {"device": "cpu", "threads": 1}
        command = client_command(f"127.0.0.1:{self.endpoint.port}", name, data, home, certs, machine)
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=environment(home / "flower"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.folder / "devices" / name / "log").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    certs = make_certs(tmp_path / "fleet", [], NAMES)
    site = Site(tmp_path, certs, Endpoint("127.0.0.1", free_port(), certs.home, certs), [])
    try:
        yield site
    finally:
        for process in site.processes:
            stop(process)


def deal(config: Config, names: Sequence[str], folder: Path) -> None:
    data = load(config.data)
    export_clients(data, assign_images(config, data), list(names), folder)


def on_devices(config: Config) -> Config:
    fleet = config.fleet.model_copy(update={"kind": "flower", "names": NAMES})
    return config.model_copy(update={"fleet": fleet})


@pytest.mark.timeout(900)  # a busy machine takes minutes to start so many processes
@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(["fedvit"], id="one run"),  # the one with most in it: what a client keeps, tasks, exams
        pytest.param(list(METHODS), id="a run after another", marks=pytest.mark.long),
    ],
)
def test_devices_are_as_good_as_one_process(
    methods: list[str], site: Site, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    configs = {name: tiny_config(*TWO, *METHODS[name]) for name in methods}
    stranger = make_certs(tmp_path / "strange", [], ["stranger"])
    with open_endpoint(site.endpoint, NAMES):
        for name in NAMES:
            site.join(name, site.certs)
        trusted = Certs(tmp_path / "strange")
        trusted.ca.write_bytes(site.certs.ca.read_bytes())
        unknown = site.join("stranger", stranger)
        for name, config in configs.items():
            folder = tmp_path / f"flower-{name}"
            deal(config, NAMES, tmp_path / "data")  # tasks are dealt in their own way
            create(on_devices(config), folder, name, ["test"]).release()
            follow(site.endpoint, folder, start_run(site.endpoint, folder))
        assert unknown.wait(60) != 0
        assert "Failed to activate SuperNode" in site.said("stranger")
        only_devices_come_in(site)
    for name, config in configs.items():
        run_rounds(open_run(config, tmp_path / f"inline-{name}"))
        inline, flower = (tmp_path / f"{where}-{name}" for where in ("inline", "flower"))
        assert (inline / "records.jsonl").read_bytes() == (flower / "records.jsonl").read_bytes()
        assert server_state(inline) == server_state(flower)


def only_devices_come_in(site: Site) -> None:
    """What else a SuperLink serves cannot be reached from outside; nor can anything without TLS."""
    outside = f"127.0.0.1:{site.endpoint.port}"
    with httpx.Client(verify=ssl.create_default_context(cafile=str(site.certs.ca)), trust_env=False) as client:
        for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/../control/list-runs", "/health"):
            assert client.post(f"https://{outside}{path}").status_code in (404, 405), path
        assert client.post(f"https://{outside}/v1/fleet/pull-messages").status_code not in (200, 404)
        assert client.post(f"https://{outside}/v1/fleet/push-object", content=b"0" * (17 * 2**20)).status_code == 413
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.post(f"http://{outside}/v1/fleet/pull-messages")
