"""A fleet behind Flower's grid gives the same bits as a fleet in one process, for every method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from loopback import HandleMessage, LocalClients, client_names, defended, export_images

from conftest import DIGITS_BODY, MakeConfig, long_but
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.data.partitions.assign import assign_images
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.inference.stored_models import StoredModels, load_model_file
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "closed-form": DIGITS_BODY,
    "analytic": DIGITS_BODY,
    "fedbfpt": ("method.local_layers=2",),
    "transfl": ("method.k=1",),
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5"),
    "fed-prompt": ("method.prompts=2",),
    "fedrep": ("train.epochs=2",),
    "fedvit": ("train.epochs=2", "method.head_epochs=1"),
}
TASKS = ("data.tasks.count=3", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=2")
#: What of a method the fleet's kind could change: states of clients and server, parts of it, reports, tasks, the model.
DIFFERENT = ("fedprox", "transfl", "apfl", "eftvit", "closed-form", "fedrep", "fedvit", "fedweit", "lvt")
CONTINUAL_METHODS = {entry.name for entry in METHODS if entry.target.needs_tasks}


def flower(config: Config) -> Config:
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})


def run_on_grid(config: Config, folder: Path, handle: HandleMessage | None = None) -> RunState:
    """Run all rounds on clients in this process; their images and states are beside the run's folder."""
    clients = LocalClients(config, folder.parent / "data", folder.parent / "state")
    context = open_run(config, folder, make_fleet=fleet_factory(clients.grid(handle)))
    return run_rounds(context).state


def same_server_state(first: RunState, second: RunState) -> bool:
    state, other = first.server, second.server
    return (
        state.tensors.keys() == other.tensors.keys()
        and all(torch.equal(state.tensors[name], other.tensors[name]) for name in state.tensors)
        and state.numbers == other.numbers
        and list(state.parts) == list(other.parts)
        and all(
            torch.equal(tensor, other.parts[part].tensors[name])
            for part in state.parts
            for name, tensor in state.parts[part].tensors.items()
        )
    )


@pytest.mark.parametrize("name", long_but(sorted(METHODS.names()), *DIFFERENT))
def test_flower_fleet_equals_simulation(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    tasks = (*TASKS, "rounds=6") if name in CONTINUAL_METHODS else ()
    assert_equals_simulation(
        tiny_config(
            f"method.name={name}", *OVERRIDES.get(name, ()), *tasks, "eval.clients=0", "data.augment.flip=true"
        ),
        tmp_path,
    )


@pytest.mark.parametrize("name", ["fedavg", "transfl"])
def test_the_servers_optimizer_does_not_depend_on_the_fleet(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    keys = f"method.name={name}", *OVERRIDES.get(name, ()), "server.optimizer=adam", "eval.clients=0"
    assert_equals_simulation(tiny_config(*keys), tmp_path)


def test_devices_that_only_compute_features_receive_the_model_to_evaluate_it(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    keys = "method.local_rounds=0", "method.train_head=false", "rounds=3", "eval.every=2", "eval.clients=0"
    assert_equals_simulation(tiny_config("method.name=eftvit", *OVERRIDES["eftvit"], *keys), tmp_path)
    first, *evaluated = read_records(tmp_path / "flower")
    assert not any(entry.failure for record in (first, *evaluated) for entry in record.clients)
    assert all(entry.tested is None for entry in first.clients)
    assert all(entry.tested is not None for record in evaluated for entry in record.clients)
    devices = {entry.client for record in evaluated for entry in record.clients}
    with_model = {path.parent.name for path in (tmp_path / "state").glob("*/model.safetensors")}
    assert with_model == {client_names(tiny_config())[client] for client in devices}


@pytest.mark.parametrize("name", long_but(["fedavg", "apfl", "fedper", "standalone"], "fedavg", "fedper"))
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_flower_fleet_equals_simulation_on_tasks(
    name: str, scenario: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    assert_equals_simulation(
        tiny_config(f"method.name={name}", *TASKS, "data.tasks.count=2", "rounds=4", f"data.tasks.scenario={scenario}"),
        tmp_path,
    )


@pytest.mark.parametrize("heads", ["local", "shared"])
def test_flower_fleet_evaluates_clients_with_the_servers_body(
    heads: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """The request to evaluate carries the server's weights; a client has its own head, unless heads are shared."""
    keys = "method.name=gem", f"method.heads={heads}", *TASKS, "data.tasks.count=2", "rounds=4", "eval.clients=0"
    config = tiny_config(*keys, "eval.body=aggregated")
    assert_equals_simulation(config, tmp_path)
    run_rounds(open_run(tiny_config(*keys), tmp_path / "own"))
    own, aggregated = (
        [record.task.matrix for record in read_records(tmp_path / name) if record.task] for name in ("own", "flower")
    )
    assert own != aggregated


def test_a_device_keeps_its_own_whole_model(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """From its folder alone, moved elsewhere, it predicts as the record of the device's last round says."""
    config = tiny_config("method.name=eftvit", *OVERRIDES["eftvit"])
    export_images(config, tmp_path / "data")
    run_on_grid(flower(config), tmp_path / "flower")
    (tmp_path / "state").rename(tmp_path / "moved")
    _, test = assign_images(config, data := load_dataset(config.data))
    last = {entry.client: entry for record in read_records(tmp_path / "flower") for entry in record.clients}
    assert last
    for client, entry in last.items():
        model = load_model_file(tmp_path / "moved" / client_names(config)[client] / "model.safetensors")
        own = torch.from_numpy(test.for_client(client))
        with torch.inference_mode():
            correct = (model(data.test.images[own]).argmax(dim=1) == data.test.labels[own]).sum()
        assert (int(correct), len(own)) == (entry.correct, entry.tested)
        assert model.info.client == client
    stored = StoredModels.open(tmp_path / "flower", flower(config))
    with pytest.raises(UserError, match="its own model is on its device"):
        stored.classifier(0)
    with pytest.raises(UserError, match="the server of this run has no whole model with eftvit"):
        stored.classifier()


def assert_equals_simulation(config: Config, tmp_path: Path) -> None:
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(defended(config), tmp_path / "simulation")).state
    assert same_server_state(simulation, run_on_grid(flower(config), tmp_path / "flower"))
    simulation_records, flower_records = (
        (tmp_path / name / "records.jsonl").read_bytes() for name in ("simulation", "flower")
    )
    assert simulation_records == flower_records
    assert b'"failure":null' in simulation_records
    assert b'"failure":"' not in simulation_records
