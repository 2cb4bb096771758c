"""A companion is trained beside the weights that train: stacked, captured, and counted as one client alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import ModelConfig
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.stack_inputs import ClientFit, RngContext
from vitfleet.training.step import Fit, FitResult, Objective, Step
from vitfleet.training.step_runner import CudaGraphRunner

SIZES = (20, 11, 36, 3)


@dataclass(frozen=True)
class HalfWay:
    """The companion's loss is that of the mean of both, weighted by a constant; steps are counted."""

    counts: tuple[str, ...] = ("companion_steps",)

    def evaluated_weights(self, companion: Tensors, step: Step) -> Tensors:
        share = step.constants["share"]
        return {name: share * companion[name] + (1 - share) * weight for name, weight in step.weights.items()}

    def companion_gradients(self, gradients: Tensors, companion: Tensors, step: Step) -> tuple[Tensors, Tensors]:
        return gradients, {"companion_steps": torch.ones_like(step.constants["share"])}


@dataclass(frozen=True)
class Copy:
    """The companion is trained by itself."""

    counts: tuple[str, ...] = ()

    def evaluated_weights(self, companion: Tensors, step: Step) -> Tensors:
        return companion

    def companion_gradients(self, gradients: Tensors, companion: Tensors, step: Step) -> tuple[Tensors, Tensors]:
        return gradients, {}


def other_weights(net: Net, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: (tensor + 0.05 * torch.randn(tensor.shape, generator=random)).double()
        for name, tensor in net.initial_weights().items()
    }


def make_group(net: Net, make_shard: MakeShard, round: int = 1) -> list[ClientFit]:
    objective = Objective(net.anatomy.whole, companion=HalfWay())
    return [
        ClientFit(
            Fit(
                other_weights(net, 10 * round + client),
                objective,
                2,
                {"share": torch.tensor(0.2 * client, dtype=torch.float64)},
                companion_weights=other_weights(net, 100 * round + client),
            ),
            make_shard(0, size),
            RngContext(7, round, client),
        )
        for client, size in enumerate(SIZES)
    ]


def assert_same(actual: FitResult, expected: FitResult) -> None:
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], tensor, rtol=1e-5, atol=1e-7)
    for name, tensor in expected.companion_weights.items():
        torch.testing.assert_close(actual.companion_weights[name], tensor, rtol=1e-5, atol=1e-7)
    assert float(actual.observed["companion_steps"]) == actual.steps == expected.steps


@pytest.mark.parametrize("train", [{}, {"optimizer": "sgd", "lr": 0.05}, {"optimizer": "sgd", "clip": 0.1}], ids=str)
def test_stacked_and_captured_as_alone(
    train: dict[str, object],
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, **train)
    mean, std = eager.preprocess.mean.double(), eager.preprocess.std.double()
    eager = replace(eager, preprocess=Preprocess(eager.preprocess.image_size, mean, std))
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    kept: list[tuple[Tensor, Tensor]] = []
    for round in (1, 2):
        group = make_group(tiny_net, make_shard, round)
        alone = [eager.fit(client_fit.fit, client_fit.shard, client_fit.rng) for client_fit in group]
        for trainer in (eager, graphed):
            for result, expected, client_fit in zip(trainer.fit_cohort(group), alone, group, strict=True):
                assert_same(result, expected)
                start = client_fit.fit.companion_weights
                assert start is not None
                assert not torch.equal(result.companion_weights["head.weight"], start["head.weight"])
                kept.append((result.companion_weights["head.weight"], result.companion_weights["head.weight"].clone()))
    assert len(set(map(id, captured))) == 1, "the captured step serves the second group"
    assert all(torch.equal(now, then) for now, then in kept), "a later training does not change a returned companion"


def test_a_companion_by_itself_is_trained_as_the_weights_are(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer, rng, shard = make_trainer(batch_size=8, clip=1.0), RngContext(7, 1, 0), make_shard(0, 20)
    first, second = tiny_net.initial_weights(), {n: t.float() for n, t in other_weights(tiny_net, 1).items()}
    alone = [trainer.fit(Fit(start, Objective(tiny_net.anatomy.whole), 2), shard, rng) for start in (first, second)]
    both = trainer.fit(
        Fit(first, Objective(tiny_net.anatomy.whole, companion=Copy()), 2, companion_weights=second), shard, rng
    )
    assert all(torch.equal(both.weights[name], alone[0].weights[name]) for name in first)
    assert all(torch.equal(both.companion_weights[name], alone[1].weights[name]) for name in first)
    assert torch.equal(both.loss, alone[0].loss)


def test_each_has_its_own_running_statistics(make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    net = build_model(ModelConfig(name="levit_128s", image_size=32), 5, 1, 8, 0)
    buffers = [name for name in net.anatomy.whole if name.endswith("running_mean")]
    assert buffers
    trainer = replace(make_trainer(batch_size=8, optimizer="sgd"), net=net)
    trainer = replace(trainer, preprocess=replace(trainer.preprocess, image_size=net.image_size))
    first, rng, shard = net.initial_weights(), RngContext(7, 1, 0), make_shard(0, 8)
    second = {name: tensor + 0.1 if tensor.is_floating_point() else tensor for name, tensor in first.items()}
    alone = [trainer.fit(Fit(start, Objective(net.anatomy.whole), 1), shard, rng) for start in (first, second)]
    objective = Objective(net.anatomy.whole, companion=Copy())
    both = trainer.fit(Fit(first, objective, 1, companion_weights=second), shard, rng)
    assert all(torch.equal(both.weights[name], alone[0].weights[name]) for name in first)
    assert all(torch.equal(both.companion_weights[name], alone[1].weights[name]) for name in buffers)
