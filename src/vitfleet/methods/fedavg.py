"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

Each round the server sends its weights to some clients; each trains them on its own images for a few epochs
and sends them back; the server takes the mean, weighted by the clients' samples (Algorithm 1).
"""

from __future__ import annotations

from typing import TypeVar

from vitfleet.config.base import Table
from vitfleet.config.methods import FedAvgConfig
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregate import WeightedMean
from vitfleet.methods.base import Answer, Gathering, Job, Method, Work, tally
from vitfleet.models.anatomy import Selection
from vitfleet.train.objective import Fit, Objective

Params = TypeVar("Params", bound=Table)


class Averaging(Method[Params]):
    """The frame FedAvg shares with its kin: a selection of weights trains, travels and is averaged.

    What the selection leaves out stays as it was initialised; a client is given it once.
    """

    @property
    def trains(self) -> Selection:
        """The whole model."""
        return self.anatomy.whole

    def objective(self) -> Objective:
        """Return what a client optimises: the mean cross-entropy."""
        return Objective(self.trains)

    def base(self, initial: Tensors) -> Message:
        """Give every client, once, what neither trains nor travels."""
        trains = set(self.trains)
        return Message({name: tensor for name, tensor in initial.items() if name not in trains})

    def start(self, initial: Tensors) -> State:
        """Start from the initial model."""
        return State(self.trains.take(initial))

    def instruct(self, server: State, round: int, client: int, since: int | None) -> Message:
        """Send the current weights."""
        return Message(server.tensors)

    def gather(self, server: State, round: int) -> Gathering:
        """Average what comes back."""
        return WeightedMean(server, self.setting.aggregate)

    def work(self, job: Job) -> Work:
        """Train the received weights and send them back."""
        received = {**job.base, **job.down.tensors}
        fitted = yield Fit(received, self.objective(), self.setting.train.epochs, job.down.tensors)
        # Who has no images has no say, and need not send the model back.
        sends = fitted.weights if fitted.samples else {}
        return Answer(Message(sends, tally(fitted)), {**received, **fitted.weights})

    def model(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Every client uses the server's weights."""
        return {**base, **server.tensors}


class FedAvg(Averaging[FedAvgConfig]):
    """Federated averaging of the whole model."""

    name = "fedavg"
