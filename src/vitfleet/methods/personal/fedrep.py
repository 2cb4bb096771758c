"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", 2021.

In each round a client first trains its head for some epochs with the body frozen, then the body for the remaining
epochs with the head frozen (Algorithm 1). The server averages the bodies.
"""

from __future__ import annotations

from pydantic import Field

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.params import check_head_epochs
from vitfleet.methods.personal.shared_body import ClientTraining, SharedBody, TrainedClient
from vitfleet.training.local_training import LocalTraining


class FedRepParams(MethodParams):
    """Head epochs with the body frozen, then body epochs with the head frozen; the body is averaged (FedRep)."""

    head_epochs: int = Field(1, ge=0, description="of train.epochs, those that train the head; the rest train the body")


@register_method("fedrep", FedRepParams, title="FedRep")
class FedRep(SharedBody[FedRepParams]):
    """Head epochs, then body epochs."""

    @classmethod
    def check_config(cls, params: FedRepParams, config: Config) -> None:
        """Check that at least one epoch remains for the body."""
        super().check_config(params, config)
        check_head_epochs(params.head_epochs, config.train.epochs)

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train the head, then the body."""
        epochs, head_epochs = self.context.train.epochs, self.params.head_epochs
        if head_epochs:
            head_result = yield LocalTraining(weights, self.parts.head, head_epochs)
            weights = {**weights, **head_result.weights}
        result = yield LocalTraining(weights, self.parts.body, epochs - head_epochs)
        return TrainedClient({**weights, **result.weights}, result)
