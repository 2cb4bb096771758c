"""States that stay near are those that a checkpoint has, and no more of them than there is room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import MakeConfig
from vitfleet.fleet.state_cache import StateCache
from vitfleet.message import State
from vitfleet.run import setup
from vitfleet.run.checkpoint import Checkpoints
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run


def state(value: float, numbers: int = 10) -> State:
    return State({"x": torch.full((numbers,), float(value))})


def test_those_used_last_stay() -> None:
    near = StateCache(100)  # two of forty bytes
    for client in range(2):
        near.put(client, state(client))
    assert near.get(0) is not None  # now it is the other's turn to go
    near.put(2, state(2))
    assert [near.get(client) is not None for client in range(3)] == [True, False, True]


def test_a_new_state_takes_the_place_of_the_old_one() -> None:
    near = StateCache(100)
    for value in range(5):
        near.put(0, state(value))
    near.put(1, state(9))
    held = near.get(0)
    assert held is not None
    assert float(held.tensors["x"][0]) == 4, "and its room was given back each time"
    near.put(0, None)
    assert near.get(0) is None
    near.put(1, state(1, numbers=26))
    assert near.get(1) is None, "too large, and the old one is old"


@pytest.mark.parametrize("method", ["transfl", "standalone"])
def test_a_run_is_the_same_and_reads_nothing_back(
    method: str, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("method.k=1",) if method == "transfl" else ()
    config = tiny_config(f"method.name={method}", *keys, "rounds=4")
    read: list[int] = []
    client = Checkpoints.client

    def note(self: Checkpoints, who: int) -> State | None:
        read.append(who)
        return client(self, who)

    monkeypatch.setattr(Checkpoints, "client", note)
    lines, counts = [], []
    for room in (0, 1 << 30):
        monkeypatch.setattr(setup, "gpu_memory_bytes", lambda device, room=room: room)
        read.clear()
        run_rounds(open_run(config, tmp_path / str(room)))
        lines.append((tmp_path / str(room) / "records.jsonl").read_bytes())
        counts.append(len(read))
    assert lines[0] == lines[1]
    assert counts[1] < counts[0]
