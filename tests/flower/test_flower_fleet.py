"""A fleet behind Flower's grid against the same fleet in one process: bit for bit, whatever the method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from loopback import ClientUpdate, Devices, deal

from conftest import MakeConfig
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.flower.fleet import fleet_factory
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "fedbfpt": ("method.local_layers=2",),
    "transfl": ("method.k=1",),
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5"),
    "fed-prompt": ("method.prompts=2",),
    "fedrep": ("train.epochs=2",),
    "fedvit": ("train.epochs=2", "method.head_epochs=1"),
}
TASKS = ("data.tasks.count=3", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=2")
TASK_AFTER_TASK = {"gem", "a-gem", "fedvit"}  # what they do has no meaning without tasks


def flower(config: Config) -> Config:
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})


def play(config: Config, folder: Path, answer: ClientUpdate | None = None) -> RunState:
    """Play a run on devices in this process; their images and states lie beside the run's folder."""
    devices = Devices(config, folder.parent / "data", folder.parent / "state")
    context = open_run(config, folder, make_fleet=fleet_factory(devices.grid(answer)))
    return run_rounds(context).state


def same(state: RunState, other: RunState) -> bool:
    mine, others = state.server, other.server
    return (
        mine.tensors.keys() == others.tensors.keys()
        and all(torch.equal(mine.tensors[name], others.tensors[name]) for name in mine.tensors)
        and mine.numbers == others.numbers
        and list(mine.parts) == list(others.parts)
        and all(
            torch.equal(one, others.parts[part].tensors[name])
            for part in mine.parts
            for name, one in mine.parts[part].tensors.items()
        )
    )


@pytest.mark.parametrize("name", sorted(METHODS.names()))
def test_the_same_bits_as_in_one_process(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    tasks = (*TASKS, "rounds=6") if name in TASK_AFTER_TASK else ()
    equal_to_one_process(
        tiny_config(
            f"method.name={name}", *OVERRIDES.get(name, ()), *tasks, "eval.clients=0", "data.augment.flip=true"
        ),
        tmp_path,
    )


@pytest.mark.parametrize("name", ["fedavg", "fedper", "standalone"])
@pytest.mark.parametrize("incremental", ["task", "class"])
def test_any_method_learns_tasks_on_devices(
    name: str, incremental: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    equal_to_one_process(
        tiny_config(
            f"method.name={name}", *TASKS, "data.tasks.count=2", "rounds=4", f"data.tasks.incremental={incremental}"
        ),
        tmp_path,
    )


def equal_to_one_process(config: Config, tmp_path: Path) -> None:
    deal(config, tmp_path / "data")
    inline = run_rounds(open_run(config, tmp_path / "inline")).state
    assert same(inline, play(flower(config), tmp_path / "flower"))
    lines = [(tmp_path / where / "records.jsonl").read_bytes() for where in ("inline", "flower")]
    assert lines[0] == lines[1]
    assert b'"failure":null' in lines[0]
    assert b'"failure":"' not in lines[0]
