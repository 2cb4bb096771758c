"""The state cache is bounded, drops the least recently used states, and does not change a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import MakeConfig
from vitfleet.fleet.simulation import StateCache
from vitfleet.message import State
from vitfleet.run import setup
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run


def make_state(value: float, size: int = 10) -> State:
    return State({"x": torch.full((size,), float(value))})


def test_cache_drops_the_least_recently_used_state() -> None:
    cache = StateCache(100)  # two states of 40 bytes
    for client in range(2):
        cache.put(client, make_state(client))
    assert cache.get(0) is not None  # now client 1 is the least recently used
    cache.put(2, make_state(2))
    assert [cache.get(client) is not None for client in range(3)] == [True, False, True]


def test_put_replaces_the_old_state() -> None:
    cache = StateCache(100)
    for value in range(5):
        cache.put(0, make_state(value))
    cache.put(1, make_state(9))
    cached = cache.get(0)
    assert cached is not None
    assert float(cached.tensors["x"][0]) == 4, "the memory of each old state was freed"
    cache.put(0, None)
    assert cache.get(0) is None
    cache.put(1, make_state(1, size=26))
    assert cache.get(1) is None, "the new state is too large, the old one is outdated"


@pytest.mark.parametrize("method", ["transfl", "standalone"])
def test_cache_saves_reads_and_does_not_change_the_run(
    method: str, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("method.k=1",) if method == "transfl" else ()
    config = tiny_config(f"method.name={method}", *keys, "rounds=4")
    read: list[int] = []
    read_client = Checkpoints.client

    def record_read(self: Checkpoints, client: int) -> State | None:
        read.append(client)
        return read_client(self, client)

    monkeypatch.setattr(Checkpoints, "client", record_read)
    records, reads = [], []
    for gpu_bytes in (0, 1 << 30):
        monkeypatch.setattr(setup, "gpu_memory_bytes", lambda device, gpu_bytes=gpu_bytes: gpu_bytes)
        read.clear()
        run_rounds(open_run(config, tmp_path / str(gpu_bytes)))
        records.append((tmp_path / str(gpu_bytes) / "records.jsonl").read_bytes())
        reads.append(len(read))
    assert records[0] == records[1]
    assert reads[1] < reads[0]
