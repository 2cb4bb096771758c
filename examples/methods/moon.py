"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.

FedAvg whose clients keep the representation of an image near that of the received model and away from that of the model
they trained last (equations 3 and 4, Algorithm 1). With the representations z, z_glob, z_prev of the same images under
the weights w that train, the received w^t and the client's own w_i^{t−1}, and the cosine similarity sim,

    ℓ = ℓ_sup(w; x, y) + μ ℓ_con,
    ℓ_con = −log(exp(sim(z, z_glob)/τ) / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ))).

Decisions:

- z is the input of the model's head. The authors put a projection head of two layers before the classifier, with
  weights of its own; without it the model stays as it is, and MOON with μ = 0 is FedAvg.
- All three models see the batch as it is: augmented and masked once.
- In a client's first round its own model is the received one; ℓ_con is then constant. Later it is the one of the last
  round in which the client took part.

    vitfleet run digits --plugin moon.py -o method.name=moon -o method.mu=5
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors, add_prefix, with_prefix
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import ClientGenerator, ClientRoundInput, ClientUpdate, MethodContext, train_metrics
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

GLOBAL, PREVIOUS = "global/", "previous/"  # before the names of the other two models' weights


class MoonParams(MethodParams):
    """FedAvg with a contrastive loss between models on the client (Li et al., 2021)."""

    mu: float = Field(1.0, ge=0, description="weight μ of the contrastive loss; 0: FedAvg")
    temperature: float = Field(0.5, gt=0, description="temperature τ of the contrastive loss")


@register_method("moon", MoonParams, title="MOON")
class Moon(WeightAveraging[MoonParams]):
    """FedAvg whose clients keep their last model and compare representations with it."""

    def __init__(self, params: MoonParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if not self.parts.uniform_blocks:
            raise ConfigError("model.name", context.config.model.name, "moon needs a plain ViT, such as vit or deit")

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train with the received and the previous model beside; keep the trained model."""
        received = {**job.base_weights, **job.message.tensors}
        previous = self.trainable.take(received) if job.client_state is None else job.client_state.tensors
        result = yield LocalTraining(
            received,
            self.trainable,
            self.context.train.epochs,
            ContrastiveStep(self.params.mu, self.params.temperature),
            constants={**add_prefix(GLOBAL, job.message.tensors), **add_prefix(PREVIOUS, previous)},
        )
        sent = result.weights if result.samples else {}
        return ClientUpdate(Message(sent, train_metrics(result)), {**received, **result.weights}, State(result.weights))


@dataclass(frozen=True)
class ContrastiveStep:
    """Follows the gradient of ℓ_sup + μ ℓ_con."""

    mu: float
    temperature: float

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        z_glob, z_prev = (
            view.forward(batch, at=with_prefix(view.constants, prefix), representation=True)[0].representation
            for prefix in (GLOBAL, PREVIOUS)
        )
        return view.grad(self.loss, batch, representation=True, given=(z_glob, z_prev))

    def loss(self, outputs: Outputs, z_glob: Tensor, z_prev: Tensor) -> Tensor:
        """Return ℓ of a batch."""
        assert outputs.representation is not None
        z = outputs.representation.float()
        similarities = [F.cosine_similarity(z, other.float(), dim=-1) / self.temperature for other in (z_glob, z_prev)]
        contrastive = -torch.stack(similarities).log_softmax(dim=0)[0]
        # A sum weighted like the mean of the cross-entropy: padding has weight 0.
        return cross_entropy(outputs) + self.mu * torch.dot(contrastive, outputs.sample_weight)
