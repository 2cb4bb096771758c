"""Interface between the round loop and a fleet of clients: requests, replies, the ``Fleet`` protocol."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from vitfleet.message import Message, State

#: What a client is asked for: a round of the method, or what the server solves the model's head from (``[head]``), or
#: the last one, which may see more than the head that trained (``[head.last]``).
RequestKind: TypeAlias = Literal["round", "head", "last-head"]


#: In place of the last round of a client that has the initial broadcast, and whose first round is still to come.
NO_ROUND = 0


class ClientTask(NamedTuple):
    """One task of one client. Without tasks, ``task_index`` is 0."""

    client: int
    task_index: int


@dataclass(frozen=True)
class Request:
    """Request to one client in one round: to train, or for what the server solves the head from."""

    round: int
    client: int
    message: Message
    evaluate: bool = False  # whether the client evaluates its model on its own test images after training
    task_index: int = 0  # index of the client's current task, from 0; always 0 without tasks
    # The last round whose reply the server accepted from this client. ``None`` means a new client, which also receives
    # the method's initial broadcast. A client continues from its state after that round: a round whose reply was late,
    # lost or rejected does not count. ``NO_ROUND``: it has the initial broadcast, and no state yet.
    last_round: int | None = None
    kind: RequestKind = "round"  # a request for the head leaves the client's state as it is
    max_bytes: int | None = None  # of the reply's message, where it is known what an honest client sends


@dataclass(frozen=True)
class EvalResult:
    """Accuracy of a client's model on its own test images, as counts."""

    correct: int
    tested: int


@dataclass(frozen=True)
class Reply:
    """Reply to a :class:`Request`: a message, or the reason why there is none."""

    client: int
    message: Message | None
    evaluation: EvalResult | None = None
    failure: str | None = None
    state_lost: bool = False  # The client has lost its state. The server treats it as a new client from now on.
    sent: bool = True  # whether the request was sent: to a client that is not connected nothing is


@dataclass(frozen=True)
class EvalRequest:
    """Request to evaluate each client's current model on each of its first tasks."""

    server: State
    num_tasks: int  # to evaluate, counted from a client's first task
    # By client, the last round whose reply the server accepted. ``None`` means a new client, whose model is the
    # server's. The keys are the clients to evaluate.
    last_round: Mapping[int, int | None]
    last_head: bool = (
        False  # whether the server's state has the head of ``[head.last]`` in place of the one that trained
    )


@dataclass(frozen=True)
class EvalReply:
    """One client's reply to an :class:`EvalRequest`: a result per task, or the reason why there is none."""

    client: int
    evaluations: tuple[EvalResult, ...] = ()
    failure: str | None = None


class Fleet(Protocol):
    """A set of clients that train and evaluate on request."""

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send requests to clients and yield their replies as they arrive."""

    def commit(self, accepted: Collection[int]) -> None:
        """Make the last round final for the clients whose replies the server accepted, and undo it for all others."""

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Evaluate clients' models on their tasks and yield the replies as they arrive."""

    def client_state(self, client: int) -> State | None:
        """Return a client's state; ``None`` if it has none, or if the fleet has no access to it."""

    def changed_states(self) -> Mapping[int, State | None]:
        """Return the client states that changed since the last call. A checkpoint must write them."""


Inner = TypeVar("Inner", bound=Fleet)


@dataclass
class FleetWrapper(Generic[Inner]):
    """Base of a fleet that trains in its own way and delegates everything else to another fleet."""

    inner: Inner

    def commit(self, accepted: Collection[int]) -> None:
        """Delegate to the inner fleet."""
        self.inner.commit(accepted)

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Delegate to the inner fleet."""
        return self.inner.evaluate(eval_request)

    def client_state(self, client: int) -> State | None:
        """Delegate to the inner fleet."""
        return self.inner.client_state(client)

    def changed_states(self) -> Mapping[int, State | None]:
        """Delegate to the inner fleet."""
        return self.inner.changed_states()


def in_request_order(replies: Iterable[Reply], clients: Iterable[int]) -> Iterator[Reply]:
    """Yield replies in the order of the requests, whatever the order of their arrival.

    Floating-point sums depend on their order. This makes a round's result independent of the order in which clients
    finish. An early reply is held back. A reply that is next in order passes through at once, so a fleet that replies
    in order costs no memory.
    """
    early: dict[int, Reply] = {}
    incoming = iter(replies)
    for client in clients:
        while client not in early:
            reply = next(incoming, None) or Reply(client, None, failure="no reply")
            early[reply.client] = reply
            del reply  # a message may be large: only its user holds it while the next one arrives
        yield early.pop(client)
