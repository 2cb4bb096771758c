"""The execution path that trainings took is recorded as it was, not as it was configured."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from conftest import NO_IMAGES, MakeShard, MakeTrainer
from vitfleet.models.net import Net
from vitfleet.training.cohort_inputs import ClientFit, RngContext
from vitfleet.training.execution import ExecutionSummary
from vitfleet.training.objective import Fit, Objective
from vitfleet.training.step_runner import CudaGraphRunner
from vitfleet.training.trainer import Trainer


def train(trainer: Trainer, net: Net, make_shard: MakeShard, clients: int) -> None:
    fit = Fit(net.initial_weights(), Objective(net.anatomy.head), 1)
    trainer.fit_cohort([ClientFit(fit, make_shard(0, 20), RngContext(7, 1, client)) for client in range(clients)])


def test_execution_summary_of_eager_training(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    trainer = make_trainer(batch_size=8)
    assert trainer.execution_summary() == ExecutionSummary()
    fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.head), 1)
    trainer.fit(fit, NO_IMAGES, RngContext(7, 1, 0))
    assert trainer.execution_summary() == ExecutionSummary(), "a client without samples takes no step"
    for clients in (1, 3, 2):
        train(trainer, tiny_net, make_shard, clients)
    assert trainer.execution_summary() == ExecutionSummary("eager", largest_cohort=3)
    assert str(trainer.execution_summary()) == "eager, stacked 3 clients"


def test_execution_summary_of_compiled_training(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    trainer = make_trainer(batch_size=8)
    trainer = replace(trainer, machine=replace(trainer.machine, compile=True))
    train(trainer, tiny_net, make_shard, 1)
    assert trainer.execution_summary() == ExecutionSummary("eager", compiled=True, largest_cohort=1)


def test_execution_summary_of_captured_training(
    tiny_net: Net, captured: list[CudaGraphRunner], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    eager = make_trainer(batch_size=8)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    for clients in (2, 2, 1):
        train(graphed, tiny_net, make_shard, clients)
    assert asdict(graphed.execution_summary()) == {
        "clients": "cuda graph",
        "server": "none",
        "compiled": False,
        "kernels": False,
        "largest_cohort": 2,
        "captured_steps": len(captured),
    }
    assert len(captured) == 2
    assert str(graphed.execution_summary()) == "cuda graph, stacked 2 clients, captured 2 steps"
    train(eager, tiny_net, make_shard, 1)
    assert eager.execution_summary().clients == "mixed", "both trainers share the cache"
