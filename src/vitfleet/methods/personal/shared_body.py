"""Base class of methods that share the body and keep the head local.

The server averages the body (all weights except the head). The head, and whatever else a method keeps, never leaves its
client. FedPer, FedRep, GEM, A-GEM, EWC, MAS, FedViT, FedKNOW and others differ only in the local training.

Methods that are not defined by a local head have the key ``method.heads`` (:class:`HeadsParams`): with ``shared`` heads
are sent and averaged with the body. A client's model is the one that it trained last; with ``eval.body = "aggregated"``
what is shared is the server's instead.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from pydantic import Field

from vitfleet.config.base import MethodParams
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    train_metrics,
)
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalResult, LocalTraining

Params = TypeVar("Params", bound=MethodParams)


class HeadsParams(MethodParams):
    """Parameters of methods that work with local and with shared heads."""

    heads: Literal["local", "shared"] = Field(
        "local", description="local: every client keeps its own head; shared: heads are averaged with the body"
    )


@dataclass(frozen=True)
class TrainedClient:
    """The result of a client's local training."""

    weights: Tensors  # the whole trained model
    result: LocalResult  # of the training whose samples and loss are reported
    numbers: Numbers = field(default_factory=dict)  # further numbers to report
    extra_state: Tensors = field(default_factory=dict)  # what the client keeps besides its model
    sent: Selection | None = None  # the weights of the body that the client sends; None: all of them
    also_sent: Tensors = field(default_factory=dict)  # further tensors to send, under names of the server's state


ClientTraining: TypeAlias = Generator[LocalTraining, LocalResult, TrainedClient]


class SharedBody(Method[Params]):
    """Shared body, local heads unless :class:`HeadsParams` says otherwise. Subclasses change the local training."""

    shares_body = True

    def __init__(self, params: Params, context: MethodContext) -> None:
        super().__init__(params, context)
        self.has_global_model = self.shares_heads

    @property
    def shares_heads(self) -> bool:
        """Whether heads are sent and averaged with the body."""
        return isinstance(self.params, HeadsParams) and self.params.heads == "shared"

    @property
    def shared(self) -> Selection:
        """The weights that are sent and averaged: the body, with shared heads the whole model."""
        return self.parts.whole if self.shares_heads else self.parts.body

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train a client's model, yielding each training: by default body and head together.

        The weights are the received body with the client's head, or the received model.
        """
        result = yield LocalTraining(weights, self.trainable, self.context.train.epochs)
        return TrainedClient({**weights, **result.weights}, result)

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial head: all clients start from the same one. Shared heads come with every message."""
        return Message({} if self.shares_heads else self.parts.head.take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial weights that are shared."""
        return State(self.shared.take(initial_weights))

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the sample-weighted mean of the shared weights, or the configured aggregation rule."""
        return WeightedMean(server_state, self.context.aggregation)

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the received weights with the client's own; send what is shared, keep the model."""
        own = job.base_weights if job.client_state is None else self.parts.whole.take(job.client_state.tensors)
        local = yield from self.local_training(job, {**own, **job.message.tensors})
        selection = self.shared if local.sent is None else local.sent
        sent = {**selection.take(local.weights), **local.also_sent} if local.result.samples else {}
        message = Message(sent, {**train_metrics(local.result), **local.numbers})
        return ClientUpdate(message, local.weights, State({**local.weights, **local.extra_state}))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the model that the client trained last, or the server's shared weights with the client's head.

        Before its first round, a client has the server's weights.
        """
        if client_state is None:
            return {**base_weights, **server_state.tensors}
        own = self.parts.whole.take(client_state.tensors)
        return {**own, **server_state.tensors} if self.context.config.eval.body == "aggregated" else own
