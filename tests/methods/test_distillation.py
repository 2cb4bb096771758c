"""FedKNOW's distilled gradients of teachers: by hand with autograd, stacked, captured, with running statistics."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from conftest import CLASSES, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.methods.continual.gradients.fedknow import TEACHERS, DistilledGradients, distillation_losses
from vitfleet.methods.continual.gradients.projection import zero_counts
from vitfleet.methods.continual.gradients.restorer import IntegratedStep, Restorer
from vitfleet.methods.continual.sparse_weights import expand_weights
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView

TASKS = torch.tensor([0, 0, 1, 1, 1])
LABELS = (0, 3, 1)  # a class of each teacher's task
TEMPERATURE = 2.0
SGD: dict[str, object] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "schedule": "constant"}


@dataclass(frozen=True)
class SummedReferences:
    """Applies the sum of the present teachers' gradients instead of the batch's, and counts them."""

    distilled: DistilledGradients

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        view.grad(cross_entropy, batch)
        references = self.distilled(view, batch, None)
        view.count({"references": view.map(lambda present: present.sum(), references.present)})
        summed: Tensors = view.map(sum_present, references.gradients, references.present)
        return summed


def sum_present(rows: Tensors, present: Tensor) -> Tensors:
    return {name: (tensor * present.view(-1, *(1,) * (tensor.dim() - 1))).sum(0) for name, tensor in rows.items()}


def distilled_of(net: Net, dtype: torch.dtype | None = None) -> DistilledGradients:
    shapes = {name: net.parts.shapes[name] for name in net.parts.trainable(net.parts.whole)}
    return DistilledGradients(tuple(shapes.items()), TEMPERATURE, dtype)


def make_teachers(net: Net, seed: int, absent: int | None = None, count: int = len(LABELS)) -> dict[str, Tensor]:
    """Return teachers that keep a third of random weights, as the constants of a training."""
    random = torch.Generator().manual_seed(seed)
    total = net.parts.count_parameters(net.parts.whole)
    indices = torch.stack([torch.randperm(total, generator=random)[: total // 3] for _ in range(count)])
    present = torch.tensor([index != absent for index in range(count)])
    values = torch.randn(count, total // 3, generator=random) * 0.3 * present[:, None]
    labels = torch.tensor([LABELS[index % len(LABELS)] for index in range(count)])
    tensors = {"values": values, "indices": indices.int(), "label": labels, "present": present}
    return {TEACHERS + name: tensor for name, tensor in tensors.items()}


def in_double(teachers: Tensors) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in teachers.items()}


def dense(net: Net, teachers: Tensors, index: int) -> dict[str, Tensor]:
    """Return a teacher's weights, number by number."""
    names = list(net.parts.trainable(net.parts.whole))
    vector = torch.zeros(sum(net.parts.shapes[name].numel() for name in names))
    values, indices = teachers[f"{TEACHERS}values"][index], teachers[f"{TEACHERS}indices"][index]
    for value, position in zip(values, indices.tolist(), strict=True):
        vector[position] = value
    weights, start = {}, 0
    for name in names:
        size = net.parts.shapes[name].numel()
        weights[name] = vector[start : start + size].reshape(net.parts.shapes[name])
        start += size
    return weights


def loss_by_hand(net: Net, weights: Tensors, teacher: Tensors, images: Tensor, classes: Tensor) -> Tensor:
    """Return the mean of −Σ_c p_c log q_c over the images, at temperature 2, among some classes."""
    module = copy.deepcopy(net.module.vit)
    inputs = (images.float() / 255 - 0.5) / 0.5
    own, target = (functional_call(module, dict(each), (inputs,))[:, classes] for each in (weights, teacher))
    p, log_q = (target / TEMPERATURE).softmax(1), (own / TEMPERATURE).log_softmax(1)
    loss: Tensor = -(p * log_q).sum(1).mean()
    return loss


@pytest.mark.parametrize("known", [True, False])
def test_gradient_of_a_teacher_is_that_of_autograd_by_hand(
    known: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(batch_size=12, **SGD), class_to_task=TASKS if known else None)
    weights, shard, teachers = tiny_net.initial_weights(), make_shard(0, 12), make_teachers(tiny_net, 0, absent=2)
    training = LocalTraining(
        weights,
        tiny_net.parts.whole,
        1,
        SummedReferences(distilled_of(tiny_net)),
        constants=teachers,
        kept={"references": torch.zeros(())},
    )
    result = trainer.train(training, shard, RngContext(7, 3, 0))
    assert float(result.kept["references"]) == 2
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    losses = []
    for index in range(2):
        classes = torch.nonzero(TASKS[LABELS[index]] == TASKS)[:, 0] if known else torch.arange(CLASSES)
        images = shard.images.images[shard.index]
        losses.append(loss_by_hand(tiny_net, leaves, dense(tiny_net, teachers, index), images, classes))
    gradients = torch.autograd.grad(losses[0] + losses[1], list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close((weights[name] - result.weights[name]) / 0.1, gradient, rtol=1e-3, atol=2e-6)


def test_distillation_loss_ignores_classes_of_other_tasks() -> None:
    random = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(2, 4, CLASSES, generator=random)
    other = torch.tensor([False, True, True, False, False])
    masked, masked_targets = (each.masked_fill(other, -torch.inf) for each in (logits, targets))
    masked.requires_grad_()
    losses = distillation_losses(masked, masked_targets, 3.0)
    p, log_q = (targets[:, ~other] / 3).softmax(1), (logits[:, ~other] / 3).log_softmax(1)
    torch.testing.assert_close(losses, -(p * log_q).sum(1))
    (gradient,) = torch.autograd.grad(losses.sum(), masked)
    torch.testing.assert_close(gradient[:, ~other], (log_q.exp() - p) / 3)
    assert not gradient[:, other].any()


def test_expanded_weights_of_stacked_clients_are_those_of_each(tiny_net: Net) -> None:
    parts, teachers = tiny_net.parts, make_teachers(tiny_net, 1)
    shapes = {name: parts.shapes[name] for name in parts.trainable(parts.whole)}
    values, indices = teachers[f"{TEACHERS}values"], teachers[f"{TEACHERS}indices"]
    stacked = torch.vmap(lambda values, indices: expand_weights(values, indices, shapes))(values, indices)
    for index in range(len(values)):
        for name, tensor in dense(tiny_net, teachers, index).items():
            assert torch.equal(stacked[name][index], tensor)


def make_group(trainings: list[LocalTraining], make_shard: MakeShard, round: int) -> list[ClientTraining]:
    sizes = (20, 9, 27)
    return [
        ClientTraining(training, make_shard(client, client + size), RngContext(7, round, client))
        for client, (training, size) in enumerate(zip(trainings, sizes, strict=True))
    ]


def assert_close(results: list[LocalResult], expected: list[LocalResult]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert result.steps == reference.steps
        assert result.kept.keys() == reference.kept.keys()
        for name, count in reference.kept.items():
            assert float(result.kept[name]) == float(count), name
        for name, tensor in reference.weights.items():
            distance = float((result.weights[name] - tensor).norm())
            assert distance <= 1e-4 * float(tensor.norm()) + 1e-6, name


@pytest.mark.parametrize(("k", "rerank", "recompute", "mask_ratio"), [(9, 1, 1, 0.0), (2, 3, 1, 0.5), (2, 1, 2, 0.0)])
def test_stacked_clients_have_the_gradients_of_their_own_teachers(
    k: int,
    rerank: int,
    recompute: int,
    mask_ratio: float,
    captured: list[CudaGraphRunner],
    tiny_net: Net,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    """Alone, stacked, and stacked in captured steps, which serve a second group with other teachers."""
    augment = AugmentConfig(crop=0.25, flip=True, brightness=0.4)
    trainer = make_trainer(augment, batch_size=8, mask_ratio=mask_ratio, **SGD)
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std), class_to_task=TASKS)
    graphed = replace(trainer, machine=replace(trainer.machine, graphs=True))
    restorer = Restorer(4, k, rerank=rerank, recompute=recompute)
    weights = {name: tensor.double() for name, tensor in tiny_net.initial_weights().items()}
    for round in (1, 2):
        trainings = [
            LocalTraining(
                weights,
                tiny_net.parts.whole,
                1,
                IntegratedStep(restorer, distilled_of(tiny_net, restorer.dtype)),
                constants=in_double(make_teachers(tiny_net, 10 * round + client, client % 2 or None, 4)),
                kept=zero_counts(trainer.machine.device),
                scratch=restorer.scratch(weights),
            )
            for client in range(3)
        ]
        group = make_group(trainings, make_shard, round)
        alone = [trainer.train(each.training, each.shard, each.rng) for each in group]
        assert sum(float(result.kept["rotated"]) for result in alone) > 0
        assert_close(trainer.train_together(group), alone)
        before = len(captured)
        assert_close(graphed.train_together(group), alone)
        assert (len(captured) > before) == (round == 1), "captured steps serve other teachers"


def test_running_statistics_are_those_of_the_training_alone(make_trainer: MakeTrainer) -> None:
    """LeViT has batch norm: neither teachers nor the second forward pass may move its statistics."""
    config = ModelConfig(name="levit_128s", image_size=32)
    net = build_model(config, CLASSES, 3, 32, 0)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shard = Shard(ImageSet(images, torch.arange(8) % CLASSES), torch.arange(8))
    trainer = replace(make_trainer(batch_size=8, **SGD), net=net)
    mean, std = torch.tensor(net.mean), torch.tensor(net.std)
    trainer = replace(trainer, preprocess=Preprocess(net.image_size, mean, std))
    plain = LocalTraining(net.initial_weights(), net.parts.whole, 1)
    taught = replace(
        plain,
        step=SummedReferences(distilled_of(net)),
        constants=make_teachers(net, 0),
        kept={"references": torch.zeros(())},
    )
    results = [trainer.train(training, shard, RngContext(0, 1, 0)).weights for training in (plain, taught)]
    buffers = [name for name in net.parts.shapes if name not in net.parts.parameters]
    assert buffers
    assert all(torch.equal(results[0][name], results[1][name]) for name in buffers)
    assert any(not torch.equal(results[0][name], results[1][name]) for name in net.parts.parameters)
