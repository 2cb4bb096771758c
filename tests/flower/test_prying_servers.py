"""What a server may ask of a device: no more memory and time than fit, no image, no local name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_client_limits import asked

from conftest import MakeConfig
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.data.sources.load import load_dataset
from vitfleet.fleet.base import Request
from vitfleet.flower.device.client import FlowerClient
from vitfleet.flower.device.handler import local_client
from vitfleet.flower.device.limits import ClientLimits
from vitfleet.flower.server.fleet import make_run_spec
from vitfleet.flower.transport.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message
from vitfleet.run.context import RunContext
from vitfleet.run.setup import open_run

CPU = MachineConfig(device="cpu", threads=1)
TASKS = {"count": 3, "classes": 3, "per_client": [1, 3], "rounds_per_task": 1}


class Server:
    """A server with a tiny run on digits, and a device with all of its images."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self.data = load_dataset(config.data)
        self.context: RunContext = open_run(config, folder / "server")
        self.spec = make_run_spec(config, self.data, "run")

    def client(self, *limits: str) -> FlowerClient:
        def load_images(config: Config, spec: RunSpec) -> DataSet:
            return self.data

        return FlowerClient(load_images, self.folder / "state", CPU, ClientLimits.parse(list(limits)))

    def failure(self, spec: RunSpec, *limits: str, base: Message | None = None) -> str | None:
        """Return why a device with these limits does not train."""
        server = self.context.initial_server_state()
        message = self.context.method.message_to_client(server, 1, 0, None)
        payload = TrainPayload(Request(1, 0, message), spec, base or self.context.base)
        return self.client(*limits).train(payload).failure


@pytest.fixture
def server(tiny_config: MakeConfig, tmp_path: Path) -> Server:
    return Server(tiny_config(), tmp_path)


# Memory and time


def test_an_honest_request_is_within_the_defaults(server: Server) -> None:
    assert server.failure(server.spec) is None


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ({"model__dim": 4096, "model__depth": 64, "model__heads": 64}, "model_mb"),
        ({"method": {"name": "fed-prompt", "prompts": 1000}, "model__depth": 60}, "memory_mb=50"),
        ({"train__batch_size": 4096}, "memory_mb=30"),
        ({"train__epochs": 1000}, "seconds_per_round=5"),
        ({"method": {"name": "eftvit", "local_layers": 1, "views": 1000}, "train__epochs": 1000}, "shown_share"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_built(
    keys: dict[str, Any], limit: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.flower.device.client._set_up_client", lambda *_: pytest.fail("it is built"))
    failure = server.failure(asked(server.spec, **keys), *([limit] if "=" in limit else []))
    assert failure is not None
    assert failure.startswith(f"the server asks for {limit.partition('=')[0]} = ")


def test_the_defaults_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.flower.device.limits.total_memory", lambda: 2 * 10**9)
    limits = ClientLimits()
    assert limits.model_mb < limits.memory_mb <= 1000


def test_a_base_message_larger_than_a_model_may_be_is_refused(server: Server) -> None:
    base = Message({**server.context.base.tensors, "more": torch.zeros(10**6)})
    failure = server.failure(server.spec, "model_mb=1", base=base)
    assert failure is not None
    assert "model_mb" in failure


@pytest.mark.parametrize("num_tasks", [2, 3 * 10**7, -1])
def test_an_evaluation_has_no_more_tasks_than_the_run(num_tasks: int, server: Server) -> None:
    state = server.context.initial_server_state()
    payload = EvalPayload(0, num_tasks, None, server.spec, Message(state.tensors), server.context.base)
    reply = server.client().evaluate(payload)
    assert reply.failure is not None
    assert "num_tasks" in reply.failure


@pytest.mark.parametrize("task_index", [3, 10**9, -1])
def test_a_task_is_one_of_the_runs(task_index: int, tiny_config: MakeConfig, tmp_path: Path) -> None:
    server = Server(tiny_config(f"data.tasks={json.dumps(TASKS).replace(':', ' =')}"), tmp_path)
    message = server.context.method.message_to_client(server.context.initial_server_state(), 1, 0, None)
    request = Request(1, 0, message, task_index=task_index)
    reply = server.client().train(TrainPayload(request, server.spec, server.context.base))
    assert reply.failure is not None
    assert "task" in reply.failure


def test_what_an_estimate_missed_is_an_error_and_ends_no_process() -> None:
    """In a process of its own: the limit is that of the whole process."""
    code = """
import torch
from vitfleet.flower.device.handler import hard_limits
with hard_limits({"limits": '["memory_mb=100"]', "device": "cpu"}):
    torch.ones(5 * 10**6)
    try:
        torch.ones(50 * 10**6)
    except RuntimeError:
        print("refused")
torch.ones(50 * 10**6)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


# Images


def eftvit(tiny_config: MakeConfig, folder: Path, *keys: str) -> Server:
    common = ("method.name=eftvit", "method.local_layers=1", "model.patch_size=2", "train.mask_ratio=0.5")
    return Server(tiny_config(*common, *keys), folder)


def test_features_of_a_local_module_that_transforms_nothing_do_not_leave_the_device(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    server = eftvit(tiny_config, tmp_path)
    assert server.failure(server.spec) is None
    block = [name for name in server.context.base.tensors if "blocks.0" in name]
    identity = {name: torch.zeros_like(server.context.base.tensors[name]) for name in block}
    still = asked(server.spec, train__lr=1e-29)
    failure = server.failure(still, base=Message({**server.context.base.tensors, **identity}))
    assert failure is not None
    assert "would show the images" in failure


def test_an_owner_limits_the_share_of_patches_whose_features_leave(tiny_config: MakeConfig, tmp_path: Path) -> None:
    server = eftvit(tiny_config, tmp_path)
    for keys in ({"train__mask_ratio": 0.0}, {"train__mask_ratio": 0.3}):
        failure = server.failure(asked(server.spec, **keys))
        assert failure is not None
        assert failure.startswith("the server asks for shown_share = ")
    assert server.failure(asked(server.spec, train__mask_ratio=0.3), "shown_share=1") is None
    assert server.failure(server.spec, "shown_share=0.25") is not None


def test_the_owner_is_told_that_features_leave_the_device(tiny_config: MakeConfig, tmp_path: Path) -> None:
    server = eftvit(tiny_config, tmp_path)
    client = local_client(tmp_path / "none", tmp_path / "state", CPU, ClientLimits())
    client.train(TrainPayload(Request(1, 0, Message()), server.spec, server.context.base))
    log = (tmp_path / "state" / "activity.log").read_text()
    assert "features of 50% of each image's patches leave this device in a round" in log


# Names


def photos(folder: Path) -> Path:
    for name in ("ada lovelace", "bob"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "photos" / name / f"{number}.png")
    return folder / "photos"


def refusal(folder: Path, spec: RunSpec, server: Server) -> tuple[str, str]:
    """Return what a real device answers, and what it tells its owner."""
    client = local_client(folder / "photos", folder / "state", CPU, ClientLimits())
    failure = client.train(TrainPayload(Request(1, 0, Message()), spec, server.context.base)).failure
    assert failure is not None
    return failure, (folder / "state" / "activity.log").read_text()


def test_a_refusal_names_no_folder_and_no_path_of_the_device(server: Server, tmp_path: Path) -> None:
    photos(tmp_path)
    failure, log = refusal(tmp_path, replace(server.spec, classes=["?"], channels=3), server)
    assert failure == "its images do not suit the run; its owner's log says why"
    assert "ada lovelace" in log


def test_a_refusal_names_no_broken_photo(server: Server, tmp_path: Path) -> None:
    folder = photos(tmp_path)
    (folder / "bob" / "holiday in rome.png").write_bytes(b"broken")
    spec = replace(server.spec, classes=["ada lovelace", "bob"], channels=3)
    failure, log = refusal(tmp_path, spec, server)
    assert "rome" not in failure
    assert str(tmp_path) not in failure
    assert "rome" in log


def test_a_device_is_not_told_the_names_of_others(tiny_config: MakeConfig) -> None:
    names = [f"device-{number}" for number in range(6)]
    config = tiny_config("fleet.kind=flower", f"fleet.names={json.dumps(names)}")
    spec = make_run_spec(config, load_dataset(config.data), "run")
    assert not any(name in spec.config for name in names)
