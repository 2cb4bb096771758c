"""Joint training: a client trains on exactly its images of all tasks so far."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from conftest import MakeConfig
from vitfleet.data.tasks import TaskStreams
from vitfleet.fleet.simulation import SimulatedFleet
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run

TASKS = ("data.tasks.count=3", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=2")


def test_shard_is_the_union_of_the_tasks_so_far(tiny_config: MakeConfig, tmp_path: Path) -> None:
    joint, alone = (
        open_run(tiny_config(f"method.name={name}", *TASKS, "rounds=6"), tmp_path / name)
        for name in ("joint", "fedper")
    )
    assert isinstance(joint.fleet, SimulatedFleet)
    assert isinstance(alone.fleet, SimulatedFleet)
    for client in range(6):
        for task_index in range(3):
            parts = [alone.fleet.shard(client, index).index for index in range(task_index + 1)]
            found = joint.fleet.shard(client, task_index).index
            assert torch.equal(found, torch.cat(parts))
            assert len(set(found.tolist())) == len(found)
            labels = joint.labels(client, 2 * task_index + 1)
            assert np.array_equal(labels, joint.data.train.labels[found].numpy())


def test_samples_and_operations_grow_with_the_tasks(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(tiny_config("method.name=joint", *TASKS, "rounds=6", "fleet.per_round=6"), tmp_path)
    run_rounds(context)
    assert isinstance(context.partition, TaskStreams)
    sizes = context.partition.train.sizes().reshape(6, 3).cumsum(axis=1)
    for record in read_records(tmp_path):
        task_index = (record.round - 1) // 2
        for entry in record.clients:
            assert entry.numbers["samples"] == sizes[entry.client, task_index]
            labels = context.labels(entry.client, record.round)
            flops = context.cost_model.round_flops(context.cost_model.dry_run(1, 0, labels), len(labels))
            assert entry.gflops == flops / 1e9
