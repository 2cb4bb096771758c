"""Packing and unpacking of Flower messages, and the rejection of invalid ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from loopback import serialized_copy, with_encoded_message

from vitfleet.fleet.base import EvalReply, EvalResult, Reply, Request
from vitfleet.flower.transport.codec import (
    pack_eval_reply,
    pack_eval_request,
    pack_reply,
    pack_train_request,
    unpack_eval_reply,
    unpack_eval_request,
    unpack_reply,
    unpack_train_request,
)
from vitfleet.flower.transport.payloads import CHUNK, HEADER, EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message
from vitfleet.methods.reported import RejectedUpdateError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


RUN_SPEC = RunSpec("run", '{"seed": 1}', ["cat", "dog"], 3, 32, ["method:mine:0f", "model:small:1e"])
MESSAGE = Message({"w": torch.arange(3.0)}, {"epochs": 2})


@pytest.mark.parametrize("run_spec", [RUN_SPEC, replace(RUN_SPEC, plugins=[])], ids=["plugins", "no plugins"])
@pytest.mark.parametrize(("last_round", "base"), [(None, MESSAGE), (3, None)], ids=["new client", "known client"])
def test_train_request_arrives_unchanged(run_spec: RunSpec, last_round: int | None, base: Message | None) -> None:
    request = Request(5, 2, MESSAGE, evaluate=True, task_index=1, last_round=last_round)
    arrived = unpack_train_request(serialized_copy(pack_train_request(TrainPayload(request, run_spec, base))))
    assert arrived.run_spec == run_spec
    assert replace(arrived.request, message=MESSAGE) == request
    assert_same_message(arrived.request.message, MESSAGE)
    assert_same_message(arrived.base, base)


@pytest.mark.parametrize(("last_round", "base"), [(None, MESSAGE), (3, None)], ids=["new client", "known client"])
def test_eval_request_arrives_unchanged(last_round: int | None, base: Message | None) -> None:
    payload = EvalPayload(2, 4, last_round, RUN_SPEC, MESSAGE, base)
    arrived = unpack_eval_request(serialized_copy(pack_eval_request(payload)))
    assert replace(arrived, server=MESSAGE, base=base) == payload
    assert_same_message(arrived.server, MESSAGE)
    assert_same_message(arrived.base, base)


def assert_same_message(arrived: Message | None, sent: Message | None) -> None:
    assert (arrived is None) == (sent is None)
    if arrived is not None and sent is not None:
        assert arrived.numbers == sent.numbers
        assert arrived.tensors.keys() == sent.tensors.keys()
        assert all(torch.equal(arrived.tensors[name], tensor) for name, tensor in sent.tensors.items())


@given(
    numbers=st.dictionaries(st.sampled_from(["loss", "samples", "layers"]), JSON_VALUES),
    correct=st.integers(-(2**60), 2**60),
    tested=st.integers(-(2**60), 2**60),
)
def test_unpack_reply_accepts_only_numbers_that_the_records_can_hold(
    numbers: dict[str, object], correct: int, tested: int
) -> None:
    metadata = b'{"__metadata__":' + json.dumps({"numbers": json.dumps(numbers)}).encode() + b"}"
    encoded = len(metadata).to_bytes(8, "little") + metadata
    header = ConfigRecord({"round": 1, "failure": "", "state_lost": False, "correct": correct, "tested": tested})
    reply = unpack_reply(with_encoded_message(RecordDict({HEADER: header}), encoded), 0, 1, 10**6)
    assert (reply.message is None) == (reply.failure is not None)
    if reply.message is not None:
        json.dumps(dict(reply.message.numbers), allow_nan=False)
        assert isinstance(reply.message.numbers["loss"], float)
        assert isinstance(reply.message.numbers["samples"], int)
        assert reply.evaluation is None or 0 <= reply.evaluation.correct <= reply.evaluation.tested


def test_unpack_reply_inverts_pack_reply() -> None:
    message = Message({"w": torch.randn(3)}, {"loss": 0.5, "samples": 7, "layers": [1, 2]})
    for evaluation in (None, EvalResult(3, 9), EvalResult(0, 0)):
        unpacked = unpack_reply(pack_reply(Reply(4, message, evaluation), 7), 4, 7, 10**6)
        assert (unpacked.client, unpacked.evaluation) == (4, evaluation)
        assert (unpacked.failure, unpacked.state_lost) == (None, False)
        assert unpacked.message is not None
        assert torch.equal(unpacked.message.tensors["w"], message.tensors["w"])
        assert unpacked.message.numbers == message.numbers
    lost = Reply(4, None, failure="gone", state_lost=True)
    assert unpack_reply(pack_reply(lost, 7), 4, 7, 10**6) == lost


@pytest.mark.parametrize("missing", [HEADER, "message", CHUNK, "failure"])
def test_unpack_reply_names_what_is_missing(missing: str) -> None:
    complete = pack_reply(Reply(0, Message({}, {"loss": 0.5, "samples": 1})), 7)
    header = {key: value for key, value in complete.config_records[HEADER].items() if key != missing}
    chunks = [
        {} if missing == CHUNK else dict(complete.config_records[key])
        for key in complete
        if key != HEADER and missing != "message"
    ]
    content = RecordDict({f"message/{number}": ConfigRecord(chunk) for number, chunk in enumerate(chunks)})
    if missing != HEADER:
        content[HEADER] = ConfigRecord(header)
    assert unpack_reply(content, 0, 7, 10**6).failure == f"its reply has no {missing!r}"


@pytest.mark.parametrize(
    "header",
    [
        {"failure": ""},
        {"failure": "", "correct": [1], "tested": [1]},
        {"failure": "", "correct": 1, "tested": 1},
        {"failure": "", "correct": [1, -1], "tested": [1, 1]},
        {"failure": "", "correct": [1.0, 0.5], "tested": [1, 1]},
    ],
)
def test_unpack_eval_reply_rejects_impossible_counts(header: dict[str, Any]) -> None:
    reply = unpack_eval_reply(RecordDict({HEADER: ConfigRecord(header)}), 7, 2)
    assert reply.failure
    assert reply.evaluations == ()


@pytest.mark.parametrize("failure", ["\x1b]0;owned\x07\x1b[2J\r\u2028round 5: all fine", "x" * 10**6])
def test_a_reported_failure_is_one_short_line_without_control_characters(failure: str) -> None:
    content = RecordDict({HEADER: ConfigRecord({"round": 7, "failure": failure, "state_lost": False})})
    for reply in (unpack_reply(content, 3, 7, 100), unpack_eval_reply(content, 3, 2)):
        assert reply.failure is not None
        assert reply.failure.isprintable()
        assert len(reply.failure) <= 501


LONG = "\x1b" * 10**6


@pytest.mark.parametrize(
    "key", ["round", "client", "task_index", "last_round", "channels", "image_size", "classes", "plugins"]
)
def test_a_wrong_value_of_a_request_is_shortened_in_the_error(key: str) -> None:
    content = pack_train_request(TrainPayload(Request(5, 2, MESSAGE), RUN_SPEC, None))
    content.config_records[HEADER][key] = LONG
    with pytest.raises(RejectedUpdateError, match=f"its '{key}' is ") as error:
        unpack_train_request(content)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("counts", [{"correct": LONG, "tested": 1}, {"correct": 1, "tested": LONG}])
def test_a_wrong_count_of_a_reply_is_shortened_in_the_failure(counts: dict[str, Any]) -> None:
    content = pack_reply(Reply(0, Message({}, {"loss": 0.5, "samples": 1})), 7)
    content.config_records[HEADER].update(counts)
    failure = unpack_reply(content, 0, 7, 10**6).failure
    assert failure is not None
    assert failure.isprintable()
    assert len(failure) < 300


def test_unpack_eval_reply_inverts_pack_eval_reply() -> None:
    for reply in (EvalReply(3, (EvalResult(1, 2), EvalResult(0, 0))), EvalReply(3, failure="no images")):
        assert unpack_eval_reply(pack_eval_reply(reply), 3, 2) == reply
