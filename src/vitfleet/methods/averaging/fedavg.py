"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

In each round the server sends its weights w_t to some of the clients. Each client k trains them for E epochs on its n_k
images and sends them back. The server takes their mean, weighted by n_k (Algorithm 1).
"""

from __future__ import annotations

from typing import TypeVar

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientRoundInput, ClientUpdate, Method, train_metrics
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.step import Step, cross_entropy_step

Params = TypeVar("Params", bound=MethodParams)


class WeightAveraging(Method[Params]):
    """Base class of FedAvg and its variants: the weights in ``trainable`` are trained, sent and averaged.

    All other weights keep their initial values. A client receives them once.
    """

    @classmethod
    def takes_head(cls, params: Params) -> bool:
        """Return true: the server has the head."""
        return True

    @property
    def step(self) -> Step:
        """The client's step: it follows the gradient of the mean cross-entropy."""
        return cross_entropy_step

    def step_constants(self, job: ClientRoundInput) -> Tensors:
        """Return the constants of the client's steps. By default there are none."""
        return {}

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the weights that are not trained."""
        trainable = set(self.trainable)
        return Message({name: weight for name, weight in initial_weights.items() if name not in trainable})

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial weights."""
        return State(self.trainable.take(initial_weights))

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the sample-weighted mean, or the configured aggregation rule."""
        return WeightedMean(server_state, self.context.aggregation)

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the received weights and send them back."""
        received = {**job.base_weights, **job.message.tensors}
        result = yield LocalTraining(
            received, self.trainable, self.context.train.epochs, self.step, constants=self.step_constants(job)
        )
        # A client without images has no weight in the mean: it sends no weights.
        sent = result.weights if result.samples else {}
        return ClientUpdate(Message(sent, train_metrics(result)), {**received, **result.weights})

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the server's model: clients have no model of their own."""
        return {**base_weights, **server_state.tensors}


class FedAvgParams(MethodParams):
    """Federated averaging, weighted by samples (McMahan et al., 2017)."""


@register_method("fedavg", FedAvgParams, title="FedAvg")
class FedAvg(WeightAveraging[FedAvgParams]):
    """Federated averaging of the whole model."""
