"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.

FedAvg of the body. Body and head are trained together; the head stays local. On tasks it is FedAvg with local heads.
"""

from __future__ import annotations

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.shared_body import LocalTraining, LocalTrainingResult, SharedBody
from vitfleet.training.objective import Fit, Objective


class FedPerParams(MethodParams):
    """FedAvg of the body; every client keeps its own head (FedPer)."""


@register_method("fedper", FedPerParams, title="FedPer")
class FedPer(SharedBody[FedPerParams]):
    """Federated averaging of the body."""

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Train body and head together."""
        result = yield Fit(weights, Objective(self.trainable), self.context.train.epochs)
        return LocalTrainingResult({**weights, **result.weights}, result)
