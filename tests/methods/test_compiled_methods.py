"""Every method gives the same results with a compiled model, and compiles it a bounded number of times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitfleet.config import load_config
from vitfleet.config.registry import METHODS
from vitfleet.message import Tensors
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

# A block is compiled once for each combination of what trains and what clients share, and once more for one client.
MOST_COMPILATIONS = 24
KEYS = (
    *("data.tasks.count=3", "data.tasks.classes=2", "data.tasks.per_client=[2,2]", "data.tasks.rounds_per_task=1"),
    *("data.tasks.share=[0.2,0.4]", "data.limit=300", "model.dim=16", "model.depth=3", "model.heads=2"),
    *("fleet.clients=3", "fleet.per_round=3", "train.epochs=2", "train.batch_size=8", "machine.device=cpu"),
    *("machine.precision=fp32", "machine.workers=1", "machine.stack_size=3", "train.optimizer=sgd", "train.lr=0.01"),
)
WITHOUT_TASKS = {"eftvit", "fedbfpt", "closed-form", "analytic"}  # they need a model and rounds of their own
IN_CI = {"fedper"}


def final_weights(folder: Path, *overrides: str) -> Tensors:
    context = open_run(load_config("fedvit-digits", [*KEYS, *overrides]), folder)
    return dict(run_rounds(context).state.server.tensors)


METHOD_NAMES = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.long)
    for name in METHODS.names()
    if name not in WITHOUT_TASKS
]


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_compiled_training_has_the_same_results(name: str, compilations: list[int], tmp_path: Path) -> None:
    plain = final_weights(tmp_path / "plain", f"method.name={name}")
    assert not compilations
    compiled = final_weights(tmp_path / "compiled", f"method.name={name}", "machine.compile=true")
    assert 0 < len(compilations) <= MOST_COMPILATIONS
    assert compiled.keys() == plain.keys()
    for key, tensor in plain.items():
        assert torch.allclose(compiled[key], tensor, rtol=1e-4, atol=1e-5), key
