"""A fleet on real machines: Flower's grid carries orders to devices and their reports back.

Orders are pushed one by one and reports pulled one by one, in the order of the requests, so a server holds one message
at a time however many clients there are; those that came early wait in the SuperLink. Only with spare clients, where
it matters who was first, are reports pulled as they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects

from vitfleet.config.schema import Config, DataConfig, FleetConfig
from vitfleet.data.images import DataSet
from vitfleet.fleet.base import EvalReply, EvalRequest, Reply, Request
from vitfleet.flower.codec import (
    HEADER,
    pack_eval_request,
    pack_train_request,
    unpack_eval_reply,
    unpack_reply,
)
from vitfleet.flower.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message as Content
from vitfleet.message import State
from vitfleet.run.folder import identity
from vitfleet.run.setup import MakeFleet

TRAIN, EXAM, HELLO = "train", "query.exam", "query.hello"
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between looks into the SuperLink
GRACE = 3600.0  # seconds that a report which came in time may wait for its turn
MEGABYTE = 10**6
NOT_CONNECTED, NOT_TAKEN = "it is not connected", "Flower did not take the message"


@dataclass(frozen=True)
class Clock:
    """Time, so that a test can pass it by hand."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def make_run_spec(config: Config, data: DataSet, run: str) -> RunSpec:
    """Return what devices must know of a run: nothing about the server's own files."""
    shared = config.model_copy(
        update={
            "data": DataConfig(
                name=config.data.name,
                test_share=config.data.test_share,
                max_corrupt=config.data.max_corrupt,
                augment=config.data.augment,
                tasks=config.data.tasks,
            ),
            "model": config.model.model_copy(update={"weights": None}),
        }
    )
    return RunSpec(run, shared.model_dump_json(), list(data.classes), data.train.channels, data.train.image_size)


def fleet_factory(grid: Grid) -> MakeFleet:
    """Return what :func:`vitfleet.run.setup.open_run` makes a fleet behind a Flower grid with."""

    def make_fleet(config: Config, data: DataSet, folder: Path, base: Content) -> FlowerFleet:
        return FlowerFleet(grid, config.fleet, make_run_spec(config, data, identity(folder)), base)

    return make_fleet


class Outcome(Protocol):
    """What comes of a message to a device: something, or the reason why nothing did."""

    @property
    def failure(self) -> str | None:
        """The reason."""
        ...


Came = TypeVar("Came", bound=Outcome)


class FlowerFleet:
    """Clients on machines of their own, behind Flower's grid.

    Parameters
    ----------
    grid
        Flower's.
    base
        What a newcomer is given.
    """

    def __init__(
        self,
        grid: Grid,
        config: FleetConfig,
        run_spec: RunSpec,
        base: Content,
        clock: Clock = Clock(),  # noqa: B008
    ) -> None:
        self.grid = grid
        self.config = config
        self.run_spec = run_spec
        self.base = base
        self.clock = clock
        self.client_of = {config.name_of(client): client for client in range(config.clients)}
        self._names: dict[int, str] = {}  # what nodes that were not registered by name said theirs is
        self._greeted = False

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send the orders out, then take the reports in until all are there or the deadline has passed."""
        nodes = self._muster()
        end = self.clock.now() + self.config.deadline_s
        sent: dict[int, str] = {}
        for request in requests:
            node = nodes.get(request.client)
            if node is None:
                yield Reply(request.client, None, failure=NOT_CONNECTED)
                continue
            base = self.base if request.last_round is None else None
            payload = TrainPayload(request, self.run_spec, base)
            message_id = self._push(pack_train_request(payload), node, TRAIN, end)
            if message_id is None:
                yield Reply(request.client, None, failure=NOT_TAKEN)
            else:
                sent[request.client] = message_id
        limit = int(self.config.max_message_mb * MEGABYTE)
        yield from self._collect(
            sent,
            end,
            lambda client, content: unpack_reply(content, client, limit),
            lambda client, reason: Reply(client, None, failure=reason),
            self.config.per_round,
        )

    def commit(self, taken: Collection[int]) -> None:
        """Do nothing: every order says which round a device goes on from."""

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Send everybody the exam and take the marks in until all are there or the deadline has passed."""
        nodes = self._muster()
        end = self.clock.now() + self.config.deadline_s
        sent: dict[int, str] = {}
        server = Content(eval_request.server.tensors, eval_request.server.numbers)
        for client, last_round in eval_request.last_round.items():
            node = nodes.get(client)
            if node is None:
                yield EvalReply(client, failure=NOT_CONNECTED)
                continue
            payload = EvalPayload(
                client,
                eval_request.num_tasks,
                last_round,
                self.run_spec,
                server,
                self.base if last_round is None else None,
            )
            message_id = self._push(pack_eval_request(payload), node, EXAM, end)
            if message_id is None:
                yield EvalReply(client, failure=NOT_TAKEN)
            else:
                sent[client] = message_id
        yield from self._collect(
            sent,
            end,
            lambda client, content: unpack_eval_reply(content, client, eval_request.num_tasks),
            lambda client, reason: EvalReply(client, failure=reason),
            len(sent),
        )

    def client_state(self, client: int) -> State | None:
        """Return nothing: what a device keeps it keeps to itself."""
        return None

    def changed_states(self) -> Mapping[int, State | None]:
        """Return nothing: devices keep their states themselves."""
        return {}

    def _push(self, content: RecordDict, node: int, what: str, end: float) -> str | None:
        patience = max(1.0, end - self.clock.now()) + GRACE
        return next(iter(self.grid.push_messages([Message(content, node, what, ttl=patience)])), None)

    def _collect(
        self,
        sent: dict[int, str],
        end: float,
        unpack: Callable[[int, RecordDict], Came],
        fail: Callable[[int, str], Came],
        enough: int,
    ) -> Iterator[Came]:
        """Yield what came of every message: what the device sent, what is wrong with it, or that it came too late.

        Once ``enough`` are usable, nobody is waited for.
        """
        pending = dict(sent)
        usable, pause = 0, FIRST_PAUSE
        while pending:
            if usable == enough:
                yield from (fail(client, "not waited for: enough were faster") for client in pending)
                return
            over = self.clock.now() >= end
            watched = list(pending) if self.config.spare or over else list(pending)[:1]
            some = False
            for client in watched:
                came = self._pull(client, pending[client], end, unpack, fail)
                if came is None and over:
                    came = fail(client, self._too_late)
                if came is None:
                    continue
                some = True
                del pending[client]
                usable += came.failure is None
                yield came
                del came  # before the next one is pulled
            pause = FIRST_PAUSE if some else min(2 * pause, LONGEST_PAUSE)
            if pending and not some:
                self.clock.sleep(pause)

    def _pull(
        self,
        client: int,
        message_id: str,
        end: float,
        unpack: Callable[[int, RecordDict], Came],
        fail: Callable[[int, str], Came],
    ) -> Came | None:
        """Return what came of a message; ``None``: nothing yet. A report that is on its way is waited for."""
        with looking_often(end - self.clock.now()):
            messages = self.grid.pull_messages([message_id])
        for message in messages:
            if not message.has_error():
                return unpack(client, message.content)
            unfinished = message.error.code == ErrorCode.MESSAGE_UNAVAILABLE and self.clock.now() >= end
            return fail(client, self._too_late if unfinished else _in_short(message.error.reason))
        return None

    @property
    def _too_late(self) -> str:
        return f"no reply within fleet.deadline_s = {self.config.deadline_s:g}"

    # Who is there

    def _muster(self) -> dict[int, int]:
        """Return the node of every client that is connected.

        At the start of a server everybody is waited for a while; later, only until the fewest that a round needs
        are there.
        """
        needed = self.config.min_replies if self._greeted else self.config.clients
        patience = self.config.deadline_s if self._greeted else self.config.join_s
        end = self.clock.now() + patience
        self._greeted = True
        while True:
            nodes = self._connected()
            if len(nodes) >= needed or self.clock.now() >= end:
                return nodes
            self.clock.sleep(LONGEST_PAUSE)

    def _connected(self) -> dict[int, int]:
        names = {node.node_id: node.name for node in self.grid.get_nodes()}
        strangers = [node for node, name in names.items() if not name and node not in self._names]
        self._names |= {node: name for node, name in self._hear_names(strangers) if name}
        # Registered names come last, and so win: nobody takes another's by saying it.
        client_metrics = {name: node for node, name in self._names.items() if node in names}
        registered = {name: node for node, name in names.items() if name}
        return {
            self.client_of[name]: node
            for name, node in {**client_metrics, **registered}.items()
            if name in self.client_of
        }

    def _hear_names(self, nodes: list[int]) -> Iterator[tuple[int, str]]:
        """Ask nodes for their names: those of a simulation, or of a fleet without keys, are not registered by name."""
        hello = RecordDict({HEADER: ConfigRecord()})
        messages = [Message(hello, node, HELLO, ttl=self.config.join_s + GRACE) for node in nodes]
        pending = dict(zip(self.grid.push_messages(messages), nodes, strict=True)) if messages else {}
        end = self.clock.now() + max(self.config.join_s, LONGEST_PAUSE)
        while pending and self.clock.now() < end:
            for reply in self.grid.pull_messages(list(pending)):
                node = pending.pop(reply.metadata.reply_to_message_id)
                name = "" if reply.has_error() else reply.content.config_records[HEADER].get("name", "")
                yield node, str(name)
            if pending:
                self.clock.sleep(FIRST_PAUSE)


@contextmanager
def looking_often(patience: float) -> Iterator[None]:
    """Let Flower look often, but not for longer than some seconds, for the pieces of a report that is on its way.

    A report is announced before its first piece is sent. Flower's server then looks for every piece after 1, 2, 4, 8,
    10, 10, … seconds, and does so for two hours: on a slow line a round would last seconds longer than it need, and no
    deadline would hold for a device that stops while it sends. Flower has no setting for it but these defaults.
    """
    defaults = pull_objects.__kwdefaults__ or {}
    before = dict(defaults)
    defaults.update(
        initial_backoff=FIRST_PAUSE, backoff_cap=LONGEST_PAUSE, max_time=max(0.0, patience), max_tries_per_object=None
    )
    try:
        yield
    finally:
        defaults.update(before)


def _in_short(reason: str | None) -> str:
    """Say in one line what Flower says of a message that came to nothing."""
    lines = (reason or "").strip().splitlines()
    return f"Flower: {lines[0][:200]}" if lines else "Flower lost the message"
