"""Reference gradients that are reused for some steps, or stored in half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import MakeShard, MakeTrainer
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors
from vitfleet.methods.continual.projection import GradientIntegrator, MostDissimilar, project_gradient
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.client_stack import Cohort
from vitfleet.training.local_training import EpisodicMemory
from vitfleet.training.stack_inputs import ClientFit, RngContext, stack_inputs
from vitfleet.training.step import Fit, Objective, ReferenceGradients, Step
from vitfleet.training.step_runner import CudaGraphRunner

PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": 0.1}
MakeMemory = Callable[[int], EpisodicMemory]


@pytest.fixture
def make_memory(tiny_images: ImageSet) -> MakeMemory:
    """Return a function that makes a memory of so many parts of eight samples."""

    def make(parts: int) -> EpisodicMemory:
        index = (torch.arange(8 * parts).view(parts, 8) * 3 + 1) % len(tiny_images)
        weight = torch.full((parts, 8), 1 / 8)
        return EpisodicMemory(tiny_images.images[index], tiny_images.labels[index], weight, (8,) * parts)

    return make


@dataclass(frozen=True)
class AddReferences:
    """Adds all references to the gradient."""

    counts: tuple[str, ...] = ()

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        assert references is not None
        return {name: gradient + references.gradients[name].sum(0) for name, gradient in gradients.items()}, {}


def test_references_are_those_of_the_last_step_that_restored(
    tiny_net: Net, make_memory: MakeMemory, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Two epochs of five steps by hand: references are computed at the steps 0, 2 and 4 of each."""
    trainer, shard, memory = make_trainer(batch_size=4, **PLAIN_SGD), make_shard(0, 20), make_memory(2)
    weights = tiny_net.initial_weights()
    objective = Objective(tiny_net.anatomy.whole, transform=AddReferences(), restore_every=2)
    result = trainer.fit(Fit(weights, objective, 2, memory=memory), shard, RngContext(0, 1, 0))

    def gradient(weights: Tensors, images: Tensor, labels: Tensor) -> list[Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        loss = F.cross_entropy(tiny_net(leaves, trainer.preprocess(images)), labels)
        return list(torch.autograd.grad(loss, list(leaves.values())))

    for epoch in range(2):
        order = torch.from_numpy(Address(0, Purpose.ORDER, 1, 0, epoch).generator().permutation(20))
        for step, batch in enumerate(torch.split(order, 4)):
            if step % 2 == 0:
                parts = [gradient(weights, memory.images[part], memory.labels[part]) for part in range(2)]
                reference = [first + second for first, second in zip(*parts, strict=True)]
            own = gradient(weights, shard.images.images[shard.index[batch]], shard.labels[batch])
            weights = {
                name: weight - 0.1 * (mine + reused)
                for (name, weight), mine, reused in zip(weights.items(), own, reference, strict=True)
            }
    for name, weight in weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_captured_steps_reuse_references_as_eager_ones_do(
    clients: int,
    dtype: torch.dtype | None,
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_memory: MakeMemory,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = replace(make_trainer(batch_size=4, **PLAIN_SGD), parts_at_once=9)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    objective = Objective(
        tiny_net.anatomy.body,
        transform=GradientIntegrator(),
        selector=MostDissimilar(2, every=4),
        restore_every=2,
        reference_dtype=dtype,
    )
    for round in (1, 2):
        fit = Fit(tiny_net.initial_weights(), objective, 2, memory=make_memory(4))
        group = [ClientFit(fit, make_shard(0, 28), RngContext(7, round, client)) for client in range(clients)]
        for result, expected in zip(graphed.fit_cohort(group), eager.fit_cohort(group), strict=True):
            for name, weight in result.weights.items():
                torch.testing.assert_close(weight, expected.weights[name], rtol=1e-5, atol=1e-6)
    kinds = {(kind.refresh, kind.restore) for kind in captured[0].graphs}
    assert kinds == {(True, True), (False, True), (False, False)}
    assert len(captured) == 3, "the second round reuses them"


def flat(gradients: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in gradients.values()]).double()


def half_precision_cosine(gradients: Tensors, rows: Tensors) -> float:
    """Return the cosine between the directions projected against references in bfloat16 and in float32."""
    present = torch.ones(len(next(iter(rows.values()))), dtype=torch.bool)
    exact = project_gradient(gradients, rows, present)
    rounded = project_gradient(gradients, {name: row.bfloat16() for name, row in rows.items()}, present)
    assert float(exact.rotated) == float(rounded.rotated) == 1
    return float(F.cosine_similarity(flat(exact.gradients), flat(rounded.gradients), dim=0))


def test_half_precision_hardly_turns_the_direction_of_random_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    for k in (1, 4, 10):
        rows = torch.randn(k, 50_000, generator=random)
        gradient = torch.randn(50_000, generator=random) - rows.mean(0)
        assert half_precision_cosine({"w": gradient}, {"w": rows}) > 1 - 1e-5


def test_half_precision_hardly_turns_the_direction_of_real_gradients(
    tiny_net: Net, make_memory: MakeMemory, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer()
    fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.body), 1, memory=make_memory(5))
    group = [ClientFit(fit, make_shard(0, 8), RngContext(0, 1, 0))]
    cohorts = [
        Cohort(
            trainer.engine,
            [replace(group[0], fit=replace(fit, objective=replace(fit.objective, reference_dtype=dtype)))],
            stack_inputs(group, tiny_net, 0.0),
        )
        for dtype in (None, torch.bfloat16)
    ]
    exact, rounded = (cohort.memory_gradients.compute({}, refresh=True, restore=True) for cohort in cohorts)
    assert exact is not None
    assert rounded is not None
    for name, rows in rounded.gradients.items():
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows, exact.gradients[name].bfloat16())
    # Against the mean of the references: every one of them constrains it.
    opposed = {name: -rows.mean(0) + 0.5 * rows[0] for name, rows in exact.gradients.items()}
    assert half_precision_cosine(opposed, exact.gradients) > 0.999
