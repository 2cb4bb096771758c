"""EWC and MAS: the importance against autograd image by image, the penalty against the sum over tasks by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from by_hand import PLAIN_SGD, Hand, Samples, close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from conftest import NO_IMAGES, MakeContext, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.data.images import Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.penalties import quadratic_penalty
from vitfleet.methods.continual.penalties.ewc import Ewc, EwcParams, drawn_label_loss
from vitfleet.methods.continual.penalties.mas import Mas, MasParams
from vitfleet.methods.continual.penalties.quadratic_penalty import (
    PenalizedStep,
    Penalty,
    images_per_step,
    read_learned,
)
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.driver import run_update
from vitfleet.training.samples import Outputs
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
KINDS = ("ewc, model", "ewc, data", "mas")
ROUND = 3


def of_kind(kind: str, make_context: MakeContext, weight: float | None = None, **train: object) -> Ewc | Mas:
    context = make_context(num_tasks=3, **train)
    table = {} if weight is None else {"penalty_weight": weight}
    if kind == "mas":
        return Mas(MasParams.model_validate(table), context)
    return Ewc(EwcParams.model_validate({**table, "fisher_labels": kind.split(", ")[1]}), context)


def test_defaults_are_those_of_the_papers(make_context: MakeContext) -> None:
    ewc, mas = of_kind("ewc, model", make_context), of_kind("mas", make_context)
    assert (ewc.factor, ewc.params.penalty_weight) == (0.5, 40000)
    assert (mas.factor, mas.params.penalty_weight) == (1, 100)


@dataclass(frozen=True)
class ByHand:
    """The importance of each weight by its definition, image by image, on timm's own module."""

    kind: str
    net: Net
    round: int
    client: int = 0

    def importance(self, weights: Tensors, shard: Shard) -> dict[str, Tensor]:
        draws = Address(0, Purpose.FISHER_LABELS, self.round, self.client).generator().random(len(shard))
        totals = {name: torch.zeros_like(weights[name]) for name in self.net.parts.whole}
        for image, uniform in zip(shard.index.tolist(), draws, strict=True):
            leaves = {name: weights[name].clone().requires_grad_() for name in totals}
            label = int(shard.images.labels[image])
            pixels = ((shard.images.images[image].to(weights["head.bias"].dtype) / 255 - 0.5) / 0.5)[None]
            logits = functional_call(copy.deepcopy(self.net.module.vit), leaves, (pixels,))[0]
            own_classes = torch.nonzero(TASKS[label] == TASKS).flatten()
            value = self.value(logits[own_classes], own_classes.tolist().index(label), uniform)
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
            for name, gradient in zip(totals, gradients, strict=True):
                totals[name] += gradient.abs() if self.kind == "mas" else gradient.square()
        return {name: total / len(shard) for name, total in totals.items()}

    def value(self, logits: Tensor, label: int, uniform: float) -> Tensor:
        """Return the function of one image's outputs whose gradient is taken."""
        if self.kind == "mas":
            return logits.square().sum()
        probabilities = logits.detach().double().softmax(0).numpy()
        drawn = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
        return logits.log_softmax(0)[drawn if self.kind == "ewc, model" else label]


@pytest.mark.parametrize("images", [1, 4])
@pytest.mark.parametrize("execution", ["alone", "stacked", "captured", "stacked and captured"])
@pytest.mark.parametrize("kind", KINDS)
def test_importance_is_the_mean_over_single_images(
    kind: str,
    execution: str,
    images: int,
    captured: list[object],
    tiny_net: Net,
    make_context: MakeContext,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the settings of the training are: images are whole, gradients are not clipped, weights stay.

    A GPU computes the gradients of several images in a step, with padding in the last one.
    """
    monkeypatch.setattr(quadratic_penalty, "images_per_step", lambda gradients: images)
    train = {"mask_ratio": 0.5, "max_grad_norm": 1e-3, "weight_decay": 0.5, "batch_size": 8}
    method = of_kind(kind, make_context, **train)
    trainer = replace(make_trainer(AugmentConfig(crop=0.25, flip=True, brightness=0.4), **train), class_to_task=TASKS)
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))
    trainer = replace(trainer, machine=replace(trainer.machine, graphs="captured" in execution))
    shards = [make_shard(*bounds) for bounds in ((0, 9), (3, 16), (20, 21))]
    random = torch.Generator().manual_seed(1)
    group: list[ClientTraining] = []
    for client, shard in enumerate(shards):
        noise = {name: torch.randn(shape, generator=random) for name, shape in tiny_net.parts.shapes.items()}
        weights = {name: (tensor + 0.3 * noise[name]).double() for name, tensor in tiny_net.initial_weights().items()}
        training = method.importance_training(ClientRoundInput(ROUND, client, Message(), {}, None, shard), weights)
        group.append(ClientTraining(training, shard, RngContext(0, ROUND, client)))
    groups = [group] if "stacked" in execution else [[member] for member in group]
    results = [result for part in groups for result in trainer.train_together(part)]
    for member, result in zip(group, results, strict=True):
        start = member.training.weights
        assert all(torch.equal(tensor, start[name]) for name, tensor in result.weights.items())
        assert result.samples == len(member.shard)
        assert result.steps == -(-len(member.shard) // images)
        expected = ByHand(kind, tiny_net, ROUND, member.rng.client).importance(start, member.shard)
        found = {name: total / result.samples for name, total in result.kept.items()}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            # Logits are single precision; numbers that are zero by symmetry are rounding errors.
            assert float((found[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()) + 1e-9, name
        assert float(max(tensor.max() for tensor in found.values())) > 1e-3
    assert bool(captured) == ("captured" in execution)


def test_images_per_step_follow_the_device_and_the_model() -> None:
    """Without a GPU one image at a time; on a GPU at most 16, and the gradients of a step stay below 256 MiB."""
    assert images_per_step({"w": torch.empty(10)}) == images_per_step({"w": torch.empty(10, device="meta")}) == 1
    with FakeTensorMode():
        counts = {size: images_per_step({"w": torch.empty(size, device="cuda")}) for size in (10, 2**23, 2**30)}
    assert counts == {10: 16, 2**23: 8, 2**30: 1}


def test_drawn_labels_follow_the_models_prediction() -> None:
    """Over evenly spaced numbers each class is drawn as often as it is probable; an impossible class never."""
    count = 10_000
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.7, 0.05, 0.0])
    logits = probabilities.log().expand(count, -1).clone().requires_grad_()
    uniform = (torch.arange(count, dtype=torch.float64)) / count
    uniform[-1] = 1 - 2**-53
    positions = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    labels, epoch = torch.zeros(count).long(), torch.tensor(0)
    outputs = Outputs(logits, labels, torch.ones(count), positions, {}, {"uniform": uniform}, epoch)
    (gradient,) = torch.autograd.grad(drawn_label_loss(outputs), logits)
    drawn = (probabilities - gradient).round().sum(0) / count  # the gradient is the prediction minus the label
    torch.testing.assert_close(drawn, probabilities, atol=2e-4, rtol=0)


def outputs_at(weights: Tensors, penalty: Penalty) -> Outputs:
    """Return outputs whose cross-entropy is ln 2."""
    one = torch.ones(1, dtype=torch.float64)
    return Outputs(torch.zeros(1, 2), torch.tensor([0]), one.float(), one.long(), weights, penalty.tensors(), one)


@pytest.mark.parametrize("kind", ["ewc, data", "mas"])
def test_penalty_and_its_gradient_are_the_closed_form(kind: str, make_context: MakeContext) -> None:
    """λ/2 Σ_i F_i (θ − θ*_i)² of EWC; λ Σ_i Ω_i (θ − θ*)² of MAS with the latest θ*."""
    method = of_kind(kind, make_context, weight=30.0)
    random = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "vector": (5,)}

    def normal() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}

    importances = [{name: tensor.square() for name, tensor in normal().items()} for _ in range(3)]
    importances[0]["vector"][0] = importances[1]["vector"][0] = importances[2]["vector"][0] = 0  # nobody needs it
    anchors = [normal() for _ in range(3)]
    penalty = None
    for importance, anchor in zip(importances, anchors, strict=True):
        penalty = method.consolidate(penalty, importance, anchor)
    assert penalty is not None
    weights = {name: tensor.requires_grad_() for name, tensor in normal().items()}
    found = PenalizedStep(method.factor * 30.0).loss(outputs_at(weights, penalty)) - np.log(2)
    gradients = torch.autograd.grad(found, list(weights.values()))
    used = anchors if kind != "mas" else [anchors[-1]] * 3
    tasks = list(zip(importances, used, strict=True))
    expected = sum(
        method.factor * 30.0 * float((omega[name] * (weights[name].detach() - anchor[name]).square()).sum())
        for omega, anchor in tasks
        for name in shapes
    )
    assert float(found.detach()) == pytest.approx(expected, rel=1e-6)
    for name, gradient in zip(weights, gradients, strict=True):
        closed = 2 * method.factor * 30.0 * sum(omega[name] * (weights[name] - anchor[name]) for omega, anchor in tasks)
        torch.testing.assert_close(gradient, closed, msg=name)


def ask(
    method: Ewc | Mas,
    trainer: Trainer,
    net: Net,
    shard: Shard,
    task_index: int,
    own: State | None,
    round: int,
) -> ClientUpdate:
    initial = net.initial_weights()
    down, base = Message(method.initial_state(initial).tensors), method.initial_broadcast(initial).tensors
    job = ClientRoundInput(round, 0, down, base, own, shard, task_index)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, round, 0))


@dataclass(frozen=True)
class PenaltyGradient:
    """Adds 2c·λ·Σ_i Ω_i (θ − θ*_i) to a gradient, one term per task."""

    factor: float
    names: Sequence[str]
    tasks: Sequence[tuple[Tensors, Tensors]]  # importance and anchor

    def __call__(self, gradient: Tensor, weights: Tensors, batch: Samples) -> Tensor:
        for importance, anchor in self.tasks:
            terms = [(importance[name] * (weights[name] - anchor[name])).flatten() for name in self.names]
            gradient = gradient + 2 * self.factor * torch.cat(terms)
        return gradient


@pytest.mark.parametrize("kind", KINDS)
def test_three_tasks_as_by_hand(
    kind: str, make_context: MakeContext, make_trainer: MakeTrainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    """Two rounds in the first task, one in the others: the importance of a task's last round counts."""
    weight = 0.2 if kind == "mas" else 0.5
    method = of_kind(kind, make_context, weight, epochs=2, **PLAIN_SGD)
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=TASKS)
    own: State | None = None
    names = list(tiny_net.parts.whole)
    learned: dict[int, tuple[Tensors, Tensors]] = {}
    for round, task_index in enumerate((0, 0, 1, 2), start=1):
        shard = make_shard(12 * task_index, 12 * task_index + 12)
        head = tiny_net.initial_weights() if own is None else own.tensors
        received = {**method.parts.head.take(head), **method.parts.body.take(tiny_net.initial_weights())}
        answer = ask(method, trainer, tiny_net, shard, task_index, own, round)
        before = [task for index, task in learned.items() if index < task_index]
        if kind == "mas":
            before = [(importance, before[-1][1]) for importance, _ in before]
        change = PenaltyGradient(method.factor * weight, names, before)
        expected = Hand(tiny_net, TASKS, shard, round).train(received, names, 2, change)
        close(answer.model_weights, expected)
        if before:
            plain = Hand(tiny_net, TASKS, shard, round).train(received, names, 2)
            assert max(float((plain[name] - expected[name]).abs().max()) for name in names) > 1e-3
        assert set(answer.message.tensors) == set(method.parts.body)
        assert answer.message.numbers["penalized"] == int(task_index > 0)
        own = answer.client_state
        model = dict(answer.model_weights)
        learned[task_index] = ByHand(kind, tiny_net, round).importance(model, shard), model


@pytest.mark.parametrize("kind", ["ewc, model", "mas"])
@pytest.mark.parametrize("case", ["skips a task", "has no images of a task"])
def test_a_task_without_samples_leaves_the_importance(
    kind: str, case: str, make_context: MakeContext, make_trainer: MakeTrainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = of_kind(kind, make_context)
    trainer = replace(make_trainer(), class_to_task=TASKS)
    first = ask(method, trainer, tiny_net, make_shard(0, 8), 0, None, 1).client_state
    assert first is not None
    second = first
    if case == "has no images of a task":
        answer = ask(method, trainer, tiny_net, NO_IMAGES, 1, first, 2)
        assert answer.client_state is not None
        second = answer.client_state
        assert answer.message.numbers["latest_task"] == -1
    third = ask(method, trainer, tiny_net, make_shard(8, 16), 2, second, 3).client_state
    assert third is not None
    learned = read_learned(third.tensors)
    assert learned.latest_task == 2
    assert learned.penalty is not None
    for name, importance in read_learned(first.tensors).latest_importance.items():
        assert torch.equal(learned.penalty.importance[name], importance)
        assert torch.equal(learned.penalty.anchor[name], first.tensors[name])


def test_a_clients_state_does_not_grow_with_the_tasks(
    make_context: MakeContext, make_trainer: MakeTrainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method, trainer = of_kind("ewc, model", make_context), make_trainer()
    cost_model = CostModel(method, tiny_net, method.context.train)

    def kept_shapes(reported: Numbers) -> dict[str, torch.Size]:
        state = cost_model.kept_state(reported)
        assert state is not None
        return {name: tensor.shape for name, tensor in state.tensors.items() if name not in tiny_net.parts.shapes}

    own: State | None = None
    sizes: list[int] = []
    for task_index in range(3):
        answer = ask(method, trainer, tiny_net, make_shard(0, 4), task_index, own, task_index + 1)
        own = answer.client_state
        assert own is not None
        sizes.append(sum(tensor.numel() for tensor in own.tensors.values()))
        kept = {name: tensor.shape for name, tensor in own.tensors.items() if name not in tiny_net.parts.shapes}
        assert kept_shapes(answer.message.numbers) == kept
    model = sum(tensor.numel() for tensor in tiny_net.initial_weights().values())
    assert sizes == [2 * model, 4 * model + 1, 4 * model + 1]
    assert not kept_shapes({"latest_task": 10**9})
