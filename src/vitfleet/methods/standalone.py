"""Standalone: every client trains on its own images alone. The floor that sharing must beat."""

from __future__ import annotations

from vitfleet.config.methods import StandaloneConfig
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import Answer, Gathering, Job, Method, Work, tally
from vitfleet.models.anatomy import Selection
from vitfleet.train.objective import Fit, Objective


class Standalone(Method[StandaloneConfig]):
    """Nothing travels but the initial model, once."""

    name = "standalone"
    has_global_model = False

    @property
    def trains(self) -> Selection:
        """The whole model."""
        return self.anatomy.whole

    def base(self, initial: Tensors) -> Message:
        """Give every client the same model to start from."""
        return Message(initial)

    def start(self, initial: Tensors) -> State:
        """Start with nothing: the server has nothing to keep."""
        return State()

    def instruct(self, server: State, round: int, client: int, since: int | None) -> Message:
        """Send nothing."""
        return Message()

    def gather(self, server: State, round: int) -> Gathering:
        """Make nothing of the replies."""
        return Unmoved(server)

    def work(self, job: Job) -> Work:
        """Train on from where the last round ended."""
        fitted = yield Fit(self.model(State(), job.base, job.own), Objective(self.trains), self.setting.train.epochs)
        return Answer(Message(numbers=tally(fitted)), fitted.weights, State(fitted.weights))

    def model(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the client's own weights; the initial ones before its first round."""
        return base if own is None else own.tensors


class Unmoved(Gathering):
    """Replies change nothing."""

    def __init__(self, server: State) -> None:
        self.server = server

    def add(self, client: int, up: Message) -> None:
        """Accept the reply."""

    def finish(self) -> State:
        """Return the state as it was."""
        return self.server
