"""A fleet of real processes on loopback: a SuperLink behind its proxy, two SuperNodes, TLS, keys."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from chaos import server_state
from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.data.assignment import assign_images
from vitfleet.data.export import export_clients
from vitfleet.data.sources import load_dataset
from vitfleet.flower.certificates import Certs, make_certs
from vitfleet.flower.commands import ServerSettings, client_command, environment, free_port
from vitfleet.flower.flwr_cli import start_run
from vitfleet.flower.processes import running_server, stop_process_group
from vitfleet.flower.server import follow
from vitfleet.inference.stored_models import load_model_file
from vitfleet.run.folder import create_run_folder
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

NAMES = ("garden", "kitchen")
TWO_CLIENTS = ("rounds=2", "fleet.clients=2", "fleet.per_round=2", "eval.clients=0")
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
class FleetFolder:
    """A folder with a fleet's keys, its clients' images and files; and the processes of the clients."""

    folder: Path
    certs: Certs
    settings: ServerSettings
    processes: list[subprocess.Popen[bytes]]

    def start_client(self, name: str, certs: Certs) -> subprocess.Popen[bytes]:
        home = self.folder / "clients" / name
        home.mkdir(parents=True, exist_ok=True)
        data = self.folder / "data" / name
        machine: dict[str, str | int] = {"device": "cpu", "threads": 1}
        command = client_command(f"127.0.0.1:{self.settings.port}", name, data, home, certs, machine)
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

    def log(self, name: str) -> str:
        return (self.folder / "clients" / name / "log").read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetFolder]:
    certs = make_certs(tmp_path / "fleet", [], NAMES)
    fleet = FleetFolder(tmp_path, certs, ServerSettings("127.0.0.1", free_port(), certs.home, certs), [])
    try:
        yield fleet
    finally:
        for process in fleet.processes:
            stop_process_group(process)


def export_images(config: Config, names: Sequence[str], folder: Path) -> None:
    data = load_dataset(config.data)
    export_clients(data, assign_images(config, data), list(names), folder)


def flower(config: Config) -> Config:
    fleet = config.fleet.model_copy(update={"kind": "flower", "names": NAMES})
    return config.model_copy(update={"fleet": fleet})


@pytest.mark.timeout(900)  # a busy machine takes minutes to start so many processes
@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(["fedvit"], id="one run"),  # client states, tasks and evaluations
        pytest.param(list(METHODS), id="several runs", marks=pytest.mark.long),
    ],
)
def test_real_fleet_equals_simulation(
    methods: list[str], fleet: FleetFolder, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    configs = {name: tiny_config(*TWO_CLIENTS, *METHODS[name]) for name in methods}
    unregistered = make_certs(tmp_path / "unregistered", [], ["stranger"])
    unregistered.ca.write_bytes(fleet.certs.ca.read_bytes())  # it trusts the server; the server does not know its key
    with running_server(fleet.settings, NAMES):
        for name in NAMES:
            fleet.start_client(name, fleet.certs)
        stranger = fleet.start_client("stranger", unregistered)
        for name, config in configs.items():
            folder = tmp_path / f"flower-{name}"
            export_images(config, NAMES, tmp_path / "data")  # a run with tasks has another partition
            create_run_folder(flower(config), folder, name, ["test"]).release()
            follow(fleet.settings, folder, start_run(fleet.settings, folder))
        assert stranger.wait(60) != 0
        assert "Failed to activate SuperNode" in fleet.log("stranger")
        assert_proxy_serves_only_clients(fleet)
    for client, name in enumerate(NAMES):
        assert_device_has_its_model(fleet.folder / "clients" / name, client)
    for name, config in configs.items():
        run_rounds(open_run(config, tmp_path / f"simulation-{name}"))
        simulation_folder, flower_folder = (tmp_path / f"{kind}-{name}" for kind in ("simulation", "flower"))
        assert (simulation_folder / "records.jsonl").read_bytes() == (flower_folder / "records.jsonl").read_bytes()
        assert server_state(simulation_folder) == server_state(flower_folder)


def assert_device_has_its_model(home: Path, client: int) -> None:
    """Check that a device can predict with its own model, without the server."""
    model = load_model_file(home / "runs" / "model.safetensors")
    assert model.info.client == client
    images = torch.zeros(2, model.channels, model.image_size, model.image_size, dtype=torch.uint8)
    assert model(images).isfinite().all()


def assert_proxy_serves_only_clients(fleet: FleetFolder) -> None:
    """Check that the SuperLink's other services, and connections without TLS, are not reachable through the proxy."""
    address = f"127.0.0.1:{fleet.settings.port}"
    with httpx.Client(verify=ssl.create_default_context(cafile=str(fleet.certs.ca)), trust_env=False) as client:
        for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/../control/list-runs", "/health"):
            assert client.post(f"https://{address}{path}").status_code in (404, 405), path
        assert client.post(f"https://{address}/v1/fleet/pull-messages").status_code not in (200, 404)
        assert client.post(f"https://{address}/v1/fleet/push-object", content=b"0" * (17 * 2**20)).status_code == 413
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.post(f"http://{address}/v1/fleet/pull-messages")
