"""Schedules of rounds in whole runs on digits with simulated devices, and their parts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from conftest import InterruptAfter, MakeConfig
from vitfleet.config.fleet import BufferedSchedule
from vitfleet.config.schema import Config
from vitfleet.costs.virtual_clock import ClientInFlight
from vitfleet.errors import UserError
from vitfleet.message import Message, State
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.round_plan import ClientPlan, apply_staleness
from vitfleet.run.setup import open_run
from vitfleet.run.state import InFlight

MIX = "fleet.devices={agx=1, nx=2, nano=2, pi4-2gb=1}"
BUFFERED = ("fleet.schedule.kind=buffered", "fleet.schedule.concurrency=3", "fleet.clients=8", "fleet.per_round=3")


def run(config: Config, folder: Path, interrupt_after: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    callbacks = [] if interrupt_after is None else [InterruptAfter(interrupt_after)]
    run_rounds(open_run(config, folder), callbacks=callbacks)


def written(folder: Path) -> dict[str, bytes]:
    """Return the files that must not depend on interruptions: records, model and states."""
    paths = [folder / "records.jsonl", *folder.glob("*.safetensors"), *folder.glob("checkpoint/*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def records_of(folder: Path) -> list[RoundRecord]:
    return list(read_records(folder))


def test_a_synchronous_round_ends_with_its_slowest_client(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config(MIX), tmp_path)
    before = 0.0
    for record in records_of(tmp_path):
        assert all(entry.began == before for entry in record.clients)
        latest = max(entry.ended or 0.0 for entry in record.clients)
        assert record.virtual_seconds == latest > before
        before = latest
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["total"]["virtual_seconds"] == before
    assert summary["total"]["train_gflops"] > 0
    assert len(json.loads((tmp_path / "devices.json").read_text())["clients"]) == tiny_config().fleet.clients


def test_the_virtual_clock_does_not_change_the_training(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config(MIX), tmp_path / "with")
    run(tiny_config(), tmp_path / "without")
    assert written(tmp_path / "with")["model.safetensors"] == written(tmp_path / "without")["model.safetensors"]
    assert {record.virtual_seconds for record in records_of(tmp_path / "without")} == {None}


def test_less_bandwidth_makes_longer_rounds(tiny_config: MakeConfig, tmp_path: Path) -> None:
    clocks = []
    for bandwidth in (1.0, 0.1):
        folder = tmp_path / str(bandwidth)
        run(tiny_config(MIX, f"fleet.bandwidth={bandwidth}", "rounds=1"), folder)
        clocks.append(records_of(folder)[0].virtual_seconds or 0.0)
    assert 5 < clocks[1] / clocks[0] < 10  # the training time is the same


def test_clients_that_miss_the_deadline_are_recorded_as_too_late(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config(MIX), tmp_path / "all")
    first = records_of(tmp_path / "all")[0]
    times = sorted(entry.ended or 0.0 for entry in first.clients)
    deadline = (times[0] + times[-1]) / 2
    run(tiny_config(MIX, "fleet.schedule.kind=deadline", f"fleet.schedule.seconds={deadline}"), tmp_path / "some")
    record = records_of(tmp_path / "some")[0]
    late = {entry.client for entry in first.clients if (entry.ended or 0.0) > deadline}
    assert late
    assert {entry.client for entry in record.clients if entry.failure} == late
    assert record.virtual_seconds == pytest.approx(deadline)
    for entry in record.clients:
        if entry.client in late:
            assert entry.failure is not None
            assert entry.failure.startswith("too late")
            assert entry.up_bytes == 0
            assert entry.down_bytes > 0


def test_over_selection_uses_the_first_clients_to_finish(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(MIX, "fleet.schedule.kind=over-selection", "fleet.schedule.share=0.5", "fleet.per_round=2")
    run(config, tmp_path)
    for record in records_of(tmp_path):
        assert len(record.clients) == 3
        assert sum(entry.failure is None for entry in record.clients) == 2


def test_clients_without_enough_memory_do_not_train(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.run.setup.round_memory", lambda *_: _HugeMemory())
    run(tiny_config("fleet.devices={agx=1, pi4-2gb=1}"), tmp_path)
    devices = json.loads((tmp_path / "devices.json").read_text())
    small = {client for client, name in enumerate(devices["clients"]) if name == "pi4-2gb"}
    assert set(devices["out_of_memory"]) == small
    entries = [entry for record in records_of(tmp_path) for entry in record.clients]
    assert {entry.client for entry in entries if entry.failure} == {entry.client for entry in entries} & small
    assert all(
        "out of memory: training needs 3.00 GiB" in (entry.failure or "out of memory: training needs 3.00 GiB")
        for entry in entries
    )


class _HugeMemory:
    total = 3 * 2**30


@pytest.mark.parametrize("method", ["fedavg", "transfl", "eftvit"])
def test_buffered_rounds_overlap_and_survive_an_interruption(
    method: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    keys = {"transfl": ["method.k=1"], "eftvit": ["method.local_layers=1"]}.get(method, [])
    config = tiny_config(MIX, *BUFFERED, f"method.name={method}", *keys, "rounds=4")
    run(config, tmp_path / "undisturbed")
    records = records_of(tmp_path / "undisturbed")
    for earlier, later in pairwise(records):
        assert (earlier.virtual_seconds or 0) <= (later.virtual_seconds or 0)
    # Some clients started before the round that used their update.
    overlapping = [
        entry
        for earlier, later in pairwise(records)
        for entry in later.clients
        if (entry.began or 0) < (earlier.virtual_seconds or 0)
    ]
    assert overlapping
    for interrupted in (2, 4):
        folder = tmp_path / f"interrupted-{interrupted}"
        with pytest.raises(KeyboardInterrupt):
            run(config, folder, interrupted)
        run(config, folder)
        assert written(folder) == written(tmp_path / "undisturbed")


def test_buffered_schedule_rejects_too_few_clients_with_enough_memory(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.run.setup.round_memory", lambda *_: _HugeMemory())
    context = open_run(tiny_config("fleet.devices={agx=1, pi4-2gb=1}", *BUFFERED), tmp_path)
    with pytest.raises(UserError, match="only 4 clients have enough memory"):
        run_rounds(context)


def test_apply_staleness_scales_the_change_and_adds_it_to_the_server_weights() -> None:
    server = State({"w": torch.tensor([10.0])})
    plan = ClientPlan(0, Message({"w": torch.tensor([1.0])}), 0, None, staleness=3)
    up = Message({"w": torch.tensor([3.0]), "features": torch.tensor([7.0])}, {"samples": 5})
    fresh = apply_staleness(up, plan, server, BufferedSchedule(staleness=0.5))
    assert fresh.tensors["w"].item() == 10 + (3 - 1) / 2  # (1 + 3)^-0.5
    assert fresh.tensors["features"].item() == 7
    assert fresh.numbers == {"samples": 5}
    assert apply_staleness(up, ClientPlan(0, plan.message, 0, None), server, BufferedSchedule()) is up


def test_in_flight_unpack_is_the_inverse_of_pack() -> None:
    flights = (ClientInFlight(2.5, 3, 1, -1, 0.5), ClientInFlight(4.0, 1, 0, 2, 0.0))
    past = {0: State({"w": torch.zeros(1)}), 1: State({"w": torch.ones(1)})}
    server = State({"w": torch.tensor([2.0])}, parts={"features-000001": State()})
    packed = InFlight(1.5, flights, past).pack(server)
    assert set(packed.parts) == {"features-000001", "past-000000", "past-000001", "flights"}
    unpacked, in_flight = InFlight.unpack(packed, 1.5)
    assert set(unpacked.parts) == {"features-000001"}
    assert in_flight == InFlight(1.5, flights, past)
