"""APFL: Deng et al., "Adaptive Personalized Federated Learning", 2020 (arXiv 2003.13461).

FedAvg trains the global model w. Beside it every client trains a personal model v, and it predicts with the mixed model
v̄ = αv + (1 − α)w: parameters are mixed, not outputs. On each mini-batch ξ of a round (Algorithm 1),

    w ← w − η ∇f(w; ξ)
    v ← v − η ∇_v f(v̄; ξ) = v − η α ∇f(v̄; ξ),

both from the weights before the batch. The mixing weight follows its own derivative once a round and stays in [0, 1]:

    α ← α − η_α ⟨v − w, ∇f(v̄; ξ)⟩.

Only w is sent; the server averages it as FedAvg does, and v never influences it. v and α stay on the client.

Decisions:

- α is constant within a round and updated at its end, along the mean of the derivatives of the round's steps. (The
  authors' code takes the first batch of a round alone, and its w after the step; it mixes outputs.)
- η_α is a key of its own. In the paper it is the learning rate of SGD; that of AdamW is far too small for α.
- v has an optimiser of its own, with the settings of w's. AdamW does not depend on the scale of a gradient: there the
  factor α of v's gradient has no effect.
- v begins as the w that the client receives first.
- Between rounds v̄ mixes the client's v with the server's current w, as the paper's output does. The local accuracy of a
  round is that of v̄ with the client's own w, before it is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import ClientGenerator, ClientJob, ClientUpdate, train_metrics
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.fedavg import WeightAveraging
from vitfleet.training.objective import Fit, FitResult, Objective, Step

ALPHA = "alpha"  # in the constants of a step, a client's state and its reported numbers
ALPHA_DERIVATIVE = "alpha_derivative"


class ApflParams(MethodParams):
    """FedAvg, and a personal model on every client that is mixed with the global one (APFL)."""

    alpha: float = Field(0.5, ge=0, le=1, description="initial weight α of the personal model in the mixed model")
    learn_alpha: bool = Field(True, description="update α once a round; false: it keeps its initial value")
    alpha_lr: float = Field(0.1, ge=0, description="learning rate η_α of α")


@register_method("apfl", ApflParams, title="APFL")
class Apfl(WeightAveraging[ApflParams]):
    """Global model by FedAvg; personal models mixed with it."""

    client_metrics = (
        ClientMetric(ALPHA, "weight α of the personal model, mean over clients and rounds", "mean", form="number"),
    )

    def objective(self) -> Objective:
        """Return FedAvg's objective; its companion is the personal model."""
        return Objective(self.trainable, companion=MixedModel())

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train w and v on the same batches, update α, send w."""
        received = {**job.base_weights, **job.message.tensors}
        state = job.client_state or State(self.trainable.take(received), {ALPHA: self.params.alpha})
        alpha = _alpha(state)
        constants = {ALPHA: torch.full((), alpha, device=self.context.device)}
        result = yield Fit(
            received, self.objective(), self.context.train.epochs, constants, companion_weights=state.tensors
        )
        if self.params.learn_alpha:
            alpha = updated_alpha(alpha, self.params.alpha_lr, result)
        state = State(result.companion_weights, {ALPHA: alpha})
        message = Message(result.weights if result.samples else {}, {**train_metrics(result), ALPHA: alpha})
        return ClientUpdate(message, {**received, **self.mixed_model(result.weights, state)}, state)

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return v̄, with the server's w; of a client that has not taken part yet, w."""
        weights = {**base_weights, **server_state.tensors}
        return weights if client_state is None else {**weights, **self.mixed_model(weights, client_state)}

    def mixed_model(self, weights: Tensors, client_state: State) -> dict[str, Tensor]:
        """Return v̄ = αv + (1 − α)w. Its buffers are the personal model's, which were measured at v̄."""
        personal = client_state.tensors
        parameters = self.parts.trainable(self.trainable)
        return {**personal, **mix(parameters.take(weights), parameters.take(personal), _alpha(client_state))}


@dataclass(frozen=True)
class MixedModel:
    """The personal model v as a companion of w: its loss is that of v̄, and the derivative by α is summed up."""

    counts: tuple[str, ...] = (ALPHA_DERIVATIVE,)

    def evaluated_weights(self, companion: Tensors, step: Step) -> Tensors:
        """Return v̄."""
        return mix(step.weights, companion, step.constants[ALPHA])

    def companion_gradients(self, gradients: Tensors, companion: Tensors, step: Step) -> tuple[Tensors, Tensors]:
        """Return ∇_v f(v̄) = α ∇f(v̄), and the derivative ⟨v − w, ∇f(v̄)⟩."""
        alpha = step.constants[ALPHA]
        products = [
            ((companion[name] - weight) * gradients[name]).sum(dtype=torch.float32)
            for name, weight in step.weights.items()
        ]
        of_personal = {name: alpha * gradient for name, gradient in gradients.items()}
        return of_personal, {ALPHA_DERIVATIVE: torch.stack(products).sum()}


def mix(weights: Tensors, personal: Tensors, alpha: Tensor | float) -> dict[str, Tensor]:
    """Return αv + (1 − α)w, exactly w where v is w."""
    return {name: weight + alpha * (personal[name] - weight) for name, weight in weights.items()}


def updated_alpha(alpha: float, learning_rate: float, result: FitResult) -> float:
    """Return α after the step along its mean derivative over the steps of a round, in [0, 1]."""
    derivative = float(result.observed[ALPHA_DERIVATIVE]) / max(1, result.steps)
    return min(1.0, max(0.0, alpha - learning_rate * derivative))


def _alpha(client_state: State) -> float:
    alpha = client_state.numbers[ALPHA]
    assert isinstance(alpha, int | float)
    return float(alpha)
