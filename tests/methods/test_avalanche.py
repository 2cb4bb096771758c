"""EWC, MAS, GEM, A-GEM and DER++ against Avalanche on a toy stream.

The numbers were recorded inside Avalanche's own strategies by scripts/avalanche_reference.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from conftest import context_of
from vitfleet.config.schema import AugmentConfig, ModelConfig, TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Message
from vitfleet.methods import ClientRoundInput
from vitfleet.methods.continual.gradients.projection import References, project
from vitfleet.methods.continual.penalties.ewc import Ewc, EwcParams
from vitfleet.methods.continual.penalties.mas import Mas, MasParams
from vitfleet.methods.continual.penalties.quadratic_penalty import PenalizedStep
from vitfleet.methods.continual.replay.experience_replay import DarkExperienceStep
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.samples import Outputs
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for

CPU = torch.device("cpu")
CLASSES, PER_TASK = 4, 12
EWC_LAMBDA, MAS_LAMBDA, GEM_STRENGTH, DER_ALPHA, DER_BETA = 3.0, 2.0, 0.5, 0.3, 0.7  # as in the script
AVALANCHE = load_file(Path(__file__).parent / "data" / "avalanche.safetensors")


@pytest.fixture
def net() -> Net:
    return build_model(ModelConfig(dim=8, depth=1, heads=2, patch_size=4), CLASSES, 1, 8, seed=0)


@pytest.fixture
def trainer(net: Net) -> Trainer:
    return Trainer(net, preprocess_for(net, CPU), TrainConfig(), AugmentConfig(), 1, ExecutionSettings(CPU, bf16=False))


def group(prefix: str) -> dict[str, Tensor]:
    """Return the recorded tensors under a prefix, by name of the weight."""
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in AVALANCHE.items() if name.startswith(prefix)}


def task_shard(task: int) -> Shard:
    images = ImageSet(AVALANCHE["pixels"], AVALANCHE["labels"])
    return Shard(images, torch.arange(task * PER_TASK, (task + 1) * PER_TASK))


def make_method(kind: str, net: Net) -> Ewc | Mas:
    """Return the method with Avalanche's λ: its EWC has no factor ½, its MAS averages the importance of two tasks."""
    context = context_of(net, num_classes=CLASSES, rounds=1)
    if kind == "ewc":
        return Ewc(EwcParams(penalty_weight=2 * EWC_LAMBDA, fisher_labels="data"), context)
    return Mas(MasParams(penalty_weight=MAS_LAMBDA / 2), context)


def importance(method: Ewc | Mas, trainer: Trainer, task: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    shard = task_shard(task)
    training = method.importance_training(ClientRoundInput(1, 0, Message(), {}, None, shard), weights)
    result = trainer.train(training, shard, RngContext(0, 1, 0))
    return {name: total / result.samples for name, total in result.kept.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("kind", ["ewc", "mas"])
def test_importance_and_penalty(kind: str, net: Net, trainer: Trainer) -> None:
    """Fisher of the labels and Ω after each of two tasks, and the gradient of a step of the third."""
    method = make_method(kind, net)
    penalty = None
    measured: list[dict[str, Tensor]] = []
    for task in range(2):
        anchor = group(f"{kind}.anchor.{task}")
        measured.append(importance(method, trainer, task, anchor))
        penalty = method.consolidate(penalty, measured[-1], anchor)
    assert penalty is not None
    assert_close(measured[0], group(f"{kind}.importance.0"))
    if kind == "ewc":
        assert_close(measured[1], group("ewc.importance.1"))
    else:
        mean = {name: (tensor + measured[1][name]) / 2 for name, tensor in measured[0].items()}
        assert_close(mean, group("mas.importance.mean"))

    weights = {name: tensor.requires_grad_() for name, tensor in group(f"{kind}.weights").items()}
    logits = functional_call(net.module.vit, weights, (AVALANCHE[f"{kind}.images"],))
    plain = torch.autograd.grad(
        F.cross_entropy(logits, AVALANCHE[f"{kind}.labels"]), list(weights.values()), retain_graph=True
    )
    labels, one = AVALANCHE[f"{kind}.labels"], torch.ones(1)
    outputs = Outputs(logits, labels, one, one.long(), weights, penalty.tensors(), one)
    loss = PenalizedStep(method.factor * method.params.penalty_weight).loss(outputs)
    assert float(loss.detach()) == pytest.approx(float(AVALANCHE[f"{kind}.loss"]), rel=1e-5)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    assert_close(dict(zip(weights, gradients, strict=True)), group(f"{kind}.gradient"))
    assert max(float((a - b).abs().max()) for a, b in zip(plain, gradients, strict=True)) > 1e-2  # the penalty counts


@pytest.mark.parametrize("kind", ["gem", "agem"])
def test_projected_gradient(kind: str, net: Net) -> None:
    """Stored gradients by autograd at Avalanche's weights, and the gradient that it stepped along."""
    before, after, rows = group(f"{kind}.before"), group(f"{kind}.after"), AVALANCHE[f"{kind}.references"]
    assert max(float((before[name] - after[name]).abs().max()) for name in before) > 1e-3  # it was projected
    # The order of Avalanche's vectors is that of the module's parameters.
    shapes = {name: tensor.shape for name, tensor in net.module.vit.named_parameters()}
    parts = torch.split(rows, [shape.numel() for shape in shapes.values()], dim=1)
    references = {
        name: part.reshape(len(rows), *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
    margin = GEM_STRENGTH if kind == "gem" else 0.0
    # Avalanche, as GEM's authors, adds 1e-3 to the diagonal of the quadratic programme: one more number per reference.
    ridge = {"ridge": 1e-3**0.5 * torch.eye(len(rows))} if kind == "gem" else {}
    gradient = {**before, **{name: torch.zeros(len(rows)) for name in ridge}}
    present = torch.ones(len(rows), dtype=torch.bool)
    projected, _ = project(gradient, References({**references, **ridge}, present), margin=margin)
    assert_close({name: projected[name] for name in before}, after)
    if kind == "gem":
        for task, row in enumerate(rows):
            shard = task_shard(task)
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in group("gem.weights").items()}
            pixels = (shard.images.images[shard.index] / 255 - 0.5) / 0.5
            loss = F.cross_entropy(functional_call(net.module.vit, leaves, (pixels,)), shard.labels)
            own = torch.autograd.grad(loss, [leaves[name] for name in shapes])
            torch.testing.assert_close(torch.cat([part.flatten() for part in own]), row, rtol=1e-4, atol=1e-5)


def test_loss_of_der() -> None:
    """Avalanche replays one batch for both terms: here each of its samples is drawn once for each."""
    logits, labels, stored = AVALANCHE["der.logits"], AVALANCHE["der.labels"], AVALANCHE["der.stored_logits"]
    replayed_count = len(stored)
    count = 2 * replayed_count
    twice = torch.arange(replayed_count).repeat_interleave(2)
    share = torch.full((count,), 1 / count)
    epoch = torch.tensor(0)
    replayed = Outputs(logits[twice], labels[twice], share, twice, {}, {}, epoch, stored={"logits": stored[twice]})
    batch, rest = logits[replayed_count:], labels[replayed_count:]
    one = torch.ones(len(rest))
    outputs = Outputs(batch, rest, one / len(rest), one.long(), {}, {}, epoch)
    loss = DarkExperienceStep(DER_ALPHA, DER_BETA, replays=1).loss(outputs, replayed)
    assert float(loss) == pytest.approx(float(AVALANCHE["der.loss"]), rel=1e-5)
