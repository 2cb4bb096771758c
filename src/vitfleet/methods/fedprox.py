"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg whose clients minimise F_k(w) + μ/2·‖w − w_t‖², the squared distance from the weights they were sent.
"""

from __future__ import annotations

from torch import Tensor

from vitfleet.config.methods import FedProxConfig
from vitfleet.methods.fedavg import Averaging
from vitfleet.train.objective import Objective, Step, cross_entropy


class FedProx(Averaging[FedProxConfig]):
    """FedAvg with a proximal term."""

    name = "fedprox"

    def objective(self) -> Objective:
        """Return cross-entropy plus the proximal term; the received weights are the step's constants."""

        def loss(step: Step) -> Tensor:
            return cross_entropy(step) + self.params.mu / 2 * squared_distance(step)

        return Objective(self.trains, loss)


def squared_distance(step: Step) -> Tensor:
    """‖w − w_t‖² over all weights that train."""
    distances = [(weight - step.constants[name]).square().sum() for name, weight in step.weights.items()]
    total = distances[0]
    for distance in distances[1:]:
        total = total + distance
    return total
