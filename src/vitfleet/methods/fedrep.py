"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", 2021.

In a round a client first trains its head for some epochs with the body frozen, then the body for the others with the
head frozen (Algorithm 1). The bodies are averaged.
"""

from __future__ import annotations

from vitfleet.config.methods import FedRepConfig
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.shared_body import LocalGenerator, LocalResult, SharedBody
from vitfleet.train.objective import Fit, Objective


class FedRep(SharedBody[FedRepConfig]):
    """Head epochs, then body epochs."""

    name = "fedrep"

    def learn(self, job: ClientJob, weights: Tensors) -> LocalGenerator:
        """Train the head, then the body."""
        epochs, head_epochs = self.context.train.epochs, self.params.head_epochs
        if head_epochs:
            headed = yield Fit(weights, Objective(self.anatomy.head), head_epochs)
            weights = {**weights, **headed.weights}
        fitted = yield Fit(weights, Objective(self.anatomy.body), epochs - head_epochs)
        return LocalResult({**weights, **fitted.weights}, fitted)
