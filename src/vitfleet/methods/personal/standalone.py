"""Standalone training: every client trains on its own images only. It is the baseline that federation must exceed."""

from __future__ import annotations

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientRoundInput, ClientUpdate, Method, train_metrics
from vitfleet.training.local_training import LocalTraining


class StandaloneParams(MethodParams):
    """Every client trains alone; nothing is sent but the initial model."""


@register_method("standalone", StandaloneParams, title="Standalone")
class Standalone(Method[StandaloneParams]):
    """Local training without federation: only the initial model is sent, once."""

    has_global_model = False

    @classmethod
    def averages_weights(cls, params: StandaloneParams) -> bool:
        """Return false: nothing is averaged."""
        return False

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial model: all clients start from the same weights."""
        return Message(initial_weights)

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return an empty state."""
        return State()

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return an empty message."""
        return Message()

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return an aggregator that ignores all updates."""
        return NoAggregation(server_state)

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Continue training from the weights of the client's last round."""
        weights = self.model_weights(State(), job.base_weights, job.client_state)
        result = yield LocalTraining(weights, self.trainable, self.context.train.epochs)
        return ClientUpdate(Message(numbers=train_metrics(result)), result.weights, State(result.weights))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the client's weights; before its first round, the initial ones."""
        return base_weights if client_state is None else client_state.tensors


class NoAggregation(Aggregator):
    """Ignores all updates."""

    def __init__(self, server_state: State) -> None:
        self.server_state = server_state

    def add(self, client: int, message: Message) -> None:
        """Accept the update."""

    def finish(self) -> State:
        """Return the unchanged state."""
        return self.server_state
