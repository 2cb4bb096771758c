"""Gradients of earlier tasks that are reused for some steps, or held in half precision."""

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
from vitfleet.methods.continual.gradients.fedvit import StoredGradients
from vitfleet.methods.continual.gradients.projection import References, project, zero_counts
from vitfleet.methods.continual.gradients.restorer import IntegratedStep, Restorer
from vitfleet.methods.continual.stored_samples import MEMORY
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView

PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": 0.1}
MakeMemory = Callable[[int], SampleSet]


@pytest.fixture
def make_memory(tiny_images: ImageSet) -> MakeMemory:
    """Return a function that makes a memory of so many parts of eight samples."""

    def make(parts: int) -> SampleSet:
        index = (torch.arange(8 * parts).view(parts, 8) * 3 + 1) % len(tiny_images)
        return SampleSet(tiny_images.images[index], tiny_images.labels[index], (8,) * parts)

    return make


@dataclass(frozen=True)
class AddReferences:
    """Adds all references to the gradient."""

    restorer: Restorer

    def kind(self, index: int) -> str:
        return self.restorer.kind(index)

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        gradients = view.grad(cross_entropy, batch)
        references = self.restorer.references(view, batch, gradients, StoredGradients(None))
        summed: Tensors = view.map(sum_rows, references.gradients)
        return {name: gradient + summed[name] for name, gradient in gradients.items()}


def sum_rows(rows: Tensors) -> Tensors:
    return {name: tensor.sum(0) for name, tensor in rows.items()}


def test_references_are_those_of_the_last_step_that_computed_them(
    tiny_net: Net, make_memory: MakeMemory, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Two epochs of five steps by hand: references are computed at the steps 0, 2 and 4 of each."""
    trainer, shard, memory = make_trainer(batch_size=4, **PLAIN_SGD), make_shard(0, 20), make_memory(2)
    weights, restorer = tiny_net.initial_weights(), Restorer(tasks=2, k=2, recompute=2)
    training = LocalTraining(
        weights,
        tiny_net.parts.whole,
        2,
        AddReferences(restorer),
        scratch=restorer.scratch(weights),
        sets={MEMORY: memory},
    )
    result = trainer.train(training, shard, RngContext(0, 1, 0))

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
@pytest.mark.parametrize("bf16", [False, True])
def test_captured_steps_reuse_references_as_eager_ones_do(
    clients: int,
    bf16: bool,
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_memory: MakeMemory,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = replace(make_trainer(batch_size=4, **PLAIN_SGD), parts_at_once=9)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    weights, body = tiny_net.initial_weights(), tiny_net.parts.body
    restorer = Restorer(tasks=4, k=2, rerank=4, recompute=2, bf16=bf16)
    for round in (1, 2):
        training = LocalTraining(
            weights,
            body,
            2,
            IntegratedStep(restorer, StoredGradients(restorer.dtype)),
            kept=zero_counts(eager.machine.device),
            scratch=restorer.scratch(body.take(weights)),
            sets={MEMORY: make_memory(4)},
        )
        group = [ClientTraining(training, make_shard(0, 28), RngContext(7, round, client)) for client in range(clients)]
        for result, expected in zip(graphed.train_together(group), eager.train_together(group), strict=True):
            for name, weight in result.weights.items():
                torch.testing.assert_close(weight, expected.weights[name], rtol=1e-5, atol=1e-6)
            assert {name: float(count) for name, count in result.kept.items()} == {
                name: float(count) for name, count in expected.kept.items()
            }
            assert float(result.kept["integrated"]) == result.steps
    assert {kind.kind for kind in captured[0].graphs} == {"rank", "compute", "reuse"}
    assert len(captured) == 3, "the second round reuses them"


def flat(gradients: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in gradients.values()]).double()


def half_precision_cosine(gradients: Tensors, rows: Tensors) -> float:
    """Return the cosine between the directions projected against references in bfloat16 and in float32."""
    present = torch.ones(len(next(iter(rows.values()))), dtype=torch.bool)
    exact, exact_counts = project(gradients, References(rows, present))
    rounded, counts = project(gradients, References({name: row.bfloat16() for name, row in rows.items()}, present))
    assert float(exact_counts["rotated"]) == float(counts["rotated"]) == 1
    return float(F.cosine_similarity(flat(exact), flat(rounded), dim=0))


def test_half_precision_hardly_turns_the_direction_of_random_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    for k in (1, 4, 10):
        rows = torch.randn(k, 50_000, generator=random)
        gradient = torch.randn(50_000, generator=random) - rows.mean(0)
        assert half_precision_cosine({"w": gradient}, {"w": rows}) > 1 - 1e-5


@dataclass(frozen=True)
class KeepReferences:
    """Keeps the gradients of the stored parts, as they are held in some type; nothing trains."""

    dtype: torch.dtype | None

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        rows = StoredGradients(self.dtype)(view, batch, None).gradients
        assert all(tensor.dtype == (self.dtype or torch.float32) for tensor in rows.values())
        view.keep(rows)
        return {}


def test_half_precision_hardly_turns_the_direction_of_real_gradients(
    tiny_net: Net, make_memory: MakeMemory, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    weights, body = tiny_net.initial_weights(), tiny_net.parts.body

    def references(dtype: torch.dtype | None) -> Tensors:
        kept = {name: torch.zeros(5, *weights[name].shape, dtype=dtype) for name in body}
        training = LocalTraining(weights, body, 1, KeepReferences(dtype), kept=kept, sets={MEMORY: make_memory(5)})
        return make_trainer().train(training, make_shard(0, 8), RngContext(0, 1, 0)).kept

    exact, rounded = references(None), references(torch.bfloat16)
    for name, rows in rounded.items():
        assert torch.equal(rows, exact[name].bfloat16())
    # Against the mean of the references: every one of them constrains it.
    opposed = {name: -rows.mean(0) + 0.5 * rows[0] for name, rows in exact.items()}
    assert half_precision_cosine(opposed, exact) > 0.999
