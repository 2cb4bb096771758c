"""The frame of methods that share the body and leave every client its own head.

The server averages the body (everything but the head); a head, and whatever else a method keeps, never leaves its
client. A client's own model is the one it has trained: its body as it was when it last took part, and its head.
FedPer, FedRep, GEM, A-GEM and FedViT differ only in how a client learns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from vitfleet.config.base import MethodParams
from vitfleet.errors import ConfigError
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientJob, ClientUpdate, Method, train_metrics
from vitfleet.models.anatomy import Selection
from vitfleet.training.objective import Fit, FitResult

Params = TypeVar("Params", bound=MethodParams)


@dataclass(frozen=True)
class LocalResult:
    """What a client has learned in a round.

    Attributes
    ----------
    model
        All of its weights.
    fitted
        The training that stands for the round in the records.
    numbers
        What else is to be told.
    kept
        What the client keeps besides its model.
    """

    model: Tensors
    fitted: FitResult
    numbers: Numbers = field(default_factory=dict)
    kept: Tensors = field(default_factory=dict)


LocalGenerator: TypeAlias = Generator[Fit, FitResult, LocalResult]


class SharedBody(Method[Params]):
    """Body shared, heads local."""

    has_global_model = False

    @property
    def trainable(self) -> Selection:
        """The whole model, part by part or all at once."""
        return self.anatomy.whole

    @abstractmethod
    def learn(self, job: ClientJob, weights: Tensors) -> LocalGenerator:
        """Train on from these weights, yielding each training."""

    def base_message(self, initial: Tensors) -> Message:
        """Give every client the same head to start from."""
        return Message(self.anatomy.head.take(initial))

    def initial_state(self, initial: Tensors) -> State:
        """Start from the initial body."""
        return State(self.anatomy.body.take(initial))

    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Send the body."""
        return Message(server.tensors)

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Average the bodies."""
        return WeightedMean(server, self.context.aggregate)

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Learn with the received body and the own head; send the body, keep the model."""
        head = job.base_weights if job.client_state is None else self.anatomy.head.take(job.client_state.tensors)
        learned = yield from self.learn(job, {**head, **job.message.tensors})
        sends = self.anatomy.body.take(learned.model) if learned.fitted.samples else {}
        numbers = {**train_metrics(learned.fitted), **learned.numbers}
        return ClientUpdate(Message(sends, numbers), learned.model, State({**learned.model, **learned.kept}))

    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the client's own model; the server's body under the first head before its first round."""
        return {**base, **server.tensors} if own is None else self.anatomy.whole.take(own.tensors)


def check_head_epochs(head_epochs: int, epochs: int) -> None:
    """Check that of a round's epochs some are left for the body."""
    if head_epochs >= epochs:
        raise ConfigError(
            "method.head_epochs",
            head_epochs,
            f"must be below train.epochs = {epochs}, the rest of which trains the body",
        )
