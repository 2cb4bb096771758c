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

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Message, State, Tensors, add_prefix, with_prefix
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import ClientGenerator, ClientRoundInput, ClientUpdate, Work, train_metrics
from vitfleet.methods.reported import ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView

ALPHA = "alpha"  # in the constants of a step, a client's state and its reported numbers
ALPHA_DERIVATIVE = "alpha_derivative"
PERSONAL = "personal/"  # before the names of the personal model's weights, where it trains beside the other


class ApflParams(MethodParams):
    """FedAvg, and a personal model on every client that is mixed with the global one (APFL)."""

    alpha: float = Field(0.5, ge=0, le=1, description="initial weight α of the personal model in the mixed model")
    learn_alpha: bool = Field(True, description="update α once a round; false: it keeps its initial value")
    alpha_lr: float = Field(0.1, ge=0, description="learning rate η_α of α")


@register_method("apfl", ApflParams, title="APFL")
class Apfl(WeightAveraging[ApflParams]):
    """Global model by FedAvg; personal models mixed with it."""

    client_metrics = (
        ClientMetric(
            ALPHA,
            "weight α of the personal model, mean over clients and rounds",
            "mean",
            form="number",
            least=0,
            most=1,
        ),
    )

    @classmethod
    def declared_work(cls, params: ApflParams, config: Config) -> Work:
        """Return the work with a pass at the personal weights beside that at the shared ones."""
        return replace(super().declared_work(params, config), passes=2)

    @classmethod
    def takes_last_head(cls, params: ApflParams) -> bool:
        """Return false: a client's model is a mixture of two heads that trained."""
        return False

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train w and v on the same batches, update α, send w."""
        received = {**job.base_weights, **job.message.tensors}
        state = job.client_state or State(self.trainable.take(received), {ALPHA: self.params.alpha})
        alpha = _alpha(state)
        personal = add_prefix(PERSONAL, state.tensors)
        result = yield LocalTraining(
            {**received, **personal},
            Selection((*self.trainable, *personal)),
            self.context.train.epochs,
            mixed_step,
            constants={ALPHA: torch.full((), alpha, device=self.context.device)},
            kept={ALPHA_DERIVATIVE: torch.zeros((), device=self.context.device)},
        )
        weights = self.trainable.take(result.weights)
        if self.params.learn_alpha:
            alpha = updated_alpha(alpha, self.params.alpha_lr, result)
        state = State(with_prefix(result.weights, PERSONAL), {ALPHA: alpha})
        message = Message(weights if result.samples else {}, {**train_metrics(result), ALPHA: alpha})
        return ClientUpdate(message, {**received, **self.mixed_model(weights, state)}, state)

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return v̄, with the server's w; of a client that has not taken part yet, w."""
        weights = {**base_weights, **server_state.tensors}
        return weights if client_state is None else {**weights, **self.mixed_model(weights, client_state)}

    def mixed_model(self, weights: Tensors, client_state: State) -> dict[str, Tensor]:
        """Return v̄ = αv + (1 − α)w. Its buffers are the personal model's, which were measured at v̄."""
        personal = client_state.tensors
        parameters = self.parts.trainable(self.trainable)
        return {**personal, **mix(parameters.take(weights), parameters.take(personal), _alpha(client_state))}


def mixed_step(view: StepView, batch: Samples) -> Tensors:
    """Return ∇f(w) for w, and α ∇f(v̄) for v; add up the derivative of f(v̄) by α."""
    personal = with_prefix(view.all_weights, PERSONAL)
    w = {name: weight for name, weight in view.weights.items() if not name.startswith(PERSONAL)}
    v = {name: personal[name] for name in w}
    of_global = view.grad(cross_entropy, batch)
    mixed = view.map(mix, w, v, view.constants[ALPHA])
    of_mixed = view.grad(cross_entropy, batch, at={**personal, **mixed})
    gradients, derivative = view.map(personal_gradients, of_mixed, w, v, view.constants[ALPHA])
    view.count({ALPHA_DERIVATIVE: derivative})
    return {**of_global, **add_prefix(PERSONAL, gradients)}


def personal_gradients(gradients: Tensors, w: Tensors, v: Tensors, alpha: Tensor) -> tuple[Tensors, Tensor]:
    """Return ∇_v f(v̄) = α ∇f(v̄), and the derivative ⟨v − w, ∇f(v̄)⟩."""
    products = [((v[name] - weight) * gradients[name]).sum(dtype=torch.float32) for name, weight in w.items()]
    return {name: alpha * gradients[name] for name in w}, torch.stack(products).sum()


def mix(weights: Tensors, personal: Tensors, alpha: Tensor | float) -> dict[str, Tensor]:
    """Return αv + (1 − α)w, exactly w where v is w."""
    return {name: weight + alpha * (personal[name] - weight) for name, weight in weights.items()}


def updated_alpha(alpha: float, learning_rate: float, result: LocalResult) -> float:
    """Return α after the step along its mean derivative over the steps of a round, in [0, 1]."""
    derivative = float(result.kept[ALPHA_DERIVATIVE]) / max(1, result.steps)
    return min(1.0, max(0.0, alpha - learning_rate * derivative))


def _alpha(client_state: State) -> float:
    alpha = client_state.numbers[ALPHA]
    assert isinstance(alpha, int | float)
    return float(alpha)
