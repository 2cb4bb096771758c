"""Run folders written by hand, so that reports are tested on known records and without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from vitfleet.config.load import validate
from vitfleet.run.output.summary import write_summary
from vitfleet.run.records import Accuracy, ClientRecord, MetricValues, RoundRecord, TaskRecord

MakeRun: TypeAlias = Callable[..., Path]
CLIENTS = 6
TASK_RECORDS = (TaskRecord(1, [[0.9, 0.1]], [[0.1, 0.1]], 0.9), TaskRecord(2, [[0.7, 0.8]], None, 0.75, 0.2))
CLASSES = 4


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes a run folder, with ``finished_rounds`` of ``rounds`` rounds.

    ``metrics`` returns the metrics of a round, ``data`` has keys of the configuration's table.
    """

    def make(
        name: str,
        method: str = "fedavg",
        seed: int = 0,
        finished_rounds: int = 5,
        rounds: int = 5,
        devices: bool = True,
        tasks: int = 0,
        metrics: Callable[[int], Mapping[str, MetricValues]] = lambda round: {},
        data: Mapping[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        title = f"{method} & <made>"
        config = validate({"method": {"name": method}, "seed": seed, "rounds": rounds, "title": title})
        tree = json.loads(config.model_dump_json())
        tree["data"] |= {**(data or {}), "tasks": {"count": tasks} if tasks else None}
        (folder / "config.json").write_text(json.dumps(tree))
        (folder / "about.json").write_text(json.dumps({"command": "vitfleet run made", "versions": {"torch": "2"}}))
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 30, (CLIENTS, CLASSES))
        partition = {
            "sha256": f"partition-{seed}",
            "classes": [f"class {i}" for i in range(CLASSES)],
            "counts": counts.tolist(),
        }
        (folder / "partition.json").write_text(json.dumps(partition))
        if devices:
            device_names = [("nano", "agx")[i % 2] for i in range(CLIENTS)]
            (folder / "devices.json").write_text(json.dumps({"clients": device_names}))
        with (folder / "records.jsonl").open("w") as file:
            for round in range(1, finished_rounds + 1):
                record = _record(round, seed, method, devices)
                task = TASK_RECORDS[round // 2 - 1] if round // 2 <= tasks and round % 2 == 0 else None
                file.write(replace(record, task=task, metrics=metrics(round)).line() + "\n")
        if finished_rounds == rounds:
            continual = {"matrix": [[0.9, 0.1], [0.7, 0.8]], "average_accuracy": 0.75, "forgetting": 0.2}
            costs = {"params": 100, "trainable_params": 50, "forward_gflops": 1.0, "train_gflops": 3.0}
            write_summary(folder, config, costs, {"continual": continual} if tasks else None)
        return folder

    return make


def _record(round: int, seed: int, method: str, devices: bool) -> RoundRecord:
    entries = []
    for client in range(3):
        numbers: dict[str, Any] = {"samples": 10, "loss": 1 / round}
        if method == "transfl":
            numbers |= {
                "layers": [0, 2],
                "gradients": [3.0, 1.0, 2.0],
                "head_gradients": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            }
        began, ended = (3600.0 * (round - 1), 3600.0 * round) if devices else (None, None)
        late = "too late" if client == 2 and round == 2 else None
        entries.append(ClientRecord(client, 2000, 1000, numbers, round, 20, late, began=began, ended=ended))
    accuracy = Accuracy(0.1 * round + 0.01 * seed, 2.0 / round, 1, 0.05 * round)
    clock = 3600.0 * round if devices else None
    return RoundRecord(round, 1e-3, 1 / round, accuracy, entries, 3000 * round, 6000 * round, virtual_seconds=clock)
