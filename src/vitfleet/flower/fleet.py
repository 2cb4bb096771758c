"""A fleet on real machines: Flower's grid carries requests to clients and their replies back.

Requests are pushed one by one, and replies are pulled one by one in the order of the requests. So the server holds one
message at a time, however many clients there are; early replies wait in the SuperLink. Only with spare clients, where
the fastest replies count, are replies pulled in the order of their arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from flwr.app import Message, RecordDict
from flwr.common import MessageType
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from vitfleet.config.plugins import used_components
from vitfleet.config.registry import AGGREGATIONS
from vitfleet.config.schema import Config, DataConfig, FleetConfig, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.fleet.base import EvalReply, EvalRequest, Reply, Request
from vitfleet.flower.codec import pack_eval_request, pack_train_request, unpack_eval_reply, unpack_reply
from vitfleet.flower.nodes import TTL_MARGIN_S, NodeDirectory
from vitfleet.flower.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.flower.polling import MAX_INTERVAL_S, MIN_INTERVAL_S, Clock, object_polling
from vitfleet.message import Message as Content
from vitfleet.message import State
from vitfleet.run.folder import run_id
from vitfleet.run.setup import MakeFleet

MEGABYTE = 10**6
MAX_REASON_LENGTH = 200  # characters of Flower's own error messages

AnyReply = TypeVar("AnyReply", Reply, EvalReply)
AnyPayload = TypeVar("AnyPayload", TrainPayload, EvalPayload)


def make_run_spec(config: Config, data: DataSet, run_id: str) -> RunSpec:
    """Return what clients must know of a run, without the paths of the server's files."""
    data_config = DataConfig(
        name=config.data.name,
        test_share=config.data.test_share,
        max_corrupt=config.data.max_corrupt,
        augment=config.data.augment,
        tasks=config.data.tasks,
    )
    model_config = config.model.model_copy(update={"weights": None})
    # What only the server uses needs not be installed on the clients.
    server_only: dict[str, object] = {"plugins": (), "metrics": {}, "callbacks": {}, "trackers": {}}
    server_only |= {"aggregate": AGGREGATIONS.make_params("mean"), "machine": MachineConfig()}
    shared = config.model_copy(update={"data": data_config, "model": model_config, **server_only})
    needed = [f"{used.kind}:{used.name}:{used.sha256}" for used in used_components(shared)]
    images = data.train
    return RunSpec(run_id, shared.model_dump_json(), list(data.classes), images.channels, images.image_size, needed)


def fleet_factory(grid: Grid, clock: Clock | None = None) -> MakeFleet:
    """Return a function with which :func:`vitfleet.run.setup.open_run` makes a fleet behind a Flower grid."""

    def make_fleet(config: Config, data: DataSet, folder: Path, base: Content) -> FlowerFleet:
        return FlowerFleet(grid, config.fleet, make_run_spec(config, data, run_id(folder)), base, clock)

    return make_fleet


@dataclass(frozen=True)
class _ReplyFactory(Generic[AnyReply]):
    """Makes a client's reply, from a message's content or from the reason why there is none."""

    unpack: Callable[[int, RecordDict], AnyReply]
    failed: Callable[[int, str], AnyReply]
    unsent: Callable[[int, str], AnyReply]


class FlowerFleet:
    """Clients behind Flower's grid, one per node.

    Parameters
    ----------
    run_spec
        Sent to a client with every request.
    base
        The method's base message. A new client receives it with its first request.
    """

    def __init__(
        self, grid: Grid, config: FleetConfig, run_spec: RunSpec, base: Content, clock: Clock | None = None
    ) -> None:
        self.grid = grid
        self.config = config
        self.run_spec = run_spec
        self.base = base
        self.clock = clock or Clock()
        self.nodes = NodeDirectory(grid, config, self.clock)

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send the requests, then yield replies until all have arrived or the deadline has passed."""
        payloads = (
            (request.client, TrainPayload(request, self.run_spec, self._base_for(request.last_round)))
            for request in requests
        )
        max_bytes = int(self.config.max_message_mb * MEGABYTE)
        replies = _ReplyFactory(
            lambda client, content: unpack_reply(content, client, max_bytes),
            lambda client, reason: Reply(client, None, failure=reason),
            lambda client, reason: Reply(client, None, failure=reason, sent=False),
        )
        yield from self._exchange(payloads, pack_train_request, MessageType.TRAIN, replies, self.config.per_round)

    def commit(self, accepted: Collection[int]) -> None:
        """Do nothing: every request names the round that its client continues from."""

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Send an evaluation request to each client, then yield replies until all have arrived or the deadline."""
        num_tasks = eval_request.num_tasks
        server = Content(eval_request.server.tensors, eval_request.server.numbers)
        payloads = (
            (client, EvalPayload(client, num_tasks, last_round, self.run_spec, server, self._base_for(last_round)))
            for client, last_round in eval_request.last_round.items()
        )
        replies = _ReplyFactory(
            lambda client, content: unpack_eval_reply(content, client, num_tasks),
            lambda client, reason: EvalReply(client, failure=reason),
            lambda client, reason: EvalReply(client, failure=reason),
        )
        yield from self._exchange(payloads, pack_eval_request, MessageType.EVALUATE, replies)

    def client_state(self, client: int) -> State | None:
        """Return ``None``: clients store their states themselves."""
        return None

    def changed_states(self) -> Mapping[int, State | None]:
        """Return nothing: clients store their states themselves."""
        return {}

    def _base_for(self, last_round: int | None) -> Content | None:
        return self.base if last_round is None else None

    def _exchange(
        self,
        payloads: Iterable[tuple[int, AnyPayload]],
        pack: Callable[[AnyPayload], RecordDict],
        message_type: str,
        replies: _ReplyFactory[AnyReply],
        required: int | None = None,
    ) -> Iterator[AnyReply]:
        """Send each client its payload and yield one reply per client, see :meth:`_collect`."""
        nodes = self.nodes.wait_for_nodes()
        deadline = self.clock.now() + self.config.deadline_s
        sent: dict[int, str] = {}
        for client, payload in payloads:
            if client not in nodes:
                yield replies.unsent(client, "not connected")
                continue
            message_id = self._push(pack(payload), nodes[client], message_type, deadline)
            if message_id is None:
                yield replies.unsent(client, "Flower did not accept the message")
            else:
                sent[client] = message_id
        yield from self._collect(sent, deadline, replies, required)

    def _push(self, content: RecordDict, node: int, message_type: str, deadline: float) -> str | None:
        ttl = max(1.0, deadline - self.clock.now()) + TTL_MARGIN_S
        return next(iter(self.grid.push_messages([Message(content, node, message_type, ttl=ttl)])), None)

    def _collect(
        self, sent: Mapping[int, str], deadline: float, replies: _ReplyFactory[AnyReply], required: int | None
    ) -> Iterator[AnyReply]:
        """Yield a reply for every sent message: the client's own, why it is invalid, or that it is too late.

        With ``required``, clients that have not replied are given up as soon as that many replies are usable.
        """
        pending = dict(sent)
        usable, interval = 0, MIN_INTERVAL_S
        while pending:
            if usable == required:
                yield from (replies.failed(client, "not waited for: enough others replied") for client in pending)
                return
            expired = self.clock.now() >= deadline
            polled = list(pending) if self.config.spare or expired else list(pending)[:1]
            arrived = False
            for client in polled:
                reply = self._pull(client, pending[client], deadline, replies)
                if reply is None and expired:
                    reply = replies.failed(client, self._too_late)
                if reply is None:
                    continue
                arrived = True
                del pending[client]
                usable += reply.failure is None
                yield reply
                del reply  # frees its message before the next one is pulled
            interval = MIN_INTERVAL_S if arrived else min(2 * interval, MAX_INTERVAL_S)
            if pending and not arrived:
                self.clock.sleep(interval)

    def _pull(self, client: int, message_id: str, deadline: float, replies: _ReplyFactory[AnyReply]) -> AnyReply | None:
        """Return the reply to a message; ``None`` if there is none yet. Waits for a reply that is being uploaded."""
        with object_polling(deadline - self.clock.now()):
            messages = self.grid.pull_messages([message_id])
        for message in messages:
            if not message.has_error():
                return replies.unpack(client, message.content)
            incomplete = message.error.code == ErrorCode.MESSAGE_UNAVAILABLE and self.clock.now() >= deadline
            return replies.failed(client, self._too_late if incomplete else _flower_reason(message.error.reason))
        return None

    @property
    def _too_late(self) -> str:
        return f"no reply within fleet.deadline_s = {self.config.deadline_s:g}"


def _flower_reason(reason: str | None) -> str:
    """Return the first line of Flower's reason for a failed message."""
    lines = (reason or "").strip().splitlines()
    return f"Flower: {lines[0][:MAX_REASON_LENGTH]}" if lines else "Flower lost the message"
