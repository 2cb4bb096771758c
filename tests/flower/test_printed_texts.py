"""What the other end of a connection sends is printed as short lines without control characters."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from loopback import LocalClients, export_images, with_encoded_message
from test_faults import failures, open_on_grid
from test_flower_fleet import flower

from conftest import MakeConfig
from vitfleet.errors import printable
from vitfleet.flower.device import worker
from vitfleet.flower.transport.codec import unpack_reply
from vitfleet.flower.transport.payloads import CHUNK, HEADER
from vitfleet.run.loop import run_rounds
from vitfleet.wire import encode

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u2028\x85round 5: all fine"


def test_printable_text_is_one_short_line() -> None:
    assert printable("größer als 5 µm, 画像 🙂") == "größer als 5 µm, 画像 🙂"
    assert printable("two\nlines\ta\x1b[2J\u202e\udc80") == "two lines a?[2J??"
    assert printable("abcdef", 3) == "abc…"
    assert printable("abc", 3) == "abc"


def with_tensor_name(content: RecordDict, name: str) -> RecordDict:
    """Return a reply with one more tensor."""
    message = unpack_reply(content, 0, int(str(content.config_records[HEADER]["round"])), 10**9).message
    assert message is not None
    changed = replace(message, tensors={**message.tensors, name: torch.zeros(1)})
    return with_encoded_message(content, encode(changed))


FAULTS: list[Callable[[RecordDict], RecordDict | Error]] = [
    lambda content: RecordDict({HEADER: ConfigRecord({"failure": HOSTILE, "state_lost": False})}),
    lambda content: Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, HOSTILE),
    lambda content: with_tensor_name(content, "\x1b" * 10_000),
]


def test_every_reason_in_the_records_is_printable_whoever_wrote_it(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = flower(tiny_config("rounds=1", "fleet.clients=4", "fleet.per_round=4", "eval.clients=0"))
    export_images(config, tmp_path / "data")
    clients = LocalClients(config, tmp_path / "data", tmp_path / "state")

    def handle(client: int, message: Message) -> RecordDict | Error | None:
        reply = clients.handle(client, message)
        return FAULTS[client](reply) if client < len(FAULTS) and isinstance(reply, RecordDict) else reply

    run_rounds(open_on_grid(config, tmp_path / "run", handle))
    recorded = failures(tmp_path / "run")
    assert {client for _, client in recorded} == {0, 1, 2}
    assert all(reason.isprintable() and len(reason) < 600 for reason in recorded.values()), recorded


class KeptBytes(io.BytesIO):
    """Bytes that can be read after the file around them is gone."""

    def close(self) -> None:
        pass


def test_the_traceback_of_a_bad_message_is_short_and_printable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data type that is no name of one: Python's own error names it in full."""
    entry = {"dtype": f"{HOSTILE}{'x' * 200_000}", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"numbers": "{}"}, "w": entry}).encode()
    chunk = len(header).to_bytes(8, "little") + header + bytes(4)
    folders = {"data": str(tmp_path / "data"), "state": str(tmp_path / "state")}
    request, reply = KeptBytes(), KeptBytes()
    content = RecordDict({worker.SETTINGS: ConfigRecord({"message_type": "train", **folders})})
    content[HEADER] = ConfigRecord({"round": 1, "client": 0, "evaluate": False, "task_index": 0, "last_round": -1})
    content["message/000000"] = ConfigRecord({CHUNK: chunk})
    worker._write_records(io.BufferedRWPair(io.BytesIO(), request), content)
    worker._serve(io.BufferedRWPair(io.BytesIO(request.getvalue()), reply))
    printed = capsys.readouterr().err
    assert "KeyError" in printed
    assert len(printed) < 20_000
    assert all(line.isprintable() for line in printed.split("\n"))
    assert len(reply.getvalue()) < 2000
    assert b"the client's worker failed (UserError)" in reply.getvalue()
