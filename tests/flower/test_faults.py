"""Devices that lie, die, come late or forget: the run ends as if only the honest replies had been asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, pull_objects
from hypothesis import given
from hypothesis import strategies as st
from loopback import ClientUpdate, Devices, LoopbackGrid, deal
from test_flower_fleet import OVERRIDES, flower, same

from chaos import Restricted
from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.fleet.base import EvalReply, EvalResult, Reply
from vitfleet.flower.codec import (
    CHUNK,
    HEADER,
    pack_eval_reply,
    pack_reply,
    unpack_eval_reply,
    unpack_reply,
    unpack_train_request,
)
from vitfleet.flower.fleet import EXAM, Clock, FlowerFleet, fleet_factory, looking_often
from vitfleet.message import Message as Content
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.wire import encode

ROUNDS, CLIENTS = 5, 4
EVERYBODY = (f"rounds={ROUNDS}", f"fleet.clients={CLIENTS}", f"fleet.per_round={CLIENTS}", "eval.clients=0")


@dataclass
class Patience:
    """A clock that only sleeping moves."""

    time: float = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.time, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def open_fleet(config: Config, folder: Path, answer: ClientUpdate | None = None) -> RunContext:
    devices = Devices(config, folder.parent / "data", folder.parent / "state")
    context = open_run(config, folder, make_fleet=fleet_factory(devices.grid(answer)))
    assert isinstance(context.fleet, FlowerFleet)
    context.fleet.clock = Patience().clock()
    return context


def restricted(config: Config, folder: Path, without: set[tuple[int, int]]) -> RunState:
    context = open_run(config, folder)
    return run_rounds(replace(context, fleet=Restricted(context.fleet, without))).state


def failures(folder: Path) -> dict[tuple[int, int], str]:
    return {
        (record.round, client.client): client.failure
        for record in read_records(folder)
        for client in record.clients
        if client.failure is not None
    }


def round_of(message: Message) -> int:
    return int(str(message.content.config_records[HEADER]["round"]))


def changed(content: RecordDict, change: Callable[[torch.Tensor], torch.Tensor]) -> RecordDict:
    """Return a reply with every floating tensor changed."""
    up = unpack_reply(content, 0, 10**9).message
    assert up is not None
    tensors = {name: change(one) if one.is_floating_point() else one for name, one in up.tensors.items()}
    return with_up(content, encode(replace(up, tensors=tensors)))


def with_up(content: RecordDict, data: bytes) -> RecordDict:
    cut = {
        f"message/{place}": ConfigRecord({CHUNK: data[place * 100_000 :][:100_000]})
        for place in range(len(data) // 100_000 + 1)
    }
    return RecordDict({HEADER: content.config_records[HEADER], **cut})


FAULTS: Mapping[tuple[int, int], tuple[str, Callable[[RecordDict], RecordDict | Error | None]]] = {
    (1, 1): ("not finite", lambda content: changed(content, lambda one: one * float("nan"))),
    (2, 0): ("no reply within", lambda content: None),
    (2, 1): ("features are of shape|as torch.float32", lambda content: changed(content, lambda one: one[..., :-1])),
    (3, 2): ("aggregate.norm_factor", lambda content: changed(content, lambda one: one * 1e6)),
    (4, 1): ("Flower: gone", lambda content: Error(code=1, reason="gone\nat line 3")),
    (4, 3): ("cannot be read", lambda content: with_up(content, b"\x00" * 64)),
    (5, 0): ("fleet.max_message_mb", lambda content: with_up(content, b"\x00" * 2_000_000)),
}


@pytest.mark.parametrize("name", ["fedavg", "transfl", "eftvit"])
def test_a_run_with_faults_is_the_run_without_those_replies(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(
        *EVERYBODY, f"method.name={name}", *OVERRIDES.get(name, ()), "aggregate.norm_factor=10", "data.limit=400"
    )
    deal(config, tmp_path / "data")
    fleet = flower(config).fleet.model_copy(update={"max_message_mb": 1.0})
    on_devices = config.model_copy(update={"fleet": fleet})
    devices = Devices(on_devices, tmp_path / "data", tmp_path / "state")

    def answer(client: int, message: Message) -> RecordDict | Error | None:
        honest = devices.answer(client, message)
        assert isinstance(honest, RecordDict)
        fault = FAULTS.get((round_of(message), client))
        return honest if fault is None else fault[1](honest)

    context = open_fleet(on_devices, tmp_path / "faulty", answer)
    assert same(run_rounds(context).state, restricted(config, tmp_path / "honest", set(FAULTS)))
    said = failures(tmp_path / "faulty")
    assert set(said) == set(FAULTS)
    for place, (expected, _) in FAULTS.items():
        assert any(words in said[place] for words in expected.split("|")), said[place]
    assert json.loads((tmp_path / "faulty" / "summary.json").read_text())["total"]["failures"] == len(FAULTS)


@pytest.mark.parametrize("name", ["transfl", "eftvit", "standalone"])
def test_a_server_killed_within_a_round_goes_on_as_if_it_had_not_been(
    name: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Devices that had answered already are asked again, and start from what they had before that round."""
    config = tiny_config(*EVERYBODY, f"method.name={name}", *OVERRIDES.get(name, ()))
    deal(config, tmp_path / "data")
    devices = Devices(flower(config), tmp_path / "data", tmp_path / "state")

    def killed(client: int, message: Message) -> RecordDict | Error | None:
        if round_of(message) == 3 and client == 2:
            raise KeyboardInterrupt
        return devices.answer(client, message)

    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_fleet(flower(config), tmp_path / "flower", killed))
    context = open_fleet(flower(config), tmp_path / "flower")
    assert load_state(context).round == 2
    assert same(run_rounds(context).state, restricted(config, tmp_path / "inline", set()))
    assert (tmp_path / "flower/records.jsonl").read_bytes() == (tmp_path / "inline/records.jsonl").read_bytes()


def test_a_device_that_lost_what_it_kept_says_so_and_is_a_newcomer(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*EVERYBODY, "method.name=eftvit", *OVERRIDES["eftvit"]))
    deal(config, tmp_path / "data")
    context = open_fleet(config, tmp_path / "run")
    state, _ = run_round(context, load_state(context), 1)
    shutil.rmtree(tmp_path / "state" / "2")
    state, record = run_round(context, state, 2)
    lost = record.clients[2]
    assert lost.failure is not None
    assert "lost its state after round 1" in lost.failure
    assert 2 not in state.last_seen
    state, back = run_round(context, state, 3)
    assert [entry.failure for entry in back.clients] == [None] * CLIENTS
    assert back.clients[2].down_bytes > back.clients[1].down_bytes  # a newcomer is given the base again
    assert state.last_seen[2] == 3


def test_who_is_not_connected_is_left_out_and_may_come_later(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*EVERYBODY))
    deal(config, tmp_path / "data")
    context = open_fleet(config, tmp_path / "run")
    assert isinstance(context.fleet, FlowerFleet)
    grid = context.fleet.grid
    assert isinstance(grid, LoopbackGrid)
    grid.away = {"1"}
    state, record = run_round(context, load_state(context), 1)
    assert [entry.failure for entry in record.clients] == [None, "it is not connected", None, None]
    assert record.clients[1].down_bytes > 0  # what it would have been sent is known all the same
    grid.away = set()
    _, record = run_round(context, state, 2)
    assert all(entry.failure is None for entry in record.clients)


def test_nobody_waits_for_more_than_were_wanted(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("fleet.clients=4", "fleet.per_round=2")
    deal(config, tmp_path / "data")
    fleet = flower(config).fleet.model_copy(update={"spare": 2})
    config = config.model_copy(update={"fleet": fleet})
    devices = Devices(config, tmp_path / "data", tmp_path / "state")
    slow = {0, 3}
    context = open_fleet(
        config, tmp_path / "run", lambda client, message: None if client in slow else devices.answer(client, message)
    )
    state, record = run_round(context, load_state(context), 1)
    reason = "not waited for: enough were faster"
    assert [entry.failure for entry in record.clients] == [reason, None, None, reason]
    assert set(state.last_seen) == {1, 2}


def test_a_round_with_too_few_replies_changes_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*EVERYBODY, "fleet.min_replies=3"))
    deal(config, tmp_path / "data")
    devices = Devices(config, tmp_path / "data", tmp_path / "state")
    silent = {1, 2}
    context = open_fleet(
        config, tmp_path / "run", lambda client, message: None if client in silent else devices.answer(client, message)
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


def test_nodes_without_a_registered_name_are_asked_for_it(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*EVERYBODY))
    deal(config, tmp_path / "data")
    devices = Devices(config, tmp_path / "data", tmp_path / "state")
    told = {0: "2", 1: "stranger", 2: "0", 3: "1"}

    def answer(node: int, message: Message) -> RecordDict | Error | None:
        if message.metadata.message_type == "query.hello":
            return RecordDict({HEADER: ConfigRecord({"name": told[node]})})
        return devices.answer(int(told[node]), message)

    context = open_fleet(config, tmp_path / "run", answer)
    assert isinstance(context.fleet, FlowerFleet)
    context.fleet.grid = LoopbackGrid(answer, [""] * CLIENTS)
    _, record = run_round(context, load_state(context), 1)
    assert [entry.failure for entry in record.clients] == [None, None, None, "it is not connected"]


def test_a_report_that_is_not_all_there_at_the_deadline_is_late(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Flower calls it unavailable, as it does what it has lost before."""
    config = flower(tiny_config(*EVERYBODY))
    deal(config, tmp_path / "data")
    devices = Devices(config, tmp_path / "data", tmp_path / "state")
    patience = Patience()

    def answer(client: int, message: Message) -> RecordDict | Error | None:
        if client != 1:
            return devices.answer(client, message)
        if unpack_train_request(message.content).request.round == 2:
            patience.time += config.fleet.deadline_s
        return Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="it went away")

    context = open_fleet(config, tmp_path / "run", answer)
    assert isinstance(context.fleet, FlowerFleet)
    context.fleet.clock = patience.clock()
    state = load_state(context)
    for reason in ("Flower: it went away", "no reply within fleet.deadline_s = 600"):
        state, record = run_round(context, state, state.round + 1)
        assert [entry.failure for entry in record.clients] == [None, reason, None, None]


def test_flower_does_not_look_for_a_report_beyond_the_deadline() -> None:
    looks = 0

    def look(piece: str) -> bytes:
        nonlocal looks
        looks += 1
        assert looks < 3
        raise ObjectUnavailableError(piece)

    defaults = pull_objects.__kwdefaults__
    assert defaults is not None
    before = dict(defaults)
    with looking_often(0.0), pytest.raises(ObjectPullError):
        pull_objects(["piece"], look)
    assert looks == 1
    with looking_often(9.0):
        assert defaults["max_time"] == 9.0
        assert set(defaults) == set(before)  # Flower still calls them so
    assert defaults == before


def test_a_device_says_what_its_owner_must_mend(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config(*EVERYBODY))
    deal(config, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "1")
    (tmp_path / "data" / "3").rename(tmp_path / "data" / "1")
    context = open_fleet(config, tmp_path / "run")
    _, record = run_round(context, load_state(context), 1)
    failures = [entry.failure for entry in record.clients]
    assert failures[:3] == [None, None, None]
    assert "no such file or folder" in (failures[3] or "")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    numbers=st.dictionaries(st.sampled_from(["loss", "samples", "layers"]), ANYTHING),
    correct=st.integers(-(2**60), 2**60),
    tested=st.integers(-(2**60), 2**60),
)
def test_no_numbers_get_past_the_door_that_records_could_not_hold(
    numbers: dict[str, object], correct: int, tested: int
) -> None:
    data = b'{"__metadata__":' + json.dumps({"numbers": json.dumps(numbers)}).encode() + b"}"
    up = len(data).to_bytes(8, "little") + data
    words = ConfigRecord({"failure": "", "state_lost": False, "correct": correct, "tested": tested})
    reply = unpack_reply(with_up(RecordDict({HEADER: words}), up), 0, 10**6)
    assert (reply.message is None) == (reply.failure is not None)
    if reply.message is not None:
        json.dumps(dict(reply.message.numbers), allow_nan=False)
        assert isinstance(reply.message.numbers["loss"], float)
        assert isinstance(reply.message.numbers["samples"], int)
        assert reply.evaluation is None or 0 <= reply.evaluation.correct <= reply.evaluation.tested


def test_an_honest_reply_comes_out_as_it_went_in() -> None:
    up = Content({"w": torch.randn(3)}, {"loss": 0.5, "samples": 7, "layers": [1, 2]})
    for evaluation in (None, EvalResult(3, 9), EvalResult(0, 0)):
        found = unpack_reply(pack_reply(Reply(4, up, evaluation)), 4, 10**6)
        assert (found.client, found.evaluation, found.failure, found.state_lost) == (4, evaluation, None, False)
        assert found.message is not None
        assert torch.equal(found.message.tensors["w"], up.tensors["w"])
        assert found.message.numbers == up.numbers
    lost = Reply(4, None, failure="gone", state_lost=True)
    assert unpack_reply(pack_reply(lost), 4, 10**6) == lost


@pytest.mark.parametrize("missing", [HEADER, "message", CHUNK, "failure"])
def test_what_is_no_reply_is_a_failure(missing: str) -> None:
    whole = pack_reply(Reply(0, Content({}, {"loss": 0.5, "samples": 1})))
    words = {key: value for key, value in whole.config_records[HEADER].items() if key != missing}
    pieces = [
        {} if missing == CHUNK else dict(whole.config_records[key])
        for key in whole
        if key != HEADER and missing != "message"
    ]
    content = RecordDict({f"message/{place}": ConfigRecord(piece) for place, piece in enumerate(pieces)})
    if missing != HEADER:
        content[HEADER] = ConfigRecord(words)
    assert f"has no {missing!r}" in (unpack_reply(content, 0, 10**6).failure or "")


# Exams


def test_who_misses_an_exam_has_no_marks_and_the_run_goes_on(tiny_config: MakeConfig, tmp_path: Path) -> None:
    tasks = (
        "data.tasks.count=2",
        "data.tasks.classes=2",
        "data.tasks.per_client=[1,2]",
        "data.tasks.rounds_per_task=1",
    )
    config = flower(tiny_config("method.name=gem", *tasks, "data.tasks.rounds_per_task=1", "rounds=2"))
    deal(config, tmp_path / "data")
    devices = Devices(config, tmp_path / "data", tmp_path / "state")

    def answer(client: int, message: Message) -> RecordDict | Error | None:
        if message.metadata.message_type == EXAM and client == 1:
            return None
        if message.metadata.message_type == EXAM and client == 2:
            return RecordDict({HEADER: ConfigRecord({"failure": "", "correct": [9, 9], "tested": [3, 3]})})
        return devices.answer(client, message)

    context = open_fleet(config, tmp_path / "run", answer)
    result = run_rounds(context)
    for learned in result.state.task_records:
        assert learned.failures["1"].startswith("no reply within")
        assert "9 of 3 images" in learned.failures["2"]
        assert set(learned.failures) == {"1", "2"}
        assert learned.matrix[1] == learned.matrix[2] == [None, None]
        assert None not in learned.matrix[0]
    assert 0 < result.summary["continual"]["average_accuracy"] <= 100
    # What was recorded is read back when a server starts again.
    again = open_fleet(config, tmp_path / "run", answer)
    assert load_state(again).task_records == result.state.task_records


@pytest.mark.parametrize(
    "words",
    [
        {"failure": ""},
        {"failure": "", "correct": [1], "tested": [1]},
        {"failure": "", "correct": 1, "tested": 1},
        {"failure": "", "correct": [1, -1], "tested": [1, 1]},
        {"failure": "", "correct": [1.0, 0.5], "tested": [1, 1]},
    ],
)
def test_marks_that_nobody_can_have_are_refused(words: dict[str, Any]) -> None:
    eval_reply = unpack_eval_reply(RecordDict({HEADER: ConfigRecord(words)}), 7, 2)
    assert eval_reply.failure
    assert eval_reply.evaluations == ()


def test_marks_travel() -> None:
    eval_reply = EvalReply(3, (EvalResult(1, 2), EvalResult(0, 0)))
    assert unpack_eval_reply(pack_eval_reply(eval_reply), 3, 2) == eval_reply
    assert unpack_eval_reply(pack_eval_reply(EvalReply(3, failure="no images")), 3, 2) == EvalReply(
        3, failure="no images"
    )


def test_a_reply_that_is_refused_leaves_the_client_as_it_was(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """In one process as on devices: the round never happened for it."""
    context = open_run(tiny_config("method.name=fedper", "aggregate.max_norm=1e-9"), tmp_path / "run")
    summary = run_rounds(context).summary
    assert summary["total"]["failures"] == summary["total"]["participations"] > 0
    assert all(context.fleet.client_state(client) is None for client in range(context.config.fleet.clients))
