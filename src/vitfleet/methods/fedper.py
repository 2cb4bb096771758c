"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.

FedAvg of the body; body and head train together, the head stays each client's own. It is FedAvg under the rule by which
FedViT's comparison is made: body shared, heads local.
"""

from __future__ import annotations

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.shared_body import LocalGenerator, LocalResult, SharedBody
from vitfleet.training.objective import Fit, Objective


class FedPerParams(MethodParams):
    """FedAvg under the rule that the body is shared and the head is each client's own (FedPer)."""


@register_method("fedper", FedPerParams)
class FedPer(SharedBody[FedPerParams]):
    """Federated averaging of the body."""

    def learn(self, job: ClientJob, weights: Tensors) -> LocalGenerator:
        """Train everything at once."""
        fitted = yield Fit(weights, Objective(self.trainable), self.context.train.epochs)
        return LocalResult({**weights, **fitted.weights}, fitted)
