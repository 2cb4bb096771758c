"""A fleet answers requests; a failure is a reply too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vitfleet.message import Message, State


@dataclass(frozen=True)
class Request:
    """What a client is asked: the server's message for one round, and whether to try its model out afterwards.

    Attributes
    ----------
    stage
        The place in its stream of tasks, from 0; where there is no stream, always 0.
    since
        The last round whose reply the server took from this client; ``None``: a newcomer, who is given the
        method's base too. What a client keeps counts as of that round: a round whose reply was late, lost or
        refused never happened for it.
    """

    round: int
    client: int
    message: Message
    evaluate: bool = False
    task_index: int = 0
    last_round: int | None = None


@dataclass(frozen=True)
class EvalResult:
    """How a client's own model did on its own test images."""

    correct: int
    tested: int


@dataclass(frozen=True)
class Reply:
    """What came back: a message, or the reason why there is none.

    Attributes
    ----------
    lost
        The client no longer has what it kept: it is a newcomer from now on.
    """

    client: int
    message: Message | None
    evaluation: EvalResult | None = None
    failure: str | None = None
    state_lost: bool = False


@dataclass(frozen=True)
class EvalRequest:
    """Asks clients that learn task after task how each one's model now does on each of its first tasks.

    Attributes
    ----------
    server
        What the server has.
    stages
        So many of a client's tasks, from its first one.
    since
        Who is examined, and the last round whose reply the server took from each; ``None``: a newcomer, whose model is
        the server's.
    """

    server: State
    num_tasks: int
    last_round: Mapping[int, int | None]


@dataclass(frozen=True)
class EvalReply:
    """A client's part of an exam: how its model does on each stage, or the reason why that is not known."""

    client: int
    evaluations: tuple[EvalResult, ...] = ()
    failure: str | None = None


class Fleet(Protocol):
    """Where clients live."""

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send requests out and yield the replies as they come."""
        ...

    def commit(self, taken: Collection[int]) -> None:
        """Hear whose replies the server used: for everybody else the round never happened."""
        ...

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Examine clients and yield their marks as they come."""
        ...

    def client_state(self, client: int) -> State | None:
        """Return a client's own state, where the fleet can see it."""
        ...

    def changed_states(self) -> Mapping[int, State | None]:
        """Return the clients' states that changed since the last call: what a checkpoint must write."""
        ...


Inner = TypeVar("Inner", bound=Fleet)


@dataclass
class FleetWrapper(Generic[Inner]):
    """A fleet around another: it asks in its own way, and leaves the rest to the other."""

    inner: Inner

    def commit(self, taken: Collection[int]) -> None:
        """Pass on whose replies the server used."""
        self.inner.commit(taken)

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Let the other fleet examine its clients."""
        return self.inner.evaluate(eval_request)

    def client_state(self, client: int) -> State | None:
        """Return a client's own state, where the other fleet can see it."""
        return self.inner.client_state(client)

    def changed_states(self) -> Mapping[int, State | None]:
        """Return the clients' states that changed since the last call."""
        return self.inner.changed_states()


def in_request_order(replies: Iterable[Reply], clients: Iterable[int]) -> Iterator[Reply]:
    """Yield replies in the order of the requests, whoever was faster.

    Floating-point sums depend on their order; this makes a round's result independent of the order in which
    clients happened to finish. A reply that is early waits; one whose turn it is passes straight through, so
    a fleet that answers in order costs no memory.
    """
    early: dict[int, Reply] = {}
    incoming = iter(replies)
    for client in clients:
        while client not in early:
            reply = next(incoming, None) or Reply(client, None, failure="no reply")
            early[reply.client] = reply
            del reply  # a message may be large: nobody but its user holds it while the next one comes
        yield early.pop(client)
