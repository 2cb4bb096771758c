"""Joint training: a client trains on its images of all tasks up to the current one.

No paper: it is the upper bound that continual learners are compared with, because no image is ever taken away. Tasks
still arrive one after the other, so its accuracy after each task compares with that of other methods, and its rounds
take longer with every task. Otherwise it is FedPer: body and head are trained together, the body is averaged, the head
is local by default.
"""

from __future__ import annotations

from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.personal.shared_body import ClientTraining, HeadsParams, SharedBody, TrainedClient
from vitfleet.training.local_training import LocalTraining


class JointParams(HeadsParams):
    """Trains on the images of all tasks so far: the upper bound of continual learning (joint training)."""


@register_method("joint", JointParams, title="Joint training")
class Joint(SharedBody[JointParams]):
    """Federated averaging of the body, on all tasks so far."""

    needs_tasks = True
    accumulates_tasks = True

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train body and head together."""
        result = yield LocalTraining(weights, self.trainable, self.context.train.epochs)
        return TrainedClient({**weights, **result.weights}, result)
