"""What a client's bytes, or Flower's answer to a request, can do to a round: one client fails, the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from loopback import HandleMessage, LoopbackGrid

from conftest import MakeConfig
from vitfleet.config.schema import FleetConfig
from vitfleet.fleet.base import Reply
from vitfleet.flower.server import processes
from vitfleet.flower.server.exchange import MAX_SENT, Exchange, ReplyFactory
from vitfleet.flower.server.nodes import NodeDirectory
from vitfleet.flower.server.processes import ServerSettings
from vitfleet.flower.transport.messages import Clock
from vitfleet.flower.transport.payloads import CLIENT_NAME, HEADER, TrainPayload

CLIENTS = 2
USED = "used"  # instead of a failure, where a content arrived
AWAY = Error(code=ErrorCode.NODE_UNAVAILABLE, reason="no heartbeat")


def content() -> RecordDict:
    return RecordDict({HEADER: ConfigRecord({CLIENT_NAME: "0"})})


def not_json() -> object:
    """Read a content whose records are not listed as JSON, as Flower does with a client's bytes."""
    record = content()[HEADER]
    body = b"x" * 10
    forged = f"RecordDict {record.object_id} {len(body)}".encode() + b"\x00" + body
    return inflate({"it": forged, record.object_id: record.deflate()})


def no_protobuf() -> object:
    return inflate({"it": b"ConfigRecord  4\x00\xff\xff\xff\xff"})


def too_deep() -> object:
    """Read objects in objects, 5,000 of them. Flower's tree of a message need not say that they are nested."""
    names = ["it", *(f"{number:064x}" for number in range(5000))]
    return inflate({name: f"RecordDict {child} 2".encode() + b"\x00{}" for name, child in pairwise(names)})


def inflate(objects: dict[str, bytes]) -> object:
    for forged in objects.values():
        validate_object_content(forged)  # the SuperLink accepts it
    return inflate_object_from_contents("it", objects)


@dataclass
class OddGrid(LoopbackGrid):
    """A grid that does something else once: at the pull of one message, or at a push."""

    odd: dict[str, Callable[[], object]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # pushes, counted from 1

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return ["" if int(id) in self.refused else id for id in super().push_messages(messages)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        pulled = [self.odd.pop(id)() for id in wanted if id in self.odd]
        return [*(message for message in pulled if isinstance(message, Message)), *super().pull_messages(wanted)]


@dataclass
class Round:
    """One exchange with two clients on a clock that advances only when the server sleeps."""

    config: FleetConfig
    handle: HandleMessage = lambda client, message: content()
    time: float = 0.0

    def __post_init__(self) -> None:
        self.grid = OddGrid(self.handle, [self.config.name_of(client) for client in range(CLIENTS)])
        self.clock = Clock(lambda: self.time, self.sleep)
        self.nodes = NodeDirectory(self.grid, self.config, self.clock)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def outcomes(self) -> list[str | None]:
        """Return what became of each client's request."""
        replies = ReplyFactory(
            lambda client, record: Reply(client, None, failure=USED),
            lambda client, reason: Reply(client, None, failure=reason),
            lambda client, reason: Reply(client, None, failure=reason, sent=False),
        )
        exchange: Exchange[TrainPayload, Reply] = Exchange(
            self.grid, self.nodes, self.config, self.clock, "train", lambda payload: content(), replies
        )
        payload = cast(TrainPayload, None)
        by_client = {reply.client: reply.failure for reply in exchange.run([(0, payload), (1, payload)])}
        return [by_client[client] for client in range(CLIENTS)]


@pytest.fixture
def fleet_config(tiny_config: MakeConfig) -> FleetConfig:
    fleet = tiny_config(f"fleet.clients={CLIENTS}", f"fleet.per_round={CLIENTS}").fleet
    return fleet.model_copy(update={"kind": "flower"})


@pytest.mark.parametrize(
    ("read", "error"), [(not_json, "JSONDecodeError"), (no_protobuf, "DecodeError"), (too_deep, "RecursionError")]
)
def test_reply_that_flower_cannot_read_is_a_failure_of_its_client(
    read: Callable[[], object], error: str, fleet_config: FleetConfig
) -> None:
    round = Round(fleet_config)
    round.grid.odd["1"] = read
    assert round.outcomes() == [f"its reply cannot be read ({error})", USED]


def test_reply_that_names_another_request_is_ignored(fleet_config: FleetConfig) -> None:
    """What a reply says of itself is made by its sender, here a disconnection of a request that is not its own."""
    round = Round(fleet_config)
    other = Message(content(), 1, "train")
    other.metadata.__dict__["_message_id"] = "forged"
    round.grid.odd["1"] = lambda: Message(AWAY, reply_to=other)
    assert round.outcomes() == [USED, USED]


def test_errors_of_the_connection_to_the_superlink_are_no_fault_of_a_client(fleet_config: FleetConfig) -> None:
    def fail() -> object:
        raise ConnectionError("the SuperLink has ended")

    round = Round(fleet_config)
    round.grid.odd["1"] = fail
    with pytest.raises(ConnectionError):
        round.outcomes()


def test_nodes_that_report_no_readable_name_are_no_clients(fleet_config: FleetConfig) -> None:
    def report(node: int, message: Message) -> RecordDict | Error:
        answers: list[RecordDict | Error] = [content(), RecordDict(), AWAY, content(), content()]
        return answers[node]

    round = Round(fleet_config, report)
    round.grid.names = [""] * 5
    round.grid.odd["4"] = not_json
    round.grid.refused = {5}
    assert list(round.nodes.connected()) == [0]


def test_client_whose_heartbeat_was_late_is_asked_again(fleet_config: FleetConfig) -> None:
    """Flower dropped its request, but by the next look at the nodes it is there as if nothing had happened."""
    answers: list[RecordDict | Error] = [AWAY, content(), content()]
    round = Round(fleet_config, lambda client, message: answers.pop(0))
    assert round.outcomes() == [USED, USED]
    assert round.time < 5


def test_request_that_flower_refuses_is_not_waited_for(fleet_config: FleetConfig) -> None:
    round = Round(fleet_config)
    round.grid.refused = {1}
    assert round.outcomes() == ["Flower did not accept the message", USED]
    assert round.time == 0


def test_refused_copy_of_a_request_is_sent_again(fleet_config: FleetConfig) -> None:
    answers: list[RecordDict | Error] = [AWAY, content(), content(), content()]
    round = Round(fleet_config, lambda client, message: answers.pop(0))
    round.grid.refused = {3}
    assert round.outcomes() == [USED, USED]
    assert len(round.grid.pushed) == 4


def test_refused_copies_come_to_an_end(fleet_config: FleetConfig) -> None:
    round = Round(fleet_config, lambda client, message: content() if client else AWAY)
    round.grid.refused = set(range(3, 100))
    first, second = round.outcomes()
    assert "disconnected" in (first or "")
    assert second == USED
    assert len(round.grid.pushed) == CLIENTS + MAX_SENT - 1


def test_reply_to_one_copy_counts_though_another_copy_was_lost(fleet_config: FleetConfig) -> None:
    """A client that is restarted during its upload: by the next poll both the loss and the second reply are there."""

    def handle(client: int, message: Message) -> RecordDict | None:
        if client == 0 and not round.grid.restarts:
            round.grid.restarts[fleet_config.name_of(0)] = 1
            requests.append(message)
            return None
        if client == 0:
            lost = Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="not uploaded")
            round.grid.replies["1"] = Message(lost, reply_to=requests[0])
        return content()

    requests: list[Message] = []
    round = Round(fleet_config, handle)
    assert round.outcomes() == [USED, USED]
    assert len(round.grid.pushed) == 3


def test_superlink_that_answers_with_errors_is_polled_with_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("vitfleet.flower.server.processes.time.sleep", pauses.append)
    statuses = [503, 500, 200]

    class Starting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing."""

    with HTTPServer(("127.0.0.1", 0), Starting) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        running = cast(Any, SimpleNamespace(poll=lambda: None))
        processes.wait_for_superlink(ServerSettings("127.0.0.1", 1, tmp_path, None), server.server_port, running)
        server.shutdown()
    assert pauses == [processes.POLL_INTERVAL_S] * 2
