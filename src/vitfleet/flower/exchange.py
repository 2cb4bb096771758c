"""One request to each client and one reply from each; a client that was restarted meanwhile receives its request again.

Requests are pushed one by one, and replies are pulled one by one in the order of the requests. So the server holds one
reply at a time, however many clients there are; early replies wait in the SuperLink. Only with spare clients, where the
fastest replies count, are replies pulled in the order of their arrival.

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
from vitfleet.flower.nodes import TTL_MARGIN_S, Node, NodeDirectory
from vitfleet.flower.payloads import EvalPayload, TrainPayload
from vitfleet.flower.polling import MAX_INTERVAL_S, MIN_INTERVAL_S, Clock, object_polling

MAX_SENT = 5  # times that a client receives the same request: one that restarts all the time is not waited for
MAX_REASON_LENGTH = 200  # characters of Flower's own error messages

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
    """A request without a reply.

    Attributes
    ----------
    node
        To which the request was sent last.
    message_ids
        Of the request's copies that may still be answered.
    """

    payload: AnyPayload
    node: Node
    message_ids: list[str]
    times_sent: int = 1


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
        return next(iter(self.grid.push_messages([message])), None)

    def _collect(self, required: int | None) -> Iterator[AnyReply]:
        usable, interval = 0, MIN_INTERVAL_S
        while self._pending:
            if usable == required:
                reason = "not waited for: enough others replied"
                yield from (self.replies.failed(client, reason) for client in self._pending)
                return
            expired = self.clock.now() >= self._deadline
            polled = list(self._pending) if self.config.spare or expired else list(self._pending)[:1]
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
        """Send the requests again whose clients were restarted: their processes know nothing of them any more."""
        nodes = self.nodes.connected()
        for client, pending in self._pending.items():
            node = nodes.get(client)
            if node is None or node == pending.node or pending.times_sent == MAX_SENT:
                continue
            logger.warning("client %s was restarted: its request is sent again", self.config.name_of(client))
            message_id = self._push(pending.payload, node)
            pending.node = node
            pending.times_sent += 1
            if message_id is not None:
                pending.message_ids.append(message_id)

    def _pull(self, client: int, pending: _Pending[AnyPayload]) -> AnyReply | None:
        """Return the reply to a request; ``None`` if there is none yet. Waits for a reply that is being uploaded."""
        with object_polling(self._deadline - self.clock.now()):
            messages = list(self.grid.pull_messages(pending.message_ids)) if pending.message_ids else []
        for message in messages:
            if not message.has_error():
                return self.replies.unpack(client, message.content)
            if message.error.code != ErrorCode.NODE_UNAVAILABLE:
                incomplete = message.error.code == ErrorCode.MESSAGE_UNAVAILABLE and self.clock.now() >= self._deadline
                reason = self._too_late if incomplete else _flower_reason(message.error.reason)
                return self.replies.failed(client, reason)
            pending.message_ids.remove(message.metadata.reply_to_message_id)
        if not pending.message_ids and not self._may_return(client, pending):
            return self.replies.failed(
                client, f"disconnected, and not back after fleet.rejoin_s = {self.config.rejoin_s:g}"
            )
        return None

    def _may_return(self, client: int, pending: _Pending[AnyPayload]) -> bool:
        return pending.times_sent < MAX_SENT and self.nodes.may_return(client)

    @property
    def _too_late(self) -> str:
        return f"no reply within fleet.deadline_s = {self.config.deadline_s:g}"


def _flower_reason(reason: str | None) -> str:
    """Return the first line of Flower's reason for a failed message."""
    lines = (reason or "").strip().splitlines()
    return f"Flower: {lines[0][:MAX_REASON_LENGTH]}" if lines else "Flower lost the message"
