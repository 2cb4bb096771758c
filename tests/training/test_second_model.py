"""A second model trains beside the client's own, under names with a prefix: each as by itself, stacked and captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from clients_alone import assert_close, check_every_way, in_double, make_group, with_machine
from torch import Tensor

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import ModelConfig
from vitfleet.message import Tensors, add_prefix, with_prefix
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.models.zoo import build_model
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import Step, StepView

BESIDE = "beside/"


def half_way_step(view: StepView, batch: Samples) -> Tensors:
    """The second model's loss is that of a mean of both, weighted by a constant; steps are counted."""
    second = with_prefix(view.all_weights, BESIDE)
    own = {name: weight for name, weight in view.weights.items() if not name.startswith(BESIDE)}
    mixed = view.map(mix, own, second, view.constants["share"])
    view.count({"steps": view.map(torch.ones_like, view.constants["share"])})
    of_second = view.grad(cross_entropy, batch, at=mixed)
    return {**view.grad(cross_entropy, batch), **add_prefix(BESIDE, of_second)}


def mix(own: Tensors, second: Tensors, share: Tensor) -> Tensors:
    return {name: share * second[name] + (1 - share) * weight for name, weight in own.items()}


def both_step(view: StepView, batch: Samples) -> Tensors:
    """The second model is trained by itself."""
    of_own = view.grad(cross_entropy, batch)
    of_second = view.grad(cross_entropy, batch, at=with_prefix(view.all_weights, BESIDE))
    return {**of_own, **add_prefix(BESIDE, of_second)}


def other_weights(net: Net, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: (tensor + 0.05 * torch.randn(tensor.shape, generator=random)).double()
        for name, tensor in net.initial_weights().items()
    }


def two_models(net: Net, first: Tensors, second: Tensors, epochs: int, step: Step, **keys: Any) -> LocalTraining:
    names = Selection((*net.parts.whole, *add_prefix(BESIDE, second)))
    return LocalTraining({**first, **add_prefix(BESIDE, second)}, names, epochs, step, **keys)


def group_of(net: Net, make_shard: MakeShard, round: int) -> list[ClientTraining]:
    trainings = [
        two_models(
            net,
            other_weights(net, 10 * round + client),
            other_weights(net, 100 * round + client),
            2,
            half_way_step,
            constants={"share": torch.tensor(0.2 * client, dtype=torch.float64)},
            kept={"steps": torch.zeros(())},
        )
        for client in range(4)
    ]
    return make_group(trainings, make_shard, round)


@pytest.mark.parametrize(
    "train", [{}, {"optimizer": "sgd", "lr": 0.05}, {"optimizer": "sgd", "max_grad_norm": 0.1}], ids=str
)
def test_stacked_and_captured_as_alone(
    train: dict[str, object], tiny_net: Net, captured: list[object], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = in_double(make_trainer(batch_size=8, **train))
    for round in (1, 2):
        group = group_of(tiny_net, make_shard, round)
        for member, result in zip(group, check_every_way(trainer, group), strict=True):
            name = f"{BESIDE}head.weight"
            assert not torch.equal(result.weights[name], member.training.weights[name])
            assert float(result.kept["steps"]) == result.steps
    assert len(set(map(id, captured))) == 2, "the captured steps, of stacked clients and of one, serve the second group"


def test_a_later_training_does_not_change_a_returned_second_model(
    tiny_net: Net, captured: list[object], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = with_machine(in_double(make_trainer(batch_size=8)), graphs=True)
    returned = trainer.train_together(group_of(tiny_net, make_shard, 1))
    before = [{name: tensor.clone() for name, tensor in result.weights.items()} for result in returned]
    trainer.train_together(group_of(tiny_net, make_shard, 2))
    assert captured
    for result, then in zip(returned, before, strict=True):
        assert all(torch.equal(result.weights[name], tensor) for name, tensor in then.items())


@pytest.mark.parametrize("clip", [None, 1.0, 0.01])
def test_each_is_trained_and_clipped_as_by_itself(
    clip: float | None, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """The norm that ``train.max_grad_norm`` limits is that of one model's gradient, not of both."""
    trainer, rng, shard = make_trainer(batch_size=8, max_grad_norm=clip), RngContext(7, 1, 0), make_shard(0, 20)
    first, second = tiny_net.initial_weights(), {n: t.float() for n, t in other_weights(tiny_net, 1).items()}
    alone = [trainer.train(LocalTraining(start, tiny_net.parts.whole, 2), shard, rng) for start in (first, second)]
    both = trainer.train(two_models(tiny_net, first, second, 2, both_step), shard, rng)
    assert all(torch.equal(both.weights[name], alone[0].weights[name]) for name in first)
    assert all(torch.equal(both.weights[BESIDE + name], alone[1].weights[name]) for name in second)
    assert torch.equal(both.loss, alone[0].loss), "the loss of the client's own model is reported"


def test_each_client_clips_each_of_its_models(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    """One step of SGD moves each model of each client by the rate times the largest norm, however long the other is."""
    plain = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "lr": 0.1, "schedule": "constant"}
    trainer = in_double(make_trainer(**plain, batch_size=64, max_grad_norm=1e-2))
    group = make_group(
        [
            two_models(tiny_net, other_weights(tiny_net, client), other_weights(tiny_net, 9 + client), 1, both_step)
            for client in range(3)
        ],
        make_shard,
    )
    for member, result in zip(group, trainer.train_together(group), strict=True):
        start = member.training.weights
        moved = {name: tensor - start[name] for name, tensor in result.weights.items()}
        for names in ([name for name in moved if "/" not in name], [name for name in moved if "/" in name]):
            length = torch.stack([moved[name].norm() for name in names]).norm()
            assert float(length) == pytest.approx(0.1 * 1e-2, rel=1e-3)


def test_each_has_its_own_running_statistics(make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    net = build_model(ModelConfig(name="levit_128s", image_size=32), 5, 1, 8, 0)
    buffers = [name for name in net.parts.whole if name.endswith("running_mean")]
    assert buffers
    trainer = replace(make_trainer(batch_size=8, optimizer="sgd"), net=net)
    trainer = replace(trainer, preprocess=replace(trainer.preprocess, image_size=net.image_size))
    first, rng, shard = net.initial_weights(), RngContext(7, 1, 0), make_shard(0, 8)
    second = {name: tensor + 0.1 if tensor.is_floating_point() else tensor for name, tensor in first.items()}
    trainings = [LocalTraining(start, net.parts.whole, 1, score_samples=True) for start in (first, second)]
    alone = [trainer.train(training, shard, rng) for training in trainings]
    both = trainer.train(two_models(net, first, second, 1, both_step, score_samples=True), shard, rng)
    assert all(torch.equal(both.weights[name], alone[0].weights[name]) for name in first)
    assert all(torch.equal(both.weights[BESIDE + name], alone[1].weights[name]) for name in buffers)
    assert_close(with_prefix(both.weights, BESIDE), alone[1].weights)
    assert torch.equal(both.sample_losses, alone[0].sample_losses), "samples are scored by the client's own model"


def keep_sums_over_samples(view: StepView, batch: Samples) -> Tensors:
    """Keep the sums of the samples' gradients: of the client's own model, and of the one beside it."""
    of_own = view.per_sample_grad(cross_entropy, batch)
    of_second = view.per_sample_grad(cross_entropy, batch, at=with_prefix(view.all_weights, BESIDE))
    view.keep(view.map(sum_samples, {**of_own, **add_prefix(BESIDE, of_second)}))
    return {}


def sum_samples(rows: Tensors) -> Tensors:
    return {name: row.sum(0) for name, row in rows.items()}


def test_gradients_of_single_samples_are_those_of_one_model(
    tiny_net: Net, captured: list[object], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer, shapes = in_double(make_trainer(batch_size=8)), tiny_net.parts.shapes
    models = [(other_weights(tiny_net, client), other_weights(tiny_net, 9 + client)) for client in range(3)]

    def zeros(prefixes: tuple[str, ...]) -> dict[str, Tensor]:
        names = [prefix + name for prefix in prefixes for name in shapes]
        return {name: torch.zeros(shapes[name.removeprefix(BESIDE)], dtype=torch.float64) for name in names}

    trainings = [
        two_models(tiny_net, first, second, 1, keep_sums_over_samples, kept=zeros(("", BESIDE)))
        for first, second in models
    ]
    together = check_every_way(trainer, make_group(trainings, make_shard))
    for place, prefix in enumerate(("", BESIDE)):
        alone = [
            LocalTraining(pair[place], tiny_net.parts.whole, 1, keep_sums_of_one, kept=zeros(("",))) for pair in models
        ]
        for result, both in zip(trainer.train_together(make_group(alone, make_shard)), together, strict=True):
            assert_close({name: both.kept[prefix + name] for name in shapes}, result.kept)


def keep_sums_of_one(view: StepView, batch: Samples) -> Tensors:
    view.keep(view.map(sum_samples, view.per_sample_grad(cross_entropy, batch)))
    return {}
