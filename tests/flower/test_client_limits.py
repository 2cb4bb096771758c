"""A client checks what a server asks for as it would a stranger's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from conftest import MakeConfig
from vitfleet.config import load_config
from vitfleet.config.load import presets
from vitfleet.config.schema import MachineConfig
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import RefusedRequestError, UserError
from vitfleet.fleet.base import Request
from vitfleet.flower.activity import ActivityLog
from vitfleet.flower.device.checks import check_model, check_round, check_run
from vitfleet.flower.device.client import FlowerClient
from vitfleet.flower.device.handler import local_client
from vitfleet.flower.device.limits import ClientLimits
from vitfleet.flower.device.storage import ClientStorage
from vitfleet.flower.server.fleet import make_run_spec
from vitfleet.flower.transport.payloads import RunSpec, TrainPayload
from vitfleet.message import Message
from vitfleet.run.setup import open_run
from vitfleet.training.evaluator import Evaluator

TASKS = {"count": 3, "classes": 3, "per_client": [1, 3], "rounds_per_task": 1}


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
        raise RefusedRequestError("allowed")

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
        (
            {"train__epochs": 2000},
            "the server asks for epochs = 2000 (epochs that run in a round, of tuning and measuring too); "
            "this client's owner allows 1000",
        ),
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
        ({"image_size": 10**9}, "the server asks for image_size"),
        ({"image_size": -1}, "-1 pixels per side"),
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
    limits = ClientLimits.parse(["epochs=3", "image_size=8", "batch_size=16"])
    assert failure_of(spec, tmp_path, limits) == "allowed"
    assert "--limit epochs=…" in failure_of(asked(spec, train__epochs=4), tmp_path / "other", limits)
    for wrong in ("epochs", "epoch=3", "epochs=x", "epochs=0", "stored_share=2"):
        with pytest.raises(UserError, match="--limit"):
            ClientLimits.parse([wrong])


@pytest.mark.parametrize(
    ("limit", "keys"),
    [
        ("layers=11", {"model__name": "vit_tiny_patch16_224", "model__depth": None}),
        ("width=191", {"model__name": "vit_tiny_patch16_224"}),
        ("image_size=223", {"model__name": "vit_tiny_patch16_224"}),
        ("width=15", {}),
        ("classes=9", {}),
        ("batch_size=15", {}),
        ("batch_size=31", {"method": {"name": "er", "replays": 1}, "data__tasks": TASKS}),
        ("batch_size=4096", {"method": {"name": "dytox", "replays": 1000}, "data__tasks": TASKS}),
        ("tasks=2", {"data__tasks": TASKS}),
        ("epochs=4", {"train__epochs": 4, "method": {"name": "fedvit", "tune_epochs": 5}, "data__tasks": TASKS}),
        ("stored_share=0.1", {"method": {"name": "gem", "stored_share": 0.2}, "data__tasks": TASKS}),
    ],
)
def test_every_size_is_limited_also_that_of_a_model_which_is_named(
    limit: str, keys: dict[str, Any], spec: RunSpec, tmp_path: Path
) -> None:
    failure = failure_of(asked(spec, **keys), tmp_path, ClientLimits.parse([limit]))
    assert failure.startswith(f"the server asks for {limit.partition('=')[0]} = ")


def test_a_base_message_larger_than_the_disk_limit_is_refused_and_not_stored(spec: RunSpec, tmp_path: Path) -> None:
    client = FlowerClient(lambda *_: pytest.fail("it trains"), tmp_path, MachineConfig(), ClientLimits(disk_mb=1))
    base = Message({"weight": torch.zeros(262_000)})
    reply = client.train(TrainPayload(Request(1, 0, Message()), spec, base))
    assert reply.failure is not None
    assert "would take 1.0 MB; its owner allows 1 (vitfleet client --limit disk_mb=…)" in reply.failure
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_files_of_all_runs_count(tmp_path: Path) -> None:
    message = Message({"weight": torch.zeros(150_000)})
    for run in ("first", "second"):
        storage = ClientStorage.of_run(tmp_path, run)
        storage.check_room(600_000, limit_mb=2)
        storage.save_base(message)
    with pytest.raises(UserError, match=r"would take 2\.2 MB"):
        ClientStorage.of_run(tmp_path, "third").check_room(1_000_000, limit_mb=2)
    ClientStorage.of_run(tmp_path, "third").check_room(700_000, limit_mb=2)


def test_a_state_larger_than_the_disk_limit_is_not_stored(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    data = load_dataset(config.data)
    sizes: list[int] = []

    def check_room(storage: ClientStorage, new_bytes: int, limit_mb: int) -> None:
        sizes.append(new_bytes)
        if len(sizes) == 2:
            raise RefusedRequestError("no room")

    monkeypatch.setattr(ClientStorage, "check_room", check_room)
    context = open_run(config, tmp_path / "run")
    client = FlowerClient(lambda *_: data, tmp_path / "state", MachineConfig(device="cpu", threads=1))
    weights = context.net.initial_weights()
    request = Request(1, 0, Message(weights))
    reply = client.train(TrainPayload(request, make_run_spec(config, data, "run"), context.base))
    assert reply.failure == "no room"
    assert sizes[1] > sum(tensor.nbytes for tensor in weights.values()), "the client's own model counts"
    assert [path.name for path in (tmp_path / "state").rglob("*.safetensors")] == ["base.safetensors"]


def test_a_run_with_the_same_name_cannot_grow_the_clients_model_unchecked(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    monkeypatch.setattr(ClientStorage, "check_room", lambda storage, size, limit_mb: checked.append(size))
    data = load_dataset(tiny_config().data)
    client = FlowerClient(lambda *_: data, tmp_path / "state", MachineConfig(device="cpu", threads=1))
    for number, width in enumerate((16, 64), start=1):
        config = tiny_config(f"model.dim={width}")
        context = open_run(config, tmp_path / str(number))
        request = Request(number, 0, Message(context.net.initial_weights()))
        before = sum(path.stat().st_size for path in (tmp_path / "state").glob("*/*"))
        client.train(TrainPayload(request, make_run_spec(config, data, "run"), context.base))
        after = sum(path.stat().st_size for path in (tmp_path / "state").glob("*/*"))
        assert after - before <= sum(checked)
        checked.clear()


def test_evaluation_has_no_more_images_at_once_than_its_owner_allows(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("eval.batch_size=1000000", "train.batch_size=4")
    data = load_dataset(config.data)
    sizes: list[int] = []
    logits = Evaluator._logits

    def spied(*arguments: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in logits(*arguments):
            sizes.append(len(batch[1]))
            yield batch

    monkeypatch.setattr(Evaluator, "_logits", spied)
    limits = ClientLimits(batch_size=8)
    client = FlowerClient(lambda *_: data, tmp_path / "state", MachineConfig(device="cpu", threads=1), limits)
    context = open_run(config, tmp_path / "run")
    request = Request(1, 0, Message(context.net.initial_weights()), evaluate=True)
    reply = client.train(TrainPayload(request, make_run_spec(config, data, "run"), context.base))
    assert reply.evaluation is not None
    assert reply.evaluation.tested == len(data.test) == sum(sizes)
    assert max(sizes) == 8


def test_a_cache_of_images_is_written_only_where_it_fits_and_gives_way_to_runs(tmp_path: Path) -> None:
    photos, root = tmp_path / "photos" / "cat", tmp_path / "runs"
    photos.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(photos / f"{number}.png")
    cache = root / "images"

    def load(image_size: int, disk_mb: int) -> None:
        client = local_client(tmp_path / "photos", root, MachineConfig(), ClientLimits(disk_mb=disk_mb))
        config = load_config("digits", ["data.test_share=0.25"])
        assert len(client.load_images(config, RunSpec("run", "", ["cat"], 3, image_size)).train) == 3

    load(image_size=400, disk_mb=1)  # 4 · 400² · 3 bytes: 1.9 MB
    assert not list(cache.iterdir())
    load(image_size=250, disk_mb=1)  # 0.75 MB
    (file,) = cache.iterdir()
    run = ClientStorage.of_run(root, "run")
    run.check_room(200_000, limit_mb=1)
    assert file.exists()
    run.check_room(900_000, limit_mb=1)  # the run's file is needed, the cache is not
    assert not list(cache.iterdir())
    with pytest.raises(UserError, match=r"would take 1\.1 MB"):
        run.check_room(1_100_000, limit_mb=1)
    assert not run.folder.exists()


SIZES = {"digits": (10, 1, 8), "cifar10": (10, 3, 32), "cifar100": (100, 3, 32), "ucmerced": (21, 3, 256)}
SMALL_MACHINE, SLOW, IMAGES = 8 * 10**9, 2e10, 500  # bytes of memory, operations per second, training images


@pytest.mark.parametrize("preset", sorted(presets()))
def test_no_preset_asks_for_more_than_the_defaults_allow(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device with 8 GB of memory and slow cores; ViT-Base takes 3 GB of them."""
    monkeypatch.setattr("vitfleet.flower.device.limits.total_memory", lambda: SMALL_MACHINE)
    remote = {"fleet.kind": "flower", "fleet.devices": {}, "machine.checkpoint_every": 1, "model.weights": None}
    config = load_config(preset, remote)
    classes, channels, size = SIZES.get(config.data.name, (200, 3, 64))
    if config.data.tasks is not None:
        classes = max(classes, config.data.tasks.count * config.data.tasks.classes)
    spec = RunSpec("run", config.model_dump_json(), [str(number) for number in range(classes)], channels, size, [])
    shared = config.model_copy(update={"machine": MachineConfig()})
    limits = ClientLimits()
    check_run(shared, spec, limits)
    net = check_model(shared, spec, limits)
    check_round(shared, spec, net, np.arange(IMAGES) % classes, SLOW, limits)
