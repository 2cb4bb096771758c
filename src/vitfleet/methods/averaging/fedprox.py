"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg whose clients minimise F_k(w) + μ/2·‖w − w_t‖²: the local loss plus a proximal term, where w_t are the weights
received from the server (equation 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import ClientRoundInput
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import Step, StepView


class FedProxParams(MethodParams):
    """FedAvg with a proximal term μ/2·‖w − w_t‖² on the client (Li et al., 2020)."""

    mu: float = Field(0.01, ge=0, description="weight μ of the proximal term")


@register_method("fedprox", FedProxParams, title="FedProx")
class FedProx(WeightAveraging[FedProxParams]):
    """FedAvg with a proximal term."""

    @property
    def step(self) -> Step:
        """The client's step."""
        return ProximalStep(self.params.mu)

    def step_constants(self, job: ClientRoundInput) -> Tensors:
        """Return the received weights w_t."""
        return job.message.tensors


@dataclass(frozen=True)
class ProximalStep:
    """Follows the gradient of the cross-entropy plus μ/2·‖w − w_t‖²."""

    mu: float

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(self.loss, batch)

    def loss(self, outputs: Outputs) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(outputs) + self.mu / 2 * squared_distance(outputs.weights, outputs.constants)


def squared_distance(weights: Tensors, received: Tensors) -> Tensor:
    """Return ‖w − w_t‖² over the trained weights w and the received weights w_t."""
    distances = [(weight - received[name]).square().sum() for name, weight in weights.items()]
    total = distances[0]
    for distance in distances[1:]:
        total = total + distance
    return total
