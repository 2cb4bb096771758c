"""What a step keeps, counts, reports, draws and sees of the clock: alone and stacked, eager and captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from clients_alone import (
    check_every_way,
    in_double,
    make_group,
    random_weights,
    stored_to_draw,
    train_alone,
)
from torch import Tensor

from conftest import CLASSES, MakeShard, MakeTrainer
from family_configs import tiny_family
from vitfleet.config.schema import AugmentConfig
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors, add_prefix
from vitfleet.models.net import Net
from vitfleet.randomness import Address
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.random_numbers import normal_numbers
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import Step, StepView
from vitfleet.training.trainer import preprocess_for

PLAIN_SGD: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0, "lr": 0.05}
MOMENTUM = 0.7


def momentum_step(view: StepView, batch: Samples) -> Tensors:
    """Follow a sum of all gradients so far, which the step adds up itself."""
    gradients = view.grad(cross_entropy, batch)
    total = {name: MOMENTUM * view.scratch[name] + gradient for name, gradient in gradients.items()}
    view.keep(total)
    return total


def test_scratch_begins_with_zeros_and_is_passed_from_step_to_step(
    captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """A momentum of the step's own is that of the optimiser: also in captured steps that served another group."""
    whole, weights = tiny_net.parts.whole, random_weights(tiny_net)
    with_momentum = in_double(make_trainer(batch_size=4, momentum=MOMENTUM, **PLAIN_SGD))
    plain = in_double(make_trainer(batch_size=4, momentum=0.0, **PLAIN_SGD))
    for round in (1, 2):
        group = make_group([LocalTraining(start, whole, 2) for start in weights], make_shard, round)
        expected = train_alone(with_momentum, group)
        group = [
            replace(member, training=replace(member.training, step=momentum_step, scratch=member.training.weights))
            for member in group
        ]
        for result, reference in zip(check_every_way(plain, group), expected, strict=True):
            for name, weight in reference.weights.items():
                torch.testing.assert_close(result.weights[name], weight)
    assert len(set(map(id, captured))) == 2, "the captured steps, of stacked clients and of one, serve the second group"


def counting_step(view: StepView, batch: Samples) -> Tensors:
    """Count steps and samples, and remember the last batch and its epoch."""
    size = view.map(lambda weight: (weight > 0).sum(), batch.sample_weight)
    view.count({"steps": view.map(torch.ones_like, size), "samples": size})
    view.keep({"size": size, "epoch": view.map(lambda size, epoch: epoch + 0 * size, size, view.epoch)})
    return view.grad(cross_entropy, batch)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_a_client_without_a_step_keeps_what_it_has(
    batch_size: int, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    kept = {"steps": torch.tensor(5), "samples": torch.tensor(0.5), "size": torch.tensor(-1), "epoch": torch.tensor(-1)}
    training = LocalTraining({}, tiny_net.parts.head, 2, counting_step, kept=kept)
    trainings = [replace(training, weights=weights) for weights in random_weights(tiny_net)]
    trainer = make_trainer(batch_size=batch_size, **PLAIN_SGD)
    for result in check_every_way(trainer, make_group(trainings, make_shard)):
        assert result.kept["steps"] == 5 + result.steps
        assert result.kept["samples"] == 0.5 + 2 * result.samples
        assert result.kept["size"] == (result.samples - 1) % batch_size + 1
        assert result.kept["epoch"] == 1
        assert {name: tensor.dtype for name, tensor in result.kept.items()} == {n: t.dtype for n, t in kept.items()}
    assert [float(tensor) for tensor in kept.values()] == [5, 0.5, -1, -1], "the initial values are not changed"


@dataclass(frozen=True)
class OfKinds:
    """Counts the steps of each of three kinds; every third one of an epoch trains nothing."""

    def kind(self, index: int) -> str:
        return ("first", "second", "third")[index % 3]

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        assert isinstance(view.kind, str)
        view.count({view.kind: view.map(lambda weight: torch.ones_like(weight.sum()), batch.sample_weight)})
        return {} if view.kind == "third" else view.grad(cross_entropy, batch)


def test_kinds_of_steps_are_numbered_within_the_epoch_and_captured_once_each(
    captured: list[CudaGraphRunner], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    kept = {kind: torch.zeros(()) for kind in ("first", "second", "third")}
    trainings = [
        LocalTraining(weights, tiny_net.parts.whole, 3, OfKinds(), kept=kept) for weights in random_weights(tiny_net)
    ]
    for result in check_every_way(make_trainer(batch_size=4, **PLAIN_SGD), make_group(trainings, make_shard)):
        per_epoch = result.steps // 3
        expected = [3 * len(range(first, per_epoch, 3)) for first in range(3)]
        assert [int(result.kept[kind]) for kind in kept] == expected
    for runner in set(captured):
        assert captured.count(runner) == len(runner.graphs)
        assert len({(kind.kind, kind.num_clients) for kind in runner.graphs}) == len(runner.graphs)


def silent_step(view: StepView, batch: Samples) -> Tensors:
    return {name: torch.zeros_like(weight) for name, weight in view.weights.items()}


def step_of_other_samples(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, view.drawn("replay"))


def batch_after_other_samples(view: StepView, batch: Samples) -> Tensors:
    view.grad(cross_entropy, view.drawn("replay"))
    gradients = view.grad(cross_entropy, batch)
    view.grad(lambda outputs: 100 * cross_entropy(outputs), batch)
    return gradients


def step_that_reports_a_mean(view: StepView, batch: Samples) -> Tensors:
    computed = view.value_and_grad(cross_entropy, batch)
    view.report_mean(3 * computed.losses)
    return computed.gradients


def step_that_reports_a_sum(view: StepView, batch: Samples) -> Tensors:
    computed = view.value_and_grad(cross_entropy, batch)
    size = view.map(lambda weight: (weight > 0).sum(), batch.sample_weight)
    view.report(2 * computed.losses * size)
    return computed.gradients


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (silent_step, 0),
        (step_of_other_samples, 0),
        (batch_after_other_samples, 1),
        (step_that_reports_a_mean, 3),
        (step_that_reports_a_sum, 2),
    ],
)
def test_reported_loss_is_the_first_of_the_batch_unless_the_step_says_otherwise(
    step: Step,
    factor: float,
    captured: list[object],
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    """At a rate of nearly 0, the loss is that of the weights at the start, over all samples."""
    trainer = make_trainer(batch_size=8, optimizer="sgd", weight_decay=0.0, lr=1e-12)
    weights = random_weights(tiny_net)
    trainings = [
        LocalTraining(start, tiny_net.parts.whole, 2, step, sets={"replay": stored_to_draw(tiny_images, client)})
        for client, start in enumerate(weights)
    ]
    plain = make_group([LocalTraining(start, tiny_net.parts.whole, 2) for start in weights], make_shard)
    expected = train_alone(in_double(trainer), plain)
    for result, reference in zip(check_every_way(trainer, make_group(trainings, make_shard)), expected, strict=True):
        torch.testing.assert_close(result.loss, factor * reference.loss, rtol=1e-5, atol=1e-9)


def step_that_reports_one(view: StepView, batch: Samples) -> Tensors:
    """What is reported need not be 0 for a batch of padding."""
    view.report(view.map(lambda weight: torch.ones_like(weight.sum()), batch.sample_weight))
    return {}


def test_only_the_steps_that_a_client_has_are_reported(
    captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainings = [
        LocalTraining(weights, tiny_net.parts.head, 2, step_that_reports_one) for weights in random_weights(tiny_net)
    ]
    for result in check_every_way(make_trainer(batch_size=8), make_group(trainings, make_shard)):
        assert float(result.loss) == pytest.approx(result.steps / (2 * result.samples))


# Random numbers and drawn samples


def keep_noise(view: StepView, batch: Samples) -> Tensors:
    """Add up the numbers of all steps, and of two names the last ones."""
    noise = view.normal("noise", view.weights)
    again = view.normal("noise", view.weights)
    other = view.normal("other noise", view.weights)
    view.count({name: noise[name] for name in view.weights})
    view.keep({**add_prefix("again.", again), **add_prefix("other.", other)})
    return {}


def test_random_numbers_of_a_step_are_those_of_its_address(
    captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Each step has numbers of its own, which do not depend on who trains together; two names have different ones."""
    head = tiny_net.parts.head
    shapes = {name: tiny_net.parts.shapes[name] for name in head}
    zeros = {prefix + name: torch.zeros(shape) for prefix in ("", "again.", "other.") for name, shape in shapes.items()}
    trainings = [
        LocalTraining(weights, head, 2, keep_noise, kept=zeros, random=("noise", "other noise"))
        for weights in random_weights(tiny_net)
    ]
    trainer = make_trainer(batch_size=8)
    group = make_group(trainings, make_shard)
    for client, (member, result) in enumerate(zip(group, check_every_way(trainer, group), strict=True)):
        total = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for epoch in range(2):
            steps = -(-len(member) // 8)
            keys = {
                name: Address(7, name, 3, client, epoch).generator().integers(2**63 - 1, size=len(member))
                for name in ("noise", "other noise")
            }
            for step in range(steps):
                drawn = normal_numbers(torch.tensor(keys["noise"][step]), shapes)
                total = {name: total[name] + drawn[name] for name in shapes}
        other = normal_numbers(torch.tensor(keys["other noise"][steps - 1]), shapes)
        for name in shapes:
            torch.testing.assert_close(result.kept[name], total[name])
            torch.testing.assert_close(result.kept[f"again.{name}"], drawn[name])
            torch.testing.assert_close(result.kept[f"other.{name}"], other[name])
            assert not torch.equal(other[name], drawn[name])


def keep_noise_of_constants(view: StepView, batch: Samples) -> Tensors:
    view.keep(view.normal("noise", view.constants))
    return {}


@pytest.mark.parametrize("shared", [True, False])
def test_random_numbers_have_the_shapes_of_one_client(
    shared: bool, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    common = torch.zeros(3, 4)
    trainings = [
        LocalTraining(
            weights,
            tiny_net.parts.head,
            1,
            keep_noise_of_constants,
            constants={"rows": common if shared else common.clone()},
            kept={"rows": torch.zeros(3, 4)},
            random=("noise",),
        )
        for weights in random_weights(tiny_net)
    ]
    for result in check_every_way(make_trainer(batch_size=8), make_group(trainings, make_shard)):
        assert len(set(result.kept["rows"].flatten().tolist())) == 12


def keep_tasks(view: StepView, batch: Samples) -> Tensors:
    """The task of each class is the same for all clients; so is the epoch."""
    assert view.class_to_task is not None
    view.keep({"task": view.map(sum_of_tasks, view.class_to_task, batch.labels, batch.sample_weight, view.epoch)})
    return {}


def sum_of_tasks(tasks: Tensor, labels: Tensor, weight: Tensor, epoch: Tensor) -> Tensor:
    return (tasks[labels] * (weight > 0)).sum() + 100 * epoch


def test_the_task_of_each_class_is_seen(
    captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    tasks = torch.tensor([0, 0, 1, 1, 2])
    trainer = replace(make_trainer(batch_size=64), class_to_task=tasks)
    kept = {"task": torch.zeros((), dtype=torch.long)}
    trainings = [
        LocalTraining(weights, tiny_net.parts.head, 2, keep_tasks, kept=kept) for weights in random_weights(tiny_net)
    ]
    group = make_group(trainings, make_shard)
    for member, result in zip(group, check_every_way(trainer, group), strict=True):
        assert int(result.kept["task"]) == int(tasks[member.shard.labels].sum()) + 100


def keep_drawn(view: StepView, batch: Samples) -> Tensors:
    drawn = view.drawn("replay")
    parts = {"positions": drawn.positions, "labels": drawn.labels, "logits": drawn.stored["logits"]}
    weights = view.map(lambda weight: weight.sum(), drawn.sample_weight)
    view.keep({**view.map(first_rows, parts), "weights": weights})
    return {}


def first_rows(parts: Tensors) -> Tensors:
    """Every client has a sample in each of its steps, so the first four are drawn for it."""
    return {name: tensor[:4] for name, tensor in parts.items()}


def test_drawn_samples_are_those_of_their_address(
    captured: list[object], tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    kept = {
        "positions": torch.zeros(4, dtype=torch.long),
        "labels": torch.zeros(4, dtype=torch.long),
        "logits": torch.zeros(4, CLASSES),
        "weights": torch.zeros(()),
    }
    stored = [stored_to_draw(tiny_images, client) for client in range(4)]
    trainings = [
        LocalTraining(weights, tiny_net.parts.head, 2, keep_drawn, kept=kept, sets={"replay": own})
        for weights, own in zip(random_weights(tiny_net), stored, strict=True)
    ]
    group = make_group(trainings, make_shard)
    results = check_every_way(make_trainer(AugmentConfig(flip=True), batch_size=8), group)
    for client, (member, own, result) in enumerate(zip(group, stored, results, strict=True)):
        draws = Address(7, "replay", 3, client, 1).generator().integers(own.sizes[0], size=(len(member), 4))
        first = draws[(len(member) - 1) // 8 * 8]  # of the last batch
        assert result.kept["positions"].tolist() == first.tolist()
        assert torch.equal(result.kept["labels"], own.labels[0, first])
        assert torch.equal(result.kept["logits"], own.stored["logits"][0, first])
        assert float(result.kept["weights"]) == pytest.approx(1)


# Running statistics


def two_passes(view: StepView, batch: Samples) -> Tensors:
    """Take the gradient of the batch twice, and pass it forward and at other weights."""
    gradients = view.grad(cross_entropy, batch)
    view.grad(cross_entropy, batch)
    view.forward(batch)
    view.grad(cross_entropy, batch, at={name: view.map(torch.mul, leaf, 0.5) for name, leaf in view.weights.items()})
    view.per_sample_grad(cross_entropy, batch)
    return gradients


def one_pass(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch)


@pytest.mark.parametrize("family", ["cvt", "levit"])
def test_the_first_pass_of_the_batch_at_the_own_weights_updates_running_statistics(
    family: str, captured: list[object], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    net = tiny_family(family, CLASSES)
    net.module.double()
    trainer = make_trainer(batch_size=8, **PLAIN_SGD)
    trainer = in_double(replace(trainer, net=net, preprocess=preprocess_for(net, torch.device("cpu"))))
    weights = {name: tensor.double() for name, tensor in net.initial_weights().items()}
    buffers = [name for name in net.parts.whole if name.endswith("running_mean")]
    assert buffers
    once, twice = (
        check_every_way(trainer, make_group([LocalTraining(weights, net.parts.whole, 1, step)] * 2, make_shard))
        for step in (one_pass, two_passes)
    )
    for result, expected in zip(twice, once, strict=True):
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(result.weights[name], tensor)
        assert all(not torch.equal(result.weights[name], weights[name]) for name in buffers)
