"""A client checks what a server asks for as it would a stranger's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from vitfleet.config.schema import MachineConfig
from vitfleet.data.sources import load_dataset
from vitfleet.errors import UserError
from vitfleet.fleet.base import Request
from vitfleet.flower.activity import ActivityLog
from vitfleet.flower.client import FlowerClient
from vitfleet.flower.client_limits import ClientLimits
from vitfleet.flower.fleet import make_run_spec
from vitfleet.flower.payloads import RunSpec, TrainPayload
from vitfleet.message import Message


@pytest.fixture
def spec(tiny_config: MakeConfig) -> RunSpec:
    config = tiny_config("machine.workers=2")
    return make_run_spec(config, load_dataset(config.data), "run")


def asked(spec: RunSpec, **keys: Any) -> RunSpec:
    """Return what a server asks for, with some keys of the configuration changed."""
    tree = json.loads(spec.config)
    for key, value in keys.items():
        table, _, leaf = key.rpartition("__")
        (tree[table] if table else tree)[leaf] = value
    return replace(spec, config=json.dumps(tree))


def failure_of(spec: RunSpec, folder: Path, limits: ClientLimits | None = None) -> str:
    """Return why a client refuses to train; nothing may have been stored."""

    def load_images(*_: object) -> Any:
        raise UserError("allowed")

    activity = ActivityLog(folder / "activity.log")
    machine = MachineConfig(device="cpu")
    client = FlowerClient(load_images, folder / "state", machine, limits or ClientLimits(), activity)
    reply = client.train(TrainPayload(Request(1, 0, Message()), spec, Message()))
    assert reply.failure is not None
    assert reply.failure == "allowed" or not (folder / "state").exists()
    return reply.failure


def test_what_an_honest_server_asks_for_is_allowed_and_shown(spec: RunSpec, tmp_path: Path) -> None:
    assert failure_of(spec, tmp_path) == "allowed"
    shown = (tmp_path / "activity.log").read_text()
    assert "run run: the server asks to train FedAvg for up to 3 rounds of 1 epochs (batch 16)" in shown


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"data__path": "/etc"}, "the server sets data.path = '/etc'"),
        ({"data__dir": "/etc"}, "the server sets data.dir = '/etc'"),
        ({"data__partition": {"kind": "file", "path": "/etc"}}, "the server sets data.partition.path"),
        ({"model__weights": "hub"}, "the server sets model.weights = 'hub'"),
        ({"model__name": "hf-hub:owner/model"}, "it may name no hub and no path"),
        ({"model__name": "../model"}, "it may name no hub and no path"),
        ({"machine__device": "cuda:7"}, "keys of the table machine"),
        ({"train__epochs": 2000}, "the server asks for epochs = 2000; this client's owner allows 1000"),
        ({"train__epochs": 10**30}, "train.epochs"),
        ({"model__depth": 1000}, "model.depth"),
    ],
)
def test_what_a_server_has_no_business_with(spec: RunSpec, keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in failure_of(asked(spec, **keys), tmp_path)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"run_id": "../../x"}, "cannot be a folder's"),
        ({"run_id": ""}, "cannot be a folder's"),
        ({"side": 10**9}, "the server asks for side"),
        ({"side": -1}, "-1 pixels per side"),
        ({"channels": 10**9}, "channels"),
        ({"config": "[]"}, "not a table"),
        ({"config": "{"}, "not JSON"),
    ],
)
def test_a_run_that_no_server_of_ours_sends(
    spec: RunSpec, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reason in failure_of(replace(spec, **changed), tmp_path)


def test_an_owner_sets_limits(spec: RunSpec, tmp_path: Path) -> None:
    limits = ClientLimits.parse(["epochs=3", "side=8", "batch_size=16"])
    assert failure_of(spec, tmp_path, limits) == "allowed"
    assert "--limit epochs=…" in failure_of(asked(spec, train__epochs=4), tmp_path / "other", limits)
    for wrong in ("epochs", "epoch=3", "epochs=x", "epochs=0", "stored_share=2"):
        with pytest.raises(UserError, match="--limit"):
            ClientLimits.parse([wrong])
