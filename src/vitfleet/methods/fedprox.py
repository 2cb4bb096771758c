"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg whose clients minimise F_k(w) + μ/2·‖w − w_t‖², the squared distance from the weights they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitfleet.config.methods import FedProxConfig
from vitfleet.methods.fedavg import WeightAveraging
from vitfleet.train.objective import Objective, Step, cross_entropy


class FedProx(WeightAveraging[FedProxConfig]):
    """FedAvg with a proximal term."""

    name = "fedprox"

    def objective(self) -> Objective:
        """Return cross-entropy plus the proximal term; the received weights are the step's constants."""
        return Objective(self.trainable, ProximalLoss(self.params.mu))


@dataclass(frozen=True)
class ProximalLoss:
    """Cross-entropy plus μ/2·‖w − w_t‖²."""

    mu: float

    def __call__(self, step: Step) -> Tensor:
        """Return the loss of a step."""
        return cross_entropy(step) + self.mu / 2 * squared_distance(step)


def squared_distance(step: Step) -> Tensor:
    """‖w − w_t‖² over all weights that train."""
    distances = [(weight - step.constants[name]).square().sum() for name, weight in step.weights.items()]
    total = distances[0]
    for distance in distances[1:]:
        total = total + distance
    return total
