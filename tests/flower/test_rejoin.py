"""Clients that disconnect during a round: back in time, they receive their request again, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common import MessageType
from flwr.common.constant import ErrorCode
from loopback import LocalClients, LoopbackGrid, export_images
from test_faults import ALL_CLIENTS, failures, round_of, run_without_replies
from test_flower_fleet import OVERRIDES, flower, same_server_state

from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.flower.exchange import MAX_SENT
from vitfleet.flower.fleet import fleet_factory
from vitfleet.flower.polling import Clock
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run

KILLED = 1


@dataclass(frozen=True)
class Loss:
    """A lost reply. Flower has an error instead once it has noticed that the client is away, and nothing before."""

    error: Error | None


UNNOTICED = Loss(None)
OFFLINE = Loss(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="no heartbeat"))


@dataclass
class Timeline:
    """A clock that advances only when a caller sleeps, and what happens at its times."""

    time: float = 0.0
    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.events.append((self.time + seconds, event))

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for moment, event in [entry for entry in self.events if entry[0] <= self.time]:
            self.events.remove((moment, event))
            event()


@dataclass
class KilledClient:
    """A fleet in this process. ``lose`` returns what Flower has instead of a reply of the client that is killed."""

    config: Config
    folder: Path
    timeline: Timeline = field(default_factory=Timeline)
    received: list[int] = field(default_factory=list)  # rounds of the training requests to the killed client
    lose: Callable[[int, int], Loss | None] = lambda round, times: None

    def __post_init__(self) -> None:
        export_images(self.config, self.folder / "data")
        self.clients = LocalClients(self.config, self.folder / "data", self.folder / "state")
        self.grid: LoopbackGrid = self.clients.grid(self.handle)

    def handle(self, client: int, message: Message) -> RecordDict | Error | None:
        reply = self.clients.handle(client, message)
        if client != KILLED or message.metadata.message_type != MessageType.TRAIN:
            return reply
        round = round_of(message)
        self.received.append(round)
        loss = self.lose(round, self.received.count(round))
        return reply if loss is None else loss.error

    def open(self) -> RunContext:
        clock = Clock(lambda: self.timeline.time, self.timeline.sleep)
        return open_run(self.config, self.folder / "run", make_fleet=fleet_factory(self.grid, clock))

    def disconnect(self) -> None:
        self.grid.disconnected = {str(KILLED)}

    def restart(self) -> None:
        self.grid.disconnected = set()
        self.grid.restarts[str(KILLED)] += 1


@pytest.mark.parametrize("name", ["transfl", "eftvit"])
@pytest.mark.parametrize("noticed", [False, True])
def test_client_killed_after_training_sends_the_same_reply_again(
    name: str, noticed: bool, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """In round 2 the client's reply is lost with its process, whether or not Flower noticed that it was away."""
    config = tiny_config(*ALL_CLIENTS, f"method.name={name}", *OVERRIDES.get(name, ()))
    fleet = KilledClient(flower(config), tmp_path)

    def lose(round: int, times: int) -> Loss | None:
        if (round, times) != (2, 1):
            return None
        if noticed:
            fleet.disconnect()
        fleet.timeline.after(40, fleet.restart)
        return OFFLINE if noticed else UNNOTICED

    fleet.lose = lose
    state = run_rounds(fleet.open()).state
    assert same_server_state(state, run_without_replies(config, tmp_path / "simulation", set()))
    assert (tmp_path / "run/records.jsonl").read_bytes() == (tmp_path / "simulation/records.jsonl").read_bytes()
    assert fleet.received == [1, 2, 2, 3, 4, 5]
    assert fleet.timeline.time < 60


def test_client_that_stays_away_is_given_up_once(tiny_config: MakeConfig, tmp_path: Path) -> None:
    fleet = KilledClient(flower(tiny_config(*ALL_CLIENTS)), tmp_path)

    def lose(round: int, times: int) -> Loss:
        fleet.disconnect()
        return OFFLINE

    fleet.lose = lose
    context = fleet.open()
    state, _ = run_round(context, load_state(context), 1)
    assert 60 <= fleet.timeline.time < 70, "not until fleet.deadline_s"
    state, record = run_round(context, state, 2)
    assert fleet.timeline.time < 70, "the next round does not wait again"
    assert record.clients[KILLED].failure == "not connected"


def test_round_waits_for_a_client_that_was_just_lost(tiny_config: MakeConfig, tmp_path: Path) -> None:
    fleet = KilledClient(flower(tiny_config(*ALL_CLIENTS)), tmp_path)
    context = fleet.open()
    state, _ = run_round(context, load_state(context), 1)
    fleet.disconnect()
    fleet.timeline.after(30, fleet.restart)
    _, record = run_round(context, state, 2)
    assert [entry.failure for entry in record.clients] == [None] * len(record.clients)


@pytest.mark.parametrize(("rejoin_s", "waited"), [(0.0, 1.0), (60.0, 70.0)])
def test_seconds_to_wait_are_a_key(rejoin_s: float, waited: float, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*ALL_CLIENTS, "rounds=1"))
    remote = config.fleet.model_copy(update={"rejoin_s": rejoin_s})
    fleet = KilledClient(config.model_copy(update={"fleet": remote}), tmp_path)

    def lose(round: int, times: int) -> Loss:
        fleet.disconnect()
        return OFFLINE

    fleet.lose = lose
    run_rounds(fleet.open())
    assert fleet.timeline.time <= waited
    assert failures(tmp_path / "run") == {
        (1, KILLED): f"disconnected, and not back after fleet.rejoin_s = {rejoin_s:g}"
    }


def test_client_that_restarts_all_the_time_is_given_up(tiny_config: MakeConfig, tmp_path: Path) -> None:
    fleet = KilledClient(flower(tiny_config(*ALL_CLIENTS, "rounds=1")), tmp_path)

    def lose(round: int, times: int) -> Loss:
        fleet.timeline.after(1, fleet.restart)
        return OFFLINE

    fleet.lose = lose
    run_rounds(fleet.open())
    assert len(fleet.received) == MAX_SENT
    assert "disconnected" in failures(tmp_path / "run")[1, KILLED]
    assert fleet.timeline.time < fleet.config.fleet.deadline_s
