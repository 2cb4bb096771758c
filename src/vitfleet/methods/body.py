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

from vitfleet.config.base import Table
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.aggregate import WeightedMean
from vitfleet.methods.base import Answer, Gathering, Job, Method, Work, tally
from vitfleet.models.anatomy import Selection
from vitfleet.train.objective import Fit, Fitted

Params = TypeVar("Params", bound=Table)


@dataclass(frozen=True)
class Learned:
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
    fitted: Fitted
    numbers: Numbers = field(default_factory=dict)
    kept: Tensors = field(default_factory=dict)


Learning: TypeAlias = Generator[Fit, Fitted, Learned]


class SharedBody(Method[Params]):
    """Body shared, heads local."""

    has_global_model = False

    @property
    def trains(self) -> Selection:
        """The whole model, part by part or all at once."""
        return self.anatomy.whole

    @abstractmethod
    def learn(self, job: Job, weights: Tensors) -> Learning:
        """Train on from these weights, yielding each training."""

    def base(self, initial: Tensors) -> Message:
        """Give every client the same head to start from."""
        return Message(self.anatomy.head.take(initial))

    def start(self, initial: Tensors) -> State:
        """Start from the initial body."""
        return State(self.anatomy.body.take(initial))

    def instruct(self, server: State, round: int, client: int, since: int | None) -> Message:
        """Send the body."""
        return Message(server.tensors)

    def gather(self, server: State, round: int) -> Gathering:
        """Average the bodies."""
        return WeightedMean(server, self.setting.aggregate)

    def work(self, job: Job) -> Work:
        """Learn with the received body and the own head; send the body, keep the model."""
        head = job.base if job.own is None else self.anatomy.head.take(job.own.tensors)
        learned = yield from self.learn(job, {**head, **job.down.tensors})
        sends = self.anatomy.body.take(learned.model) if learned.fitted.samples else {}
        numbers = {**tally(learned.fitted), **learned.numbers}
        return Answer(Message(sends, numbers), learned.model, State({**learned.model, **learned.kept}))

    def model(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the client's own model; the server's body under the first head before its first round."""
        return {**base, **server.tensors} if own is None else self.anatomy.whole.take(own.tensors)
