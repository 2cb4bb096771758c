"""Reference gradients of teachers: by hand with autograd, stacked, captured, and with running statistics."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from conftest import CLASSES, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.methods.continual.fedknow import distillation_losses, expand_weights
from vitfleet.methods.continual.projection import GradientIntegrator, MostDissimilar
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.local_training import Teachers
from vitfleet.training.stack_inputs import ClientFit, RngContext
from vitfleet.training.step import Fit, FitResult, Objective, ReferenceGradients, Step
from vitfleet.training.step_runner import CudaGraphRunner
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
LABELS = (0, 3, 1)  # a class of each teacher's task
TEMPERATURE = 2.0
SGD: dict[str, object] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "schedule": "constant"}


class LastReference:
    """Applies the sum of the present references instead of the gradient."""

    counts = ("references",)

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        assert references is not None
        present = references.present
        summed = {
            name: (rows * present.view(-1, *(1,) * (rows.dim() - 1))).sum(0)
            for name, rows in references.gradients.items()
        }
        return summed, {"references": present.sum().float()}


def make_teachers(net: Net, seed: int, absent: int | None = None, count: int = len(LABELS)) -> Teachers:
    """Return teachers that keep a third of random weights."""
    random = torch.Generator().manual_seed(seed)
    total = net.anatomy.count_parameters(net.anatomy.whole)
    indices = torch.stack([torch.randperm(total, generator=random)[: total // 3] for _ in range(count)])
    present = torch.tensor([index != absent for index in range(count)])
    values = torch.randn(count, total // 3, generator=random) * 0.3 * present[:, None]
    labels = torch.tensor([LABELS[index % len(LABELS)] for index in range(count)])
    return Teachers(values, indices.int(), labels, torch.full((count,), TEMPERATURE), present)


def dense(net: Net, teachers: Teachers, index: int) -> dict[str, Tensor]:
    """Return a teacher's weights, number by number."""
    names = list(net.anatomy.trainable(net.anatomy.whole))
    vector = torch.zeros(sum(net.anatomy.shapes[name].numel() for name in names))
    for value, position in zip(teachers.values[index], teachers.indices[index].tolist(), strict=True):
        vector[position] = value
    weights, start = {}, 0
    for name in names:
        size = net.anatomy.shapes[name].numel()
        weights[name] = vector[start : start + size].reshape(net.anatomy.shapes[name])
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
    trainer = replace(make_trainer(batch_size=12, **SGD), class_tasks=TASKS if known else None)
    weights, shard, teachers = tiny_net.initial_weights(), make_shard(0, 12), make_teachers(tiny_net, 0, absent=2)
    fit = Fit(weights, Objective(tiny_net.anatomy.whole, transform=LastReference()), 1, memory=teachers)
    result = trainer.fit(fit, shard, RngContext(7, 3, 0))
    assert float(result.observed["references"]) == 2
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
    anatomy, teachers = tiny_net.anatomy, make_teachers(tiny_net, 1)
    shapes = {name: anatomy.shapes[name] for name in anatomy.trainable(anatomy.whole)}
    stacked = expand_weights(teachers.values, teachers.indices, shapes)
    for index in range(len(teachers)):
        for name, tensor in dense(tiny_net, teachers, index).items():
            assert torch.equal(stacked[name][index], tensor)


def fit_group(trainer: Trainer, fits: list[Fit], make_shard: MakeShard, round: int = 3) -> list[ClientFit]:
    sizes = (20, 9, 27)
    return [
        ClientFit(fit, make_shard(client, client + size), RngContext(7, round, client))
        for client, (fit, size) in enumerate(zip(fits, sizes, strict=True))
    ]


def assert_close(results: list[FitResult], expected: list[FitResult]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert result.steps == reference.steps
        assert result.observed.keys() == reference.observed.keys()
        for name, count in reference.observed.items():
            assert float(result.observed[name]) == float(count), name
        for name, tensor in reference.weights.items():
            distance = float((result.weights[name] - tensor).norm())
            assert distance <= 1e-4 * float(tensor.norm()) + 1e-6, name


@pytest.mark.parametrize(
    ("k", "every", "restore_every", "mask_ratio"), [(9, 1, 1, 0.0), (2, 3, 1, 0.5), (2, 1, 2, 0.0)]
)
def test_stacked_clients_have_the_gradients_of_their_own_teachers(
    k: int,
    every: int,
    restore_every: int,
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
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std), class_tasks=TASKS)
    graphed = replace(trainer, machine=replace(trainer.machine, graphs=True))
    objective = Objective(
        tiny_net.anatomy.whole,
        transform=GradientIntegrator(check=True),
        selector=MostDissimilar(k, every),
        restore_every=restore_every,
    )
    weights = {name: tensor.double() for name, tensor in tiny_net.initial_weights().items()}
    for round in (1, 2):
        fits = [
            Fit(weights, objective, 1, memory=make_teachers(tiny_net, 10 * round + client, client % 2 or None, 4))
            for client in range(3)
        ]
        group = fit_group(trainer, fits, make_shard, round)
        alone = [trainer.fit(each.fit, each.shard, each.rng) for each in group]
        assert sum(float(result.observed["rotated"]) for result in alone) > 0
        assert_close(trainer.fit_cohort(group), alone)
        before = len(captured)
        assert_close(graphed.fit_cohort(group), alone)
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
    plain = Fit(net.initial_weights(), Objective(net.anatomy.whole), 1)
    taught = replace(
        plain,
        objective=Objective(net.anatomy.whole, transform=LastReference()),
        memory=make_teachers(net, 0),
    )
    results = [trainer.fit(fit, shard, RngContext(0, 1, 0)).weights for fit in (plain, taught)]
    buffers = [name for name in net.anatomy.shapes if name not in net.anatomy.parameters]
    assert buffers
    assert all(torch.equal(results[0][name], results[1][name]) for name in buffers)
    assert any(not torch.equal(results[0][name], results[1][name]) for name in net.anatomy.parameters)
