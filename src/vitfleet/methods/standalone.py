"""Standalone: every client trains on its own images alone. The floor that sharing must beat."""

from __future__ import annotations

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientJob, ClientUpdate, Method, train_metrics
from vitfleet.models.anatomy import Selection
from vitfleet.training.objective import Fit, Objective


class StandaloneParams(MethodParams):
    """Every client trains alone; nothing travels but the initial model."""


@register_method("standalone", StandaloneParams)
class Standalone(Method[StandaloneParams]):
    """Nothing travels but the initial model, once."""

    has_global_model = False

    @property
    def trainable(self) -> Selection:
        """The whole model."""
        return self.anatomy.whole

    def base_message(self, initial: Tensors) -> Message:
        """Give every client the same model to start from."""
        return Message(initial)

    def initial_state(self, initial: Tensors) -> State:
        """Start with nothing: the server has nothing to keep."""
        return State()

    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Send nothing."""
        return Message()

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Make nothing of the replies."""
        return NoAggregation(server)

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train on from where the last round ended."""
        fitted = yield Fit(
            self.model_weights(State(), job.base_weights, job.client_state),
            Objective(self.trainable),
            self.context.train.epochs,
        )
        return ClientUpdate(Message(numbers=train_metrics(fitted)), fitted.weights, State(fitted.weights))

    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the client's own weights; the initial ones before its first round."""
        return base if own is None else own.tensors


class NoAggregation(Aggregator):
    """Replies change nothing."""

    def __init__(self, server: State) -> None:
        self.server = server

    def add(self, client: int, up: Message) -> None:
        """Accept the reply."""

    def finish(self) -> State:
        """Return the state as it was."""
        return self.server
