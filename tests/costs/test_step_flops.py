"""The operations of a step are those that torch's counter sees while it runs, whatever the step calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import TrainConfig
from vitfleet.costs.flops import FlopCounter, full_flops
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors, add_prefix, with_prefix
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.step import Step, StepView, cross_entropy_step

OTHER = "other."


def at_other_head(view: StepView, batch: Samples) -> Tensors:
    """Only the head has a gradient there: its body is passed forward."""
    view.grad(cross_entropy, batch, at=with_prefix(view.constants, OTHER))
    return {}


def with_drawn(view: StepView, batch: Samples) -> Tensors:
    return view.grad(lambda own, drawn: cross_entropy(own) + cross_entropy(drawn), batch, view.drawn("replay"))


def drawn_alone(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, view.drawn("replay"))


def perturbed(view: StepView, batch: Samples) -> Tensors:
    shift = view.zero_perturbation(batch)
    return view.value_and_grad(cross_entropy, batch, perturbation=shift, input_gradient=True).gradients


def by_images_alone(view: StepView, batch: Samples) -> Tensors:
    view.input_grad(cross_entropy, batch, perturbation=view.zero_perturbation(batch))
    return {}


def of_each_sample(view: StepView, batch: Samples) -> Tensors:
    view.per_sample_grad(cross_entropy, batch)
    return {}


def of_parts(view: StepView, batch: Samples) -> Tensors:
    view.part_grads(cross_entropy, view.parts("memory"))
    return {}


def of_one_part(view: StepView, batch: Samples) -> Tensors:
    view.part_grads(cross_entropy, view.parts("memory", torch.zeros(1, dtype=torch.long, device=batch.labels.device)))
    return {}


def forward_only(view: StepView, batch: Samples) -> Tensors:
    view.forward(batch, at=with_prefix(view.constants, OTHER))
    view.forward(batch, representation=True)
    return {}


def first_block(view: StepView, batch: Samples) -> Tensors:
    view.features(batch, 1)
    return {}


def fewer_blocks(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, depth=1)


def of_each_argument(view: StepView, batch: Samples) -> Tensors:
    each = ((torch.ones((), device=batch.labels.device),) for _ in range(3))
    for _ in view.grad_of_each(scaled, batch, each=each):
        pass
    return {}


def scaled(outputs: Outputs, factor: Tensor) -> Tensor:
    return factor * cross_entropy(outputs)


def with_noise(view: StepView, batch: Samples) -> Tensors:
    """Random numbers are of the size of the weights: not counted."""
    noise = view.normal("noise", view.weights)
    return {name: gradient + noise[name] for name, gradient in view.grad(cross_entropy, batch).items()}


@dataclass(frozen=True)
class ComposedHead:
    """The head is the sum of what trains and a constant."""

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch, compose=self.compose)

    def compose(self, trained: Tensors, constants: Tensors) -> Tensors:
        return {name: trained[name] + constant for name, constant in with_prefix(constants, OTHER).items()}


@dataclass(frozen=True)
class OfKinds:
    """Every second step passes the batch twice."""

    def kind(self, index: int) -> int:
        return index % 2

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        if view.kind:
            view.grad(cross_entropy, batch)
        return view.grad(cross_entropy, batch)


STEPS: list[Step] = [
    cross_entropy_step,
    at_other_head,
    with_drawn,
    drawn_alone,
    perturbed,
    by_images_alone,
    of_each_sample,
    of_parts,
    of_one_part,
    forward_only,
    first_block,
    fewer_blocks,
    of_each_argument,
    with_noise,
    ComposedHead(),
    OfKinds(),
]


def make_training(net: Net, images: ImageSet, step: Step) -> LocalTraining:
    weights, parts = net.initial_weights(), net.parts
    memory = SampleSet(images.images[:24].view(2, 12, 1, 8, 8), images.labels[:24].view(2, 12), (12, 7))
    replay = SampleSet(images.images[None, :9], images.labels[None, :9], (9,), draws=3)
    head = add_prefix(OTHER, parts.head.take(weights))
    sets = {"memory": memory, "replay": replay}
    return LocalTraining(weights, parts.whole, 2, step, constants=head, sets=sets, random=("noise",))


@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: getattr(step, "__name__", type(step).__name__))
def test_counted_operations_are_those_of_the_training(
    step: Step,
    mask_ratio: float,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = make_trainer(batch_size=8, mask_ratio=mask_ratio, optimizer="sgd")
    training, shard = make_training(tiny_net, tiny_images, step), make_shard(0, 20)
    # torch does not count the fused attention kernel of a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        trainer.train(training, shard, RngContext(0, 1, 0))
    counted = FlopCounter(tiny_net, trainer.config).training(training, len(shard))
    assert counted > 0
    # Of single samples, torch counts the weighted mean of one loss as a product.
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-4 if step is of_each_sample else 0)


def test_the_gradient_by_the_images_costs_one_more_pass_through_the_embedding(
    tiny_net: Net, tiny_images: ImageSet
) -> None:
    """The first layer propagates it to the pixels: per patch 2 · patch pixels · width, times four patches."""
    counter = FlopCounter(tiny_net, TrainConfig())
    plain, with_images = (
        counter.step(make_training(tiny_net, tiny_images, step)).per_sample.training
        for step in (cross_entropy_step, perturbed)
    )
    assert with_images - plain == 2 * 4 * (4 * 4) * 16


def test_what_was_counted_once_is_known(tiny_net: Net, tiny_images: ImageSet) -> None:
    """Of equal steps, and of none that differs in anything."""
    counted: dict[Any, Any] = {}
    training = make_training(tiny_net, tiny_images, cross_entropy_step)
    full = full_flops(tiny_net).training
    for _ in range(2):
        counter = FlopCounter(tiny_net, TrainConfig(), counted)
        assert counter.training(training, 20) == 2 * 20 * full
        size = len(counted)
    assert counter.training(replace(training, step=OfKinds()), 64) == 2 * (32 + 2 * 32) * full
    assert len(counted) > size
    head_alone = replace(training, trainable=tiny_net.parts.head)
    assert counter.training(head_alone, 20) < 2 * 20 * full
    scored = replace(training, score_samples=True)
    assert counter.training(scored, 20) == 2 * 20 * full + 20 * full_flops(tiny_net).forward


def of_every_row(view: StepView, batch: Samples) -> Tensors:
    for _ in range(view.constants["rows"].shape[-1]):
        view.forward(batch)
    return {}


def test_a_step_is_counted_again_for_constants_of_another_shape(tiny_net: Net, tiny_images: ImageSet) -> None:
    counted: dict[Any, Any] = {}
    training, forward = make_training(tiny_net, tiny_images, of_every_row), full_flops(tiny_net).forward
    for rows in (1, 3):
        of_rows = replace(training, constants={"rows": torch.zeros(rows)})
        assert FlopCounter(tiny_net, TrainConfig(), counted).training(of_rows, 20) == 2 * 20 * rows * forward


def test_a_client_that_claims_many_samples_does_not_hold_up_the_count(tiny_net: Net) -> None:
    counter, train = FlopCounter(tiny_net, TrainConfig(batch_size=4)), tiny_net.parts.whole
    training = LocalTraining(
        {name: torch.empty(shape, device="meta") for name, shape in tiny_net.parts.shapes.items()}, train, 2
    )
    few = counter.training(training, 10_000)
    assert counter.training(training, 10**13) == pytest.approx(10**9 * few)
