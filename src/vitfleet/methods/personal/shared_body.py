"""Base class of methods that share the body and keep the head local.

The server averages the body (all weights except the head). The head, and whatever else a method keeps, never leaves its
client. FedPer, FedRep, GEM, A-GEM, EWC, MAS, FedViT, FedKNOW and others differ only in the local training.

Methods that are not defined by a local head have the key ``method.heads`` (:class:`HeadsParams`): with ``shared`` heads
are sent and averaged with the body. A client's model is the one that it trained last; with ``eval.body = "aggregated"``
what is shared is the server's instead.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from pydantic import Field

from vitfleet.config.base import MethodParams
from vitfleet.message import Message, Numbers, State, Tensors, add_numbers, add_prefix, with_numbers, with_prefix
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
SOLVED = "solved/"  # prefix of a head in the server's state that local heads go on from
SOLVED_OF = "solved-of/"  # prefix of the heads that are solved for single clients
SOLVED_ROUND = "solved_round"  # number in the server's state: after which round
TRAINED_ROUND, CLIENT = "round", "client"  # numbers in a client's state: the round in which it trained, and its own


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

    @classmethod
    def keeps_heads(cls, params: Params) -> bool:
        """Return whether heads are local."""
        return not (isinstance(params, HeadsParams) and params.heads == "shared")

    @property
    def shares_heads(self) -> bool:
        """Whether heads are sent and averaged with the body."""
        return not self.keeps_heads(self.params)

    @property
    def shared(self) -> Selection:
        """The weights that are sent and averaged: the body, with shared heads the whole model."""
        return self.parts.whole if self.shares_heads else self.parts.body

    @classmethod
    def takes_head(cls, params: Params) -> bool:
        """Return true: clients with local heads go on from a solved one."""
        return True

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

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the shared weights, and a solved head that the client does not have yet."""
        shared, solved = server_state.tensors, solved_head(server_state, client)
        if not solved:
            return Message(shared)
        is_known = last_round is not None and last_round > self._solved_round(server_state)
        return Message({**self.shared.take(shared), **({} if is_known else solved)})

    def _solved_round(self, server_state: State) -> int:
        round = server_state.numbers[SOLVED_ROUND]
        assert isinstance(round, int)
        return round

    def with_head(self, server_state: State, head: Tensors, round: int) -> State:
        """Return the server's state with a head; local heads are replaced by it when their clients take part again."""
        if self.shares_heads:
            return super().with_head(server_state, head, round)
        tensors = {**server_state.tensors, **add_prefix(SOLVED, head)}
        return replace(server_state, tensors=tensors, numbers={**server_state.numbers, SOLVED_ROUND: round})

    def with_client_heads(self, server_state: State, heads: Mapping[int, Tensors]) -> State:
        """Return the server's state with the heads of single clients."""
        return replace(server_state, tensors={**server_state.tensors, **add_numbers(SOLVED_OF, heads)})

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
        # Where heads are solved again, the client's model depends on whether that was after its last round.
        solved_again = self.context.config.head.is_solved_again
        numbers: Numbers = {TRAINED_ROUND: job.round, CLIENT: job.client} if solved_again else {}
        return ClientUpdate(message, local.weights, State({**local.weights, **local.extra_state}, numbers))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the model that the client trained last, or the server's shared weights with the client's head.

        Before its first round, a client has the server's weights. Where a head was solved since it trained its
        own, it has that one, and the body on which it was solved.
        """
        number = None if client_state is None else client_state.numbers.get(CLIENT)
        solved = solved_head(server_state, number if isinstance(number, int) else None)
        if client_state is None:
            return {**base_weights, **self.shared.take(server_state.tensors), **solved}
        own = self.parts.whole.take(client_state.tensors)
        trained = client_state.numbers.get(TRAINED_ROUND)
        if isinstance(trained, int) and solved and trained <= self._solved_round(server_state):
            return {**own, **self.shared.take(server_state.tensors), **solved}
        return (
            {**own, **self.shared.take(server_state.tensors)} if self.context.config.eval.body == "aggregated" else own
        )


def solved_head(server_state: State, client: int | None) -> Tensors:
    """Return the solved head that a client is to go on from: its own, or the one of all; empty if there is none."""
    of_clients = with_numbers(server_state.tensors, SOLVED_OF)
    common = with_prefix(server_state.tensors, SOLVED)
    return common if client is None else of_clients.get(client, common)
