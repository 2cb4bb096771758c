"""The execution path that trainings took is recorded as it was, not as it was configured."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from conftest import NO_IMAGES, MakeShard, MakeTrainer
from family_configs import tiny_family
from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.errors import UserError
from vitfleet.models.net import Net
from vitfleet.training.capture.path import ExecutionSummary
from vitfleet.training.capture.runner import CaptureSpace, CudaGraphRunner
from vitfleet.training.driver import group_trainings
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.trainer import Trainer, preprocess_for


def train(trainer: Trainer, net: Net, make_shard: MakeShard, clients: int) -> None:
    training = LocalTraining(net.initial_weights(), net.parts.head, 1)
    trainer.train_together(
        [ClientTraining(training, make_shard(0, 20), RngContext(7, 1, client)) for client in range(clients)]
    )


def test_execution_summary_of_eager_training(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    trainer = make_trainer(batch_size=8)
    assert trainer.execution_summary() == ExecutionSummary()
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.head, 1)
    trainer.train(training, NO_IMAGES, RngContext(7, 1, 0))
    assert trainer.execution_summary() == ExecutionSummary(), "a client without samples takes no step"
    for clients in (1, 3, 2):
        train(trainer, tiny_net, make_shard, clients)
    assert trainer.execution_summary() == ExecutionSummary("eager", largest_stack=3, stacking="tensor operations")
    assert str(trainer.execution_summary()) == "eager, stacked 3 clients"


def test_execution_summary_of_compiled_training(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    trainer = make_trainer(batch_size=8)
    trainer = replace(trainer, machine=replace(trainer.machine, compile=True))
    train(trainer, tiny_net, make_shard, 1)
    assert trainer.execution_summary() == ExecutionSummary("eager", compiled=True, largest_stack=1)


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
        "largest_stack": 2,
        "captured_steps": len(captured),
        "stacking": "tensor operations",
        "repeated_clients": 0,
    }
    assert len(captured) == 2
    assert str(graphed.execution_summary()) == "cuda graph, stacked 2 clients, captured 2 steps"
    train(eager, tiny_net, make_shard, 1)
    assert eager.execution_summary().clients == "mixed", "both trainers share the cache"


def test_execution_summary_of_a_module_that_is_stacked() -> None:
    trainer, group = family_group("swin")
    trainer.train_together(group)
    summary = trainer.execution_summary()
    assert summary == ExecutionSummary("eager", largest_stack=2, stacking="vmap")
    assert str(summary) == "eager, stacked 2 clients with vmap"


def test_a_module_that_cannot_be_stacked_is_captured_one_client_at_a_time(
    captured: list[CudaGraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, group = family_group("swin")
    monkeypatch.setitem(trainer.net.__dict__, "stacking", "none")
    trainer = replace(trainer, machine=replace(trainer.machine, graphs=True))
    groups = list(group_trainings(list(enumerate(group)), trainer))
    assert [len(part) for part in groups] == [1, 1]
    for part in groups:
        trainer.train_together([member for _, member in part])
    assert captured
    assert trainer.execution_summary().clients == "cuda graph"
    assert trainer.execution_summary().stacking == "none"


@pytest.mark.parametrize(
    "family",
    ["cvt", "t2t", *(pytest.param(name, marks=pytest.mark.long) for name in ("cait", "levit", "pvt", "pit", "swin"))],
)
def test_captured_steps_of_a_family_are_its_eager_steps(family: str, captured: list[CudaGraphRunner]) -> None:
    trainer, group = family_group(family)
    graphed = replace(trainer, machine=replace(trainer.machine, graphs=True))
    for _ in range(2):  # the second time the captured step is reused
        results, expected = graphed.train_together(group), trainer.train_together(group)
        for result, eager in zip(results, expected, strict=True):
            for name, tensor in result.weights.items():
                torch.testing.assert_close(tensor, eager.weights[name], rtol=1e-5, atol=1e-7, msg=name)
    assert len(captured) == 1


def test_a_step_that_cannot_be_captured_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, group = family_group("vit")
    graphed = replace(trainer, machine=replace(trainer.machine, graphs=True))

    def capture(*arguments: object, **options: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CudaGraphRunner, "_warm_up", CudaGraphRunner._step)
    monkeypatch.setattr(CaptureSpace, "create", lambda: CaptureSpace(object(), object()))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    with pytest.raises(UserError, match=r"machine\.graphs = true: a step of this model cannot be captured; set it to"):
        graphed.train_together(group)


def family_group(family: str) -> tuple[Trainer, list[ClientTraining]]:
    """Return a trainer in double precision and two unequal clients of a family."""
    net, cpu = tiny_family(family), torch.device("cpu")
    net.module.double()
    preprocess = preprocess_for(net, cpu)
    exact = Preprocess(preprocess.image_size, preprocess.mean.double(), preprocess.std.double())
    config = TrainConfig(batch_size=4, optimizer="sgd", lr=0.05)
    trainer = Trainer(net, exact, config, AugmentConfig(), 1, ExecutionSettings(cpu, False))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (9, 1, net.image_size, net.image_size), generator=generator, dtype=torch.uint8)
    images = ImageSet(pixels, torch.arange(9) % 4)
    weights = {name: tensor.double() for name, tensor in net.initial_weights().items()}
    training = LocalTraining(weights, net.parts.whole, 1)
    ends = (9, 3)
    return trainer, [
        ClientTraining(training, Shard(images, torch.arange(end)), RngContext(7, 1, client))
        for client, end in enumerate(ends)
    ]
