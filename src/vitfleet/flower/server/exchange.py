"""One request to each client and one reply from each; a client that was restarted meanwhile receives its request again.

Requests are pushed one by one, and replies are pulled one by one in the order of the requests. So the server holds one
reply at a time, however many clients there are; early replies wait in the SuperLink. Only with over-provisioning, where
the fastest replies count, are replies pulled in the order of their arrival.

Every draw of a client depends only on its request, so a request that is handled again has the same reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from vitfleet.config.schema import FleetConfig
from vitfleet.fleet.base import EvalReply, Reply
from vitfleet.flower.server.nodes import TTL_MARGIN_S, Node, NodeDirectory
from vitfleet.flower.transport.messages import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    Clock,
    object_polling,
    pull_reply,
    push_message,
)
from vitfleet.flower.transport.payloads import EvalPayload, TrainPayload

MAX_SENT = 5  # times that a client receives the same request: one that restarts all the time is not waited for

AnyReply = TypeVar("AnyReply", Reply, EvalReply)
AnyPayload = TypeVar("AnyPayload", TrainPayload, EvalPayload)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplyFactory(Generic[AnyReply]):
    """Makes a client's reply, from a message's content or from the reason why there is none."""

    unpack: Callable[[int, RecordDict], AnyReply]
    failed: Callable[[int, str], AnyReply]
    unsent: Callable[[int, str], AnyReply]


@dataclass
class _Pending(Generic[AnyPayload]):
    """A request without a reply."""

    payload: AnyPayload
    node: Node  # to which the request was sent last
    message_ids: list[str]  # of the request's copies that may still be answered
    times_sent: int = 1
    failure: str | None = None  # why a copy was not answered, unless its client was away


@dataclass
class Exchange(Generic[AnyPayload, AnyReply]):
    """The requests of one round or evaluation, until each is answered or given up."""

    grid: Grid
    nodes: NodeDirectory
    config: FleetConfig
    clock: Clock
    message_type: str
    pack: Callable[[AnyPayload], RecordDict]
    replies: ReplyFactory[AnyReply]
    _deadline: float = field(default=0.0, init=False)
    _pending: dict[int, _Pending[AnyPayload]] = field(default_factory=dict, init=False)

    def run(self, payloads: Iterable[tuple[int, AnyPayload]], required: int | None = None) -> Iterator[AnyReply]:
        """Send each client its payload, and yield one reply per client: its own, or why there is none.

        With ``required``, clients that have not replied are given up as soon as that many replies are usable.
        """
        by_client = dict(payloads)
        nodes = self.nodes.wait_for_nodes(by_client)
        self._deadline = self.clock.now() + self.config.deadline_s
        for client, payload in by_client.items():
            if client not in nodes:
                yield self.replies.unsent(client, "not connected")
                continue
            message_id = self._push(payload, nodes[client])
            if message_id is None:
                yield self.replies.unsent(client, "Flower did not accept the message")
            else:
                self._pending[client] = _Pending(payload, nodes[client], [message_id])
        yield from self._collect(required)

    def _push(self, payload: AnyPayload, node: Node) -> str | None:
        ttl = max(1.0, self._deadline - self.clock.now()) + TTL_MARGIN_S
        message = Message(self.pack(payload), node.id, self.message_type, ttl=ttl)
        return push_message(self.grid, message)

    def _collect(self, required: int | None) -> Iterator[AnyReply]:
        usable, interval = 0, MIN_INTERVAL_S
        while self._pending:
            if usable == required:
                reason = "not waited for: enough others replied"
                yield from (self.replies.failed(client, reason) for client in self._pending)
                return
            expired = self.clock.now() >= self._deadline
            polled = list(self._pending) if self.config.over_provision or expired else list(self._pending)[:1]
            arrived = False
            for client in polled:
                reply = self._pull(client, self._pending[client])
                if reply is None and expired:
                    reply = self.replies.failed(client, self._too_late)
                if reply is None:
                    continue
                arrived = True
                del self._pending[client]
                usable += reply.failure is None
                yield reply
                del reply  # frees its message before the next one is pulled
            interval = MIN_INTERVAL_S if arrived else min(2 * interval, MAX_INTERVAL_S)
            if self._pending and not arrived:
                self.clock.sleep(interval)
                if interval == MAX_INTERVAL_S:
                    self._send_again()

    def _send_again(self) -> None:
        """Send the requests again whose clients were restarted or away: they may know nothing of them any more."""
        nodes = self.nodes.connected()
        for client, pending in self._pending.items():
            node = nodes.get(client)
            waiting = node == pending.node and pending.message_ids
            if node is None or waiting or pending.times_sent == MAX_SENT:
                continue
            logger.warning("client %s was away: its request is sent again", self.config.name_of(client))
            message_id = self._push(pending.payload, node)
            pending.times_sent += 1
            if message_id is not None:
                pending.node = node
                pending.message_ids.append(message_id)

    def _pull(self, client: int, pending: _Pending[AnyPayload]) -> AnyReply | None:
        """Return the reply to a request; ``None`` if there is none yet. Waits for a reply that is being uploaded.

        A failed copy of the request counts only once no other copy can be answered any more.
        """
        for message_id in list(pending.message_ids):
            with object_polling(self._deadline - self.clock.now()):
                answer = pull_reply(self.grid, message_id)
            if answer is None:
                continue
            if isinstance(answer, RecordDict):
                return self.replies.unpack(client, answer)
            pending.message_ids.remove(message_id)
            if answer.code != ErrorCode.NODE_UNAVAILABLE:
                incomplete = answer.code == ErrorCode.MESSAGE_UNAVAILABLE and self.clock.now() >= self._deadline
                pending.failure = self._too_late if incomplete else answer.reason
        if pending.message_ids:
            return None
        if pending.failure is not None:
            return self.replies.failed(client, pending.failure)
        if pending.times_sent == MAX_SENT or not self.nodes.may_return(client):
            return self.replies.failed(
                client, f"disconnected, and not back after fleet.rejoin_s = {self.config.rejoin_s:g}"
            )
        return None

    @property
    def _too_late(self) -> str:
        return f"no reply within fleet.deadline_s = {self.config.deadline_s:g}"
