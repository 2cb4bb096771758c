"""Bad or late replies, disconnected clients, lost states: the run equals one without those replies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import MessageType
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, pull_objects
from loopback import HandleMessage, LocalClients, LoopbackGrid, defended, export_images, with_encoded_message
from test_flower_fleet import OVERRIDES, flower, same_server_state

from chaos import FleetWithoutReplies
from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.flower.server.fleet import FlowerFleet, fleet_factory
from vitfleet.flower.transport.codec import unpack_reply, unpack_train_request
from vitfleet.flower.transport.messages import Clock, object_polling
from vitfleet.flower.transport.payloads import CLIENT_NAME, HEADER
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.wire import encode

ROUNDS, CLIENTS = 5, 4
ALL_CLIENTS = (f"rounds={ROUNDS}", f"fleet.clients={CLIENTS}", f"fleet.per_round={CLIENTS}", "eval.clients=0")


@dataclass
class ManualClock:
    """A clock that advances only when a caller sleeps."""

    time: float = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.time, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def open_on_grid(
    config: Config,
    folder: Path,
    handle: HandleMessage | None = None,
    clock: ManualClock | None = None,
    names: list[str] | None = None,
) -> RunContext:
    """Open a run on clients in this process.

    Parameters
    ----------
    names
        The nodes' registered names; default: the clients' names.
    """
    clients = LocalClients(config, folder.parent / "data", folder.parent / "state")
    grid = clients.grid(handle)
    grid.names = names or grid.names
    return open_run(config, folder, make_fleet=fleet_factory(grid, (clock or ManualClock()).clock()))


def run_without_replies(config: Config, folder: Path, excluded: set[tuple[int, int]]) -> RunState:
    """Run all rounds in one process without some replies, given as (round, client)."""
    context = open_run(defended(config), folder)
    return run_rounds(replace(context, fleet=FleetWithoutReplies(context.fleet, excluded))).state


def failures(folder: Path) -> dict[tuple[int, int], str]:
    return {
        (record.round, client.client): client.failure
        for record in read_records(folder)
        for client in record.clients
        if client.failure is not None
    }


def round_of(message: Message) -> int:
    return int(str(message.content.config_records[HEADER]["round"]))


def with_changed_tensors(content: RecordDict, change: Callable[[torch.Tensor], torch.Tensor]) -> RecordDict:
    """Return a reply with every floating-point tensor changed."""
    message = unpack_reply(content, 0, int(str(content.config_records[HEADER]["round"])), 10**9).message
    assert message is not None
    tensors = {
        name: change(tensor) if tensor.is_floating_point() else tensor for name, tensor in message.tensors.items()
    }
    return with_encoded_message(content, encode(replace(message, tensors=tensors)))


# By round and client: a part of the recorded failure (alternatives separated by |), and what is sent instead.
FAULTS: Mapping[tuple[int, int], tuple[str, Callable[[RecordDict], RecordDict | Error | None]]] = {
    (1, 1): ("not finite", lambda content: with_changed_tensors(content, lambda tensor: tensor * float("nan"))),
    (2, 0): ("no reply within", lambda content: None),
    (2, 1): (
        "and the shape|has the shape|expected: torch.float32",
        lambda content: with_changed_tensors(content, lambda tensor: tensor[..., :-1]),
    ),
    (3, 2): (
        "aggregate.max_change|aggregate.norm_factor",
        lambda content: with_changed_tensors(content, lambda tensor: tensor * 1e6),
    ),
    (4, 1): ("Flower: gone", lambda content: Error(code=1, reason="gone\nat line 3")),
    (4, 3): ("cannot be read", lambda content: with_encoded_message(content, b"\x00" * 64)),
    (5, 0): ("its message has 2000000 bytes", lambda content: with_encoded_message(content, b"\x00" * 2_000_000)),
}


@pytest.mark.parametrize("name", ["fedavg", "transfl", "eftvit"])
def test_run_with_faults_equals_run_without_those_replies(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(
        *ALL_CLIENTS, f"method.name={name}", *OVERRIDES.get(name, ()), "aggregate.norm_factor=10", "data.limit=400"
    )
    export_images(config, tmp_path / "data")
    fleet = flower(config).fleet.model_copy(update={"max_message_mb": 1.0})
    flower_config = config.model_copy(update={"fleet": fleet})
    clients = LocalClients(flower_config, tmp_path / "data", tmp_path / "state")

    def handle(client: int, message: Message) -> RecordDict | Error | None:
        correct = clients.handle(client, message)
        assert isinstance(correct, RecordDict)
        fault = FAULTS.get((round_of(message), client))
        return correct if fault is None else fault[1](correct)

    context = open_on_grid(flower_config, tmp_path / "faulty", handle)
    assert same_server_state(
        run_rounds(context).state, run_without_replies(config, tmp_path / "simulation", set(FAULTS))
    )
    recorded = failures(tmp_path / "faulty")
    assert set(recorded) == set(FAULTS)
    for key, (expected, _) in FAULTS.items():
        assert any(part in recorded[key] for part in expected.split("|")), recorded[key]
    assert json.loads((tmp_path / "faulty" / "summary.json").read_text())["total"]["failures"] == len(FAULTS)


@pytest.mark.parametrize("name", ["transfl", "eftvit", "standalone"])
def test_server_killed_during_a_round_repeats_the_round(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Clients that had already replied train again from their state before that round."""
    config = tiny_config(*ALL_CLIENTS, f"method.name={name}", *OVERRIDES.get(name, ()))
    export_images(config, tmp_path / "data")
    clients = LocalClients(flower(config), tmp_path / "data", tmp_path / "state")

    def interrupt(client: int, message: Message) -> RecordDict | Error | None:
        if round_of(message) == 3 and client == 2:
            raise KeyboardInterrupt
        return clients.handle(client, message)

    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_on_grid(flower(config), tmp_path / "flower", interrupt))
    context = open_on_grid(flower(config), tmp_path / "flower")
    assert load_state(context).round == 2
    assert same_server_state(run_rounds(context).state, run_without_replies(config, tmp_path / "simulation", set()))
    assert (tmp_path / "flower/records.jsonl").read_bytes() == (tmp_path / "simulation/records.jsonl").read_bytes()


def test_client_that_lost_its_state_is_treated_as_new(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*ALL_CLIENTS, "method.name=eftvit", *OVERRIDES["eftvit"]))
    export_images(config, tmp_path / "data")
    context = open_on_grid(config, tmp_path / "run")
    state, _ = run_round(context, load_state(context), 1)
    shutil.rmtree(tmp_path / "state" / "2")
    state, record = run_round(context, state, 2)
    lost = record.clients[2]
    assert lost.failure is not None
    assert "lost its state after round 1" in lost.failure
    assert 2 not in state.last_seen
    state, record = run_round(context, state, 3)
    assert [entry.failure for entry in record.clients] == [None] * CLIENTS
    assert record.clients[2].down_bytes > record.clients[1].down_bytes, "a new client receives the initial broadcast"
    assert state.last_seen[2] == 3


def test_disconnected_client_fails_the_round_and_may_reconnect(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*ALL_CLIENTS))
    export_images(config, tmp_path / "data")
    context = open_on_grid(config, tmp_path / "run")
    assert isinstance(context.fleet, FlowerFleet)
    grid = context.fleet.grid
    assert isinstance(grid, LoopbackGrid)
    grid.disconnected = {"1"}
    state, record = run_round(context, load_state(context), 1)
    assert [entry.failure for entry in record.clients] == [None, "not connected", None, None]
    assert [entry.down_bytes > 0 for entry in record.clients] == [True, False, True, True]
    grid.disconnected = set()
    _, record = run_round(context, state, 2)
    assert all(entry.failure is None for entry in record.clients)


def test_fleet_with_spare_clients_takes_the_fastest_replies(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("fleet.clients=4", "fleet.per_round=2")
    export_images(config, tmp_path / "data")
    fleet = flower(config).fleet.model_copy(update={"over_provision": 2})
    config = config.model_copy(update={"fleet": fleet})
    clients = LocalClients(config, tmp_path / "data", tmp_path / "state")
    slow = {0, 3}
    context = open_on_grid(
        config, tmp_path / "run", lambda client, message: None if client in slow else clients.handle(client, message)
    )
    state, record = run_round(context, load_state(context), 1)
    reason = "not waited for: enough others replied"
    assert [entry.failure for entry in record.clients] == [reason, None, None, reason]
    assert set(state.last_seen) == {1, 2}


def test_round_with_too_few_replies_changes_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*ALL_CLIENTS, "fleet.min_replies=3"))
    export_images(config, tmp_path / "data")
    clients = LocalClients(config, tmp_path / "data", tmp_path / "state")
    silent = {1, 2}
    context = open_on_grid(
        config, tmp_path / "run", lambda client, message: None if client in silent else clients.handle(client, message)
    )
    before = load_state(context)
    state, record = run_round(context, before, 1)
    assert state.server is before.server
    assert not state.last_seen
    assert record.loss is None
    assert all(entry.failure for entry in record.clients)
    assert "fleet.min_replies = 3" in (record.clients[0].failure or "")
    silent.clear()
    state, record = run_round(context, state, 2)
    assert record.loss is not None
    assert state.server is not before.server


def test_nodes_without_registered_names_are_queried(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*ALL_CLIENTS))
    export_images(config, tmp_path / "data")
    clients = LocalClients(config, tmp_path / "data", tmp_path / "state")
    reported_names = {0: "2", 1: "stranger", 2: "0", 3: "1"}

    def handle(node: int, message: Message) -> RecordDict | Error | None:
        if message.metadata.message_type == "query.client_name":
            return RecordDict({HEADER: ConfigRecord({CLIENT_NAME: reported_names[node]})})
        return clients.handle(int(reported_names[node]), message)

    context = open_on_grid(config, tmp_path / "run", handle, names=[""] * CLIENTS)
    _, record = run_round(context, load_state(context), 1)
    assert [entry.failure for entry in record.clients] == [None, None, None, "not connected"]


def test_incomplete_reply_at_the_deadline_is_late(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Flower reports both an incomplete and a lost reply as unavailable."""
    config = flower(tiny_config(*ALL_CLIENTS))
    export_images(config, tmp_path / "data")
    clients = LocalClients(config, tmp_path / "data", tmp_path / "state")
    clock = ManualClock()

    def handle(client: int, message: Message) -> RecordDict | Error | None:
        if client != 1:
            return clients.handle(client, message)
        if unpack_train_request(message.content).request.round == 2:
            clock.time += config.fleet.deadline_s
        return Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="it went away")

    context = open_on_grid(config, tmp_path / "run", handle, clock)
    state = load_state(context)
    for reason in ("Flower: it went away", "no reply within fleet.deadline_s = 600"):
        state, record = run_round(context, state, state.round + 1)
        assert [entry.failure for entry in record.clients] == [None, reason, None, None]


def test_object_polling_stops_at_the_deadline() -> None:
    pulls = 0

    def pull(object_id: str) -> bytes:
        nonlocal pulls
        pulls += 1
        assert pulls < 3
        raise ObjectUnavailableError(object_id)

    defaults = pull_objects.__kwdefaults__
    assert defaults is not None
    original = dict(defaults)
    with object_polling(0.0), pytest.raises(ObjectPullError):
        pull_objects(["object"], pull)
    assert pulls == 1
    with object_polling(9.0):
        assert defaults["max_time"] == 9.0
        assert set(defaults) == set(original), "Flower still has the same parameters"
    assert defaults == original


def test_client_reports_an_error_that_its_operator_must_fix(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*ALL_CLIENTS))
    export_images(config, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "1")
    (tmp_path / "data" / "3").rename(tmp_path / "data" / "1")
    context = open_on_grid(config, tmp_path / "run")
    _, record = run_round(context, load_state(context), 1)
    recorded = [entry.failure for entry in record.clients]
    assert recorded[:3] == [None, None, None]
    assert recorded[3] == "its images do not suit the run; its owner's log says why"


def test_failed_evaluation_leaves_gaps_and_the_run_continues(tiny_config: MakeConfig, tmp_path: Path) -> None:
    tasks = (
        "data.tasks.count=2",
        "data.tasks.classes=2",
        "data.tasks.per_client=[1,2]",
        "data.tasks.rounds_per_task=1",
    )
    config = flower(tiny_config("method.name=gem", *tasks, "rounds=2"))
    export_images(config, tmp_path / "data")
    clients = LocalClients(config, tmp_path / "data", tmp_path / "state")

    def handle(client: int, message: Message) -> RecordDict | Error | None:
        if message.metadata.message_type == MessageType.EVALUATE and client == 1:
            return None
        if message.metadata.message_type == MessageType.EVALUATE and client == 2:
            return RecordDict({HEADER: ConfigRecord({"failure": "", "correct": [9, 9], "tested": [3, 3]})})
        return clients.handle(client, message)

    context = open_on_grid(config, tmp_path / "run", handle)
    result = run_rounds(context)
    for learned in result.state.task_records:
        assert learned.failures["1"].startswith("no reply within")
        assert "9 of 3 images" in learned.failures["2"]
        assert set(learned.failures) == {"1", "2"}
        assert learned.matrix[1] == learned.matrix[2] == [None, None]
        assert None not in learned.matrix[0]
    assert 0 < result.summary["continual"]["average_accuracy"] <= 1
    resumed = open_on_grid(config, tmp_path / "run", handle)
    assert load_state(resumed).task_records == result.state.task_records, "a restarted server reads its records"


def test_rejected_reply_leaves_the_client_state_unchanged(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(tiny_config("method.name=fedper", "aggregate.max_change=1e-9"), tmp_path / "run")
    summary = run_rounds(context).summary
    assert summary["total"]["failures"] == summary["total"]["participations"] > 0
    assert all(context.fleet.client_state(client) is None for client in range(context.config.fleet.clients))
