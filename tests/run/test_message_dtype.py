"""The key ``fleet.message_dtype``: weights travel in half of the bytes, and both ends compute in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LocalClients, defended, export_images
from torch import Tensor

import vitfleet
from conftest import InterruptAfter
from digests import digest
from vitfleet.config import load_config
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.message import Message
from vitfleet.run.checkpoints.store import StoredStates
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run

PRESET = "start-fedavg"  # the shipped weights
TINY: Mapping[str, Any] = {
    "rounds": 2,
    "data.limit": 200,
    "fleet.clients": 4,
    "fleet.per_round": 2,
    "fleet.devices": {},
    "train.epochs": 1,
    "eval.clients": 0,
    "machine.device": "cpu",
    "machine.precision": "fp32",
    "machine.workers": 1,
}
HEAD = {"head.start": "closed-form", "head.last.blocks": 2, "head.last.project": 40, "head.last.send": "features"}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fed-full": HEAD,
    "fed-lora": HEAD,
    "fedbfpt": {**HEAD, "method.local_layers": 2},
    "eftvit": {**HEAD, "method.local_layers": 1, "method.average_local": 1, "train.mask_ratio": 0.5},
    "fedper": {"head.start": "closed-form"},
}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


def keys_of(method: str, *tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for table in (TINY, METHODS[method], *tables) for key, value in table.items()}


def train(method: str, out: Path, *tables: Mapping[str, Any], **options: Any) -> vitfleet.Run:
    return vitfleet.train(PRESET, method=method, overrides=keys_of(method, *tables), out=out, **options)


def round_trip(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


@pytest.mark.parametrize("dtype", HALF)
def test_a_model_of_one_client_is_what_it_sent(dtype: str, tmp_path: Path) -> None:
    keys = {"fleet.message_dtype": dtype, "fleet.per_round": 1, "rounds": 1}
    run = train("fedavg", tmp_path / "run", keys)
    weights = StoredStates.of_run(run.path).server().tensors
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert all(torch.equal(tensor, round_trip(tensor, HALF[dtype])) for tensor in weights.values())
    exact = train("fedavg", tmp_path / "exact", {**keys, "fleet.message_dtype": "fp32"})
    for name, tensor in StoredStates.of_run(exact.path).server().tensors.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0.05, atol=0.02)
    (record,), (other,) = read_records(run.path), read_records(exact.path)
    sent, before = record.clients[0], other.clients[0]
    assert sent.up_bytes == pytest.approx(before.up_bytes / 2, rel=0.05)
    assert sent.down_bytes == pytest.approx(before.down_bytes / 2, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_flowers_clients_send_the_same_bits(method: str, tmp_path: Path) -> None:
    config = defended(load_config(PRESET, keys_of(method, {"method.name": method, "fleet.message_dtype": "fp16"})))
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(config, tmp_path / "simulation")).state
    remote = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    flower = run_rounds(open_run(remote, tmp_path / "flower", make_fleet=fleet_factory(clients.grid()))).state
    for ours, theirs in ((flower.server, simulation.server), (flower.last_head, simulation.last_head)):
        torch.testing.assert_close(dict(ours.tensors), dict(theirs.tensors), rtol=0, atol=0)
    first, second = ((tmp_path / way / "records.jsonl").read_text() for way in ("simulation", "flower"))
    assert first == second
    assert '"failure":"' not in first


@pytest.mark.parametrize("method", ["fed-full", "fed-lora", "fedbfpt"])
def test_bytes_of_all_exchanges_are_half(method: str, tmp_path: Path) -> None:
    def bytes_of(dtype: str) -> list[tuple[int, int]]:
        run = train(method, tmp_path / dtype, {"fleet.message_dtype": dtype})
        records: list[RoundRecord] = list(read_records(run.path))
        return [(client.down_bytes, client.up_bytes) for record in records for client in record.clients] + [
            (client.down_bytes, 0) for record in records if record.head for client in record.head.clients
        ]

    for half, whole in zip(bytes_of("fp16"), bytes_of("fp32"), strict=True):
        assert half[0] <= whole[0] / 2 + 5000, "names of tensors, shift and scale stay"
        assert half[1] <= whole[1] / 2 + 5000


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    keys = {"fleet.message_dtype": "bf16", "rounds": 3}
    whole = train("fed-lora", tmp_path / "whole", keys)
    with pytest.raises(KeyboardInterrupt):
        train("fed-lora", tmp_path / "interrupted", keys, callbacks=[InterruptAfter(2)])
    resumed = vitfleet.load_run(tmp_path / "interrupted").resume()
    assert digest(resumed.path) == digest(whole.path)
    (evaluation,), _ = vitfleet.evaluate(whole)
    *_, last = read_records(whole.path)
    assert last.accuracy is not None
    assert evaluation.accuracy == pytest.approx(last.accuracy.global_)


def test_costs_are_those_of_what_is_sent() -> None:
    half, whole = (
        next(
            iter(
                vitfleet.cost(
                    PRESET, methods=["fed-full"], overrides={"fleet.message_dtype": dtype, "method.name": "fed-full"}
                )
            )
        )
        for dtype in ("bf16", "fp32")
    )
    assert half.up_bytes == pytest.approx(whole.up_bytes / 2, rel=0.05)
    assert half.down_bytes == pytest.approx(whole.down_bytes / 2, rel=0.05)


def test_only_weights_change_their_type(tmp_path: Path) -> None:
    keys = keys_of("fed-full", {"method.name": "fed-full", "fleet.message_dtype": "fp16"})
    context = open_run(load_config(PRESET, keys), tmp_path)
    assert context.last is not None
    method = context.last.method
    tensors = {"head.weight": torch.rand(3), "head.shift": torch.rand(3), "features": torch.rand(3).half()}
    sent = method.to_wire(Message(tensors, {"samples": 3}))
    assert {name: tensor.dtype for name, tensor in sent.tensors.items()} == {
        "head.weight": torch.float16,
        "head.shift": torch.float32,
        "features": torch.float16,
    }
    received = method.from_wire(sent)
    assert received.tensors["features"].dtype == torch.float16
    assert torch.equal(received.tensors["head.weight"], round_trip(tensors["head.weight"], torch.float16))
    assert received.numbers == {"samples": 3}
