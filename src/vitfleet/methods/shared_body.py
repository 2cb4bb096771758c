"""Base class of methods that share the body and keep the head local.

The server averages the body (all weights except the head). The head, and whatever else a method keeps, never leaves its
client. A client's model is the one that it trained last: the body of its last round with its own head. FedPer, FedRep,
GEM, A-GEM and FedViT differ only in the local training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from vitfleet.config.base import MethodParams
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientJob, ClientUpdate, Method, train_metrics
from vitfleet.models.anatomy import Selection
from vitfleet.training.objective import Fit, FitResult

Params = TypeVar("Params", bound=MethodParams)


@dataclass(frozen=True)
class LocalTrainingResult:
    """The result of a client's local training.

    Attributes
    ----------
    model_weights
        The whole trained model.
    fit_result
        The training whose samples and loss are reported.
    numbers
        Further numbers to report.
    extra_state
        Tensors that the client keeps besides its model.
    """

    model_weights: Tensors
    fit_result: FitResult
    numbers: Numbers = field(default_factory=dict)
    extra_state: Tensors = field(default_factory=dict)


LocalTraining: TypeAlias = Generator[Fit, FitResult, LocalTrainingResult]


class SharedBody(Method[Params]):
    """Shared body, local heads. A subclass defines the local training."""

    has_global_model = False

    @property
    def trainable(self) -> Selection:
        """The whole model, in parts or at once."""
        return self.anatomy.whole

    @abstractmethod
    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Train a client's model, yielding each training.

        Parameters
        ----------
        weights
            The received body with the client's head.
        """

    # Server

    def base_message(self, initial_weights: Tensors) -> Message:
        """Return the initial head: all clients start from the same one."""
        return Message(self.anatomy.head.take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial body."""
        return State(self.anatomy.body.take(initial_weights))

    def client_message(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the body."""
        return Message(server_state.tensors)

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the sample-weighted mean of the bodies, or the configured aggregation rule."""
        return WeightedMean(server_state, self.context.aggregation)

    # Client

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train the received body with the client's head; send the body, keep the model."""
        head = job.base_weights if job.client_state is None else self.anatomy.head.take(job.client_state.tensors)
        local = yield from self.local_training(job, {**head, **job.message.tensors})
        body = self.anatomy.body.take(local.model_weights) if local.fit_result.samples else {}
        message = Message(body, {**train_metrics(local.fit_result), **local.numbers})
        return ClientUpdate(message, local.model_weights, State({**local.model_weights, **local.extra_state}))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the model that the client trained last; before its first round, the server's body."""
        if client_state is None:
            return {**base_weights, **server_state.tensors}
        return self.anatomy.whole.take(client_state.tensors)
