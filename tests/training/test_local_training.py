"""What a training can be: steps that are compared by value, sets of samples, tensors by group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import Step, StepView, cross_entropy_step


@dataclass
class Mutable:
    """A dataclass that is not frozen has no hash."""

    rate: float = 0.1

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch)


@dataclass(frozen=True)
class HoldsAList:
    """A frozen one has none if a field has none."""

    rates: list[float] = field(default_factory=list)

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch)


@dataclass(frozen=True)
class Frozen:
    rate: float = 0.1

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch)


class Methods:
    """Steps may be functions of one object, such as the method itself."""

    def step(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch)


METHODS = Methods()


def training_of(step: Step) -> LocalTraining:
    weights = {"a": torch.zeros(2), "b": torch.ones(3)}
    return LocalTraining(weights, Selection(("a",)), 1, step)


@dataclass(frozen=True)
class WithLoss:
    loss: Callable[..., Tensor] = cross_entropy

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(self.loss, batch)


class Plain:
    """Two instances are not equal."""

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch)


def closure() -> Step:
    def step(view: StepView, batch: Samples) -> Tensors:
        return view.grad(cross_entropy, batch)

    return step


REFUSED: dict[str, Callable[[], Step]] = {
    "not frozen": Mutable,
    "a field without hash": HoldsAList,
    "a closure": closure,
    "a lambda": lambda: lambda view, batch: view.grad(cross_entropy, batch),
    "a partial function": lambda: partial(cross_entropy_step),
    "no comparison": Plain,
    "a lambda as a field": lambda: WithLoss(lambda outputs: cross_entropy(outputs)),
    "a partial function as a field": lambda: WithLoss(partial(cross_entropy)),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_step_that_is_not_compared_by_value_is_refused(make: Callable[[], Step]) -> None:
    """The next client's step would be another one: they would not stack, and each would be captured anew."""
    with pytest.raises(TypeError, match=r"^step .*: write it as a function of a module, or as a frozen dataclass"):
        training_of(make())


def test_steps_are_compared_by_value() -> None:
    assert training_of(Frozen(0.3)).stacks_with(training_of(Frozen(0.3)))
    assert not training_of(Frozen(0.3)).stacks_with(training_of(Frozen(0.2)))
    assert training_of(cross_entropy_step).stacks_with(training_of(cross_entropy_step))
    assert training_of(WithLoss()).stacks_with(training_of(WithLoss(cross_entropy)))
    assert training_of(Methods().step).stacks_with(training_of(METHODS.step)) is False
    assert training_of(METHODS.step).stacks_with(training_of(METHODS.step)), "a method's own function"


def sample_set(sizes: tuple[int, ...]) -> SampleSet:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(sizes), max(sizes), 1, 2, 2), dtype=torch.uint8, generator=random)
    labels = torch.randint(0, 5, (len(sizes), max(sizes)), generator=random)
    return SampleSet(images, labels, sizes, stored={"logits": torch.rand(len(sizes), max(sizes), 5, generator=random)})


@pytest.mark.parametrize("name", ["replay", "replay-augment", "replay-mask"])
def test_random_numbers_of_steps_are_not_those_of_a_set(name: str) -> None:
    training = replace(training_of(Frozen()), sets={"replay": replace(sample_set((3,)), draws=2)})
    with pytest.raises(ValueError, match=f"^random numbers '{name}': the name is taken by draws from a set"):
        replace(training, random=("noise", name))
    whole_parts = {"replay": sample_set((3,))}
    assert replace(training, sets=whole_parts, random=(name,)).random == (name,), "nothing is drawn from these"


def test_tensors_by_group_make_the_same_training() -> None:
    """Dry runs and costs replace the tensors of a training by ones without values."""
    training = replace(
        training_of(Frozen()),
        constants={"anchor": torch.ones(2)},
        kept={"steps": torch.zeros(())},
        scratch={"rows": torch.empty(3, device="meta")},
        sets={"memory": sample_set((4, 2)), "replay": replace(sample_set((3,)), draws=2)},
    )
    groups = training.tensor_groups()
    assert set(groups) == {"weights", "constants", "kept", "scratch", "views", "sets.memory", "sets.replay"}
    assert not groups["views"], "trained on images"
    doubled = training.with_tensor_groups({key: {n: t * 2 for n, t in group.items()} for key, group in groups.items()})
    assert torch.equal(doubled.constants["anchor"], torch.full((2,), 2.0))
    assert torch.equal(doubled.sets["memory"].labels, training.sets["memory"].labels * 2)
    stored = training.sets["replay"].stored["logits"]
    assert torch.equal(doubled.sets["replay"].stored["logits"], stored * 2)
    assert doubled.sets["replay"].draws == 2
    assert list(training.drawn_sets()) == ["replay"]
    assert training.stacks_with(doubled)


def test_parts_of_a_set_are_ordered_by_falling_size_and_padded() -> None:
    def part(size: int, label: int) -> tuple[Tensor, Tensor]:
        return torch.full((size, 1, 2, 2), label, dtype=torch.uint8), torch.full((size,), label, dtype=torch.int16)

    found = SampleSet.of_parts([part(2, 7), None, part(5, 3)])
    assert found.sizes == (5, 2, 0)
    assert len(found) == 3
    assert found.labels.dtype == torch.long
    assert found.labels.tolist() == [[3] * 5, [7, 7, 0, 0, 0], [0] * 5]
    assert found.images[:, :, 0, 0, 0].tolist() == found.labels.tolist()
    weight = found.sample_weight()
    torch.testing.assert_close(weight[0], torch.full((5,), 1 / 5))
    torch.testing.assert_close(weight[1], torch.tensor([0.5, 0.5, 0, 0, 0]))
    assert not weight[2].any()
