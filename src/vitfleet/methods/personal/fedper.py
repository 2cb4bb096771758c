"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.

FedAvg of the body. Body and head are trained together; the head stays local. On tasks it is FedAvg with local heads.
"""

from __future__ import annotations

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.personal.shared_body import ClientTraining, SharedBody, TrainedClient
from vitfleet.training.local_training import LocalTraining


class FedPerParams(MethodParams):
    """FedAvg of the body; every client keeps its own head (FedPer)."""


@register_method("fedper", FedPerParams, title="FedPer")
class FedPer(SharedBody[FedPerParams]):
    """Federated averaging of the body."""

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train body and head together."""
        result = yield LocalTraining(weights, self.trainable, self.context.train.epochs)
        return TrainedClient({**weights, **result.weights}, result)
