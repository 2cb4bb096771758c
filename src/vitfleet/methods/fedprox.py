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
from vitfleet.methods.fedavg import WeightAveraging
from vitfleet.training.objective import Objective, Step, cross_entropy


class FedProxParams(MethodParams):
    """FedAvg with a proximal term μ/2·‖w − w_t‖² on the client (Li et al., 2020)."""

    mu: float = Field(0.01, ge=0, description="weight μ of the proximal term")


@register_method("fedprox", FedProxParams, title="FedProx")
class FedProx(WeightAveraging[FedProxParams]):
    """FedAvg with a proximal term."""

    def objective(self) -> Objective:
        """Return the cross-entropy plus the proximal term. The received weights are the step's constants."""
        return Objective(self.trainable, ProximalLoss(self.params.mu))


@dataclass(frozen=True)
class ProximalLoss:
    """Cross-entropy plus μ/2·‖w − w_t‖²."""

    mu: float

    def __call__(self, step: Step) -> Tensor:
        """Return the loss of a step."""
        return cross_entropy(step) + self.mu / 2 * squared_distance(step)


def squared_distance(step: Step) -> Tensor:
    """Return ‖w − w_t‖² over the trained weights w and the received weights w_t."""
    distances = [(weight - step.constants[name]).square().sum() for name, weight in step.weights.items()]
    total = distances[0]
    for distance in distances[1:]:
        total = total + distance
    return total
