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
    down: Message
    evaluate: bool = False
    stage: int = 0
    since: int | None = None


@dataclass(frozen=True)
class Verdict:
    """How a client's own model did on its own test images."""

    right: int
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
    up: Message | None
    verdict: Verdict | None = None
    failure: str | None = None
    lost: bool = False


@dataclass(frozen=True)
class Exam:
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
    stages: int
    since: Mapping[int, int | None]


@dataclass(frozen=True)
class Marks:
    """A client's part of an exam: how its model does on each stage, or the reason why that is not known."""

    client: int
    verdicts: tuple[Verdict, ...] = ()
    failure: str | None = None


class Fleet(Protocol):
    """Where clients live."""

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send requests out and yield the replies as they come."""
        ...

    def settle(self, taken: Collection[int]) -> None:
        """Hear whose replies the server used: for everybody else the round never happened."""
        ...

    def examine(self, exam: Exam) -> Iterator[Marks]:
        """Examine clients and yield their marks as they come."""
        ...

    def own(self, client: int) -> State | None:
        """Return a client's own state, where the fleet can see it."""
        ...

    def changed(self) -> Mapping[int, State | None]:
        """Return the clients' states that changed since the last call: what a checkpoint must write."""
        ...


Inner = TypeVar("Inner", bound=Fleet)


@dataclass
class FleetAround(Generic[Inner]):
    """A fleet around another: it asks in its own way, and leaves the rest to the other."""

    inner: Inner

    def settle(self, taken: Collection[int]) -> None:
        """Pass on whose replies the server used."""
        self.inner.settle(taken)

    def examine(self, exam: Exam) -> Iterator[Marks]:
        """Let the other fleet examine its clients."""
        return self.inner.examine(exam)

    def own(self, client: int) -> State | None:
        """Return a client's own state, where the other fleet can see it."""
        return self.inner.own(client)

    def changed(self) -> Mapping[int, State | None]:
        """Return the clients' states that changed since the last call."""
        return self.inner.changed()


def in_order(replies: Iterable[Reply], clients: Iterable[int]) -> Iterator[Reply]:
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
