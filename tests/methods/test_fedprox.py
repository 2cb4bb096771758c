"""FedProx adds μ/2·‖w − w_t‖², squared: its gradient is FedAvg's plus μ(w − w_t)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import NO_IMAGES, MakeContext, MakeShard, MakeTrainer
from vitfleet.message import Tensors
from vitfleet.methods import ClientRoundInput, MethodContext
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.averaging.fedprox import FedProx, FedProxParams, ProximalStep
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Outputs, Samples
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.step import Step, StepView

PLACE = RngContext(0, 1, 0)


def training_of(method: FedAvg | FedProx, net: Net) -> LocalTraining:
    """Return the training that the client half asks for in its first round."""
    server = method.initial_state(net.initial_weights())
    down = method.message_to_client(server, round=1, client=0, last_round=None)
    return next(
        method.client_update(
            ClientRoundInput(1, 0, down, method.initial_broadcast(net.initial_weights()).tensors, None, NO_IMAGES)
        )
    )


def loss_of(mu: float, context: MethodContext, outputs: Outputs) -> Tensor:
    step = FedProx(FedProxParams(mu=mu), context).step
    assert isinstance(step, ProximalStep)
    return step.loss(outputs)


def distance(left: Tensors, correct: Tensors) -> float:
    return float(torch.stack([(left[name] - correct[name]).double().square().sum() for name in correct]).sum().sqrt())


@pytest.mark.parametrize("mu", [0.0, 0.25, 2.0, 64.0])  # powers of two: the arithmetic below is exact
def test_the_gradient_is_that_of_the_cross_entropy_plus_mu_times_the_way_from_the_anchor(
    mu: float, make_context: MakeContext
) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 4, generator=random)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    weights = {
        "w": torch.randn(3, 4, generator=random).requires_grad_(),
        "b": torch.randn(3, generator=random).requires_grad_(),
    }
    anchor = {name: torch.randn(weight.shape, generator=random) for name, weight in weights.items()}
    leaves = list(weights.values())
    share = torch.full((6,), 1 / 6)

    losses = F.cross_entropy(F.linear(inputs, weights["w"], weights["b"]), labels, reduction="none")
    plain = torch.autograd.grad(torch.dot(losses, share), leaves)

    outputs = Outputs(
        F.linear(inputs, weights["w"], weights["b"]), labels, share, torch.arange(6), weights, anchor, torch.tensor(0)
    )
    proximal = torch.autograd.grad(loss_of(mu, make_context(), outputs), leaves)
    for name, gradient, without in zip(weights, proximal, plain, strict=True):
        assert torch.equal(gradient, without + mu * (weights[name] - anchor[name]).detach()), name


def test_the_loss_is_the_closed_form(make_context: MakeContext) -> None:
    logits = torch.tensor([[0.0, 0.0]])
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    anchor = {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor(0.0)}
    outputs = Outputs(logits, torch.tensor([0]), torch.ones(1), torch.arange(1), weights, anchor, torch.tensor(0))
    loss = loss_of(0.1, make_context(), outputs)
    assert float(loss) == pytest.approx(torch.tensor(2.0).log().item() + 0.05 * (1 + 4 + 9), rel=1e-6)


@dataclass(frozen=True)
class KeepsFirst:
    """Keeps the first step's gradients."""

    step: Step

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        gradients = self.step(view, batch)
        view.keep(view.map(self.first, view.kept, gradients))
        return gradients

    def first(self, kept: Tensors, gradients: Tensors) -> Tensors:
        first = {name: torch.where(kept["seen"] > 0, kept[name], gradient) for name, gradient in gradients.items()}
        return {**first, "seen": kept["seen"] + 1}


def test_a_trainer_takes_that_gradient_on_a_whole_vit(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    weights = tiny_net.initial_weights()
    moved = {name: weight + 0.1 for name, weight in weights.items()}

    def gradients(method: FedAvg | FedProx) -> Tensors:
        training = training_of(method, tiny_net)
        room = {name: torch.zeros_like(weight) for name, weight in weights.items()} | {"seen": torch.zeros(())}
        away = replace(training, weights=moved, step=KeepsFirst(training.step), kept=room)
        seen = make_trainer().train(away, make_shard(0, 12), PLACE).kept
        return {name: gradient for name, gradient in seen.items() if name != "seen"}

    plain = gradients(FedAvg(FedAvgParams(), make_context()))
    proximal = gradients(FedProx(FedProxParams(mu=0.5), make_context()))
    assert set(proximal) == set(tiny_net.parts.shapes)
    for name, gradient in proximal.items():
        expected: Tensor = plain[name] + 0.5 * (moved[name] - weights[name])
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7)


def train(
    method: FedAvg | FedProx, net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, **config: object
) -> LocalResult:
    return make_trainer(**config).train(training_of(method, net), make_shard(0, 30), PLACE)


def test_mu_zero_is_fedavg_bit_for_bit(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    context = make_context(epochs=3)
    prox, avg = (
        train(method, tiny_net, make_trainer, make_shard, batch_size=8, max_grad_norm=1.0)
        for method in (FedProx(FedProxParams(mu=0), context), FedAvg(FedAvgParams(), context))
    )
    assert all(torch.equal(prox.weights[name], avg.weights[name]) for name in tiny_net.parts.shapes)
    assert torch.equal(prox.loss, avg.loss)


def test_the_larger_mu_the_closer_to_the_anchor(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    sgd: dict[str, object] = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "lr": 0.01, "batch_size": 4}
    ways = []
    for mu in (0.0, 1.0, 15.0):
        method = FedProx(FedProxParams(mu=mu), make_context(epochs=5))
        trained = train(method, tiny_net, make_trainer, make_shard, **sgd)
        ways.append(distance(trained.weights, tiny_net.initial_weights()))
    assert ways[0] > ways[1] > ways[2] > 0
    assert ways[2] < 0.5 * ways[0]


def test_the_anchor_is_what_was_sent_this_round_not_the_first_model(tiny_net: Net, make_context: MakeContext) -> None:
    method = FedProx(FedProxParams(), make_context())
    server = method.initial_state({name: weight + 1 for name, weight in tiny_net.initial_weights().items()})
    down = method.message_to_client(server, round=5, client=0, last_round=2)
    training = next(method.client_update(ClientRoundInput(5, 0, down, {}, None, NO_IMAGES)))
    assert all(torch.equal(training.constants[name], server.tensors[name]) for name in tiny_net.parts.shapes)
