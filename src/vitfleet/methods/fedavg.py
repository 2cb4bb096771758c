"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

Each round the server sends its weights to some clients; each trains them on its own images for a few epochs
and sends them back; the server takes the mean, weighted by the clients' samples (Algorithm 1).
"""

from __future__ import annotations

from typing import TypeVar

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientJob, ClientUpdate, Method, train_metrics
from vitfleet.models.anatomy import Selection
from vitfleet.training.objective import Fit, Objective

Params = TypeVar("Params", bound=MethodParams)


class WeightAveraging(Method[Params]):
    """The frame FedAvg shares with its kin: a selection of weights trains, travels and is averaged.

    What the selection leaves out stays as it was initialised; a client is given it once.
    """

    @property
    def trainable(self) -> Selection:
        """The whole model."""
        return self.anatomy.whole

    def objective(self) -> Objective:
        """Return what a client optimises: the mean cross-entropy."""
        return Objective(self.trainable)

    def base_message(self, initial: Tensors) -> Message:
        """Give every client, once, what neither trains nor travels."""
        trains = set(self.trainable)
        return Message({name: tensor for name, tensor in initial.items() if name not in trains})

    def initial_state(self, initial: Tensors) -> State:
        """Start from the initial model."""
        return State(self.trainable.take(initial))

    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Send the current weights."""
        return Message(server.tensors)

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Average what comes back."""
        return WeightedMean(server, self.context.aggregate)

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train the received weights and send them back."""
        received = {**job.base_weights, **job.message.tensors}
        fitted = yield Fit(received, self.objective(), self.context.train.epochs, job.message.tensors)
        # Who has no images has no say, and need not send the model back.
        sends = fitted.weights if fitted.samples else {}
        return ClientUpdate(Message(sends, train_metrics(fitted)), {**received, **fitted.weights})

    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Every client uses the server's weights."""
        return {**base, **server.tensors}


class FedAvgParams(MethodParams):
    """Federated averaging, weighted by samples (McMahan et al., 2017)."""


@register_method("fedavg", FedAvgParams)
class FedAvg(WeightAveraging[FedAvgParams]):
    """Federated averaging of the whole model."""
