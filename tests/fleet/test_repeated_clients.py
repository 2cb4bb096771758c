"""Clients whose captured steps diverge are trained again without capture; CUDA graphs are emulated on the CPU."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from conftest import MakeConfig
from emulated_graphs import EmulatedGraph, set_up_with_graphs
from vitfleet.run import setup
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run
from vitfleet.training.capture.runner import CudaGraphRunner

TrainRun: TypeAlias = Callable[..., tuple[list[RoundRecord], dict[str, object]]]
OVERRIDES = ("fleet.clients=4", "fleet.per_round=4", "rounds=3", "train.epochs=2", "machine.stack_size=2")


@pytest.fixture
def train(tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainRun:
    """Train a small run with captured steps or without; return its records and how its steps were executed."""

    def train_run(graphs: bool, *keys: str) -> tuple[list[RoundRecord], dict[str, object]]:
        monkeypatch.setattr(setup, "gpu_memory_bytes", lambda device: 1 << 30)
        monkeypatch.setattr(setup, "set_up_execution", partial(set_up_with_graphs, graphs))
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        run_rounds(open_run(tiny_config(*OVERRIDES, "train.optimizer=sgd", *keys), folder))
        return list(read_records(folder)), json.loads((folder / "summary.json").read_text())["execution"]

    return train_run


def test_clients_of_a_faulty_capture_are_trained_again(
    captured: list[CudaGraphRunner],
    train: TrainRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A replay that writes NaN, once, changes no result."""
    replay, replays = EmulatedGraph.replay, 0

    def faulty_replay(graph: EmulatedGraph) -> None:
        nonlocal replays
        replay(graph)
        replays += 1
        if replays == 3:
            next(iter(graph.runner.stack.leaves.values())).data.fill_(math.nan)

    expected, _ = train(True)
    num_captures = len(captured)
    monkeypatch.setattr(EmulatedGraph, "replay", faulty_replay)
    with caplog.at_level(logging.WARNING):
        records, execution = train(True)
    assert execution["repeated_clients"] == 2, "both clients of the stack"
    assert execution["clients"] == "mixed"
    assert not any(entry.failure for record in records for entry in record.clients)
    for record, reference in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(reference.loss, rel=1e-4)
    assert "captured steps: training diverged: non-finite loss (nan) at client" in caplog.text
    assert len(caplog.records) == 2
    assert len(captured) - num_captures > num_captures, "steps were captured anew"


def test_training_that_diverges_is_repeated_once(captured: list[CudaGraphRunner], train: TrainRun) -> None:
    records, execution = train(True, "train.lr=1e30", "train.momentum=0")
    assert execution["repeated_clients"] == 1
    failures = [entry.failure or "" for record in records for entry in record.clients]
    assert all("training diverged" in failure for failure in failures)
    assert len(failures) == 12
