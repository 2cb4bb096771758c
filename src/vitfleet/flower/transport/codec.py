"""Conversion between payloads or replies and the records of a Flower message.

Tensors travel as safetensors, never as pickle, cut into chunks, each in a record of its own: then Flower holds a
received message in memory once. (It holds an array three times: in the pieces it arrived in, joined, and as bytes.)
Unpacking removes the chunks one by one.

Every field that comes from the other end is checked for its type here, and a text that is printed is made printable.
The meaning of tensors and numbers is checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import get_args

from flwr.app import ConfigRecord, RecordDict
from flwr.app.message.recorddict import RecordType

from vitfleet.errors import UserError, printable, shown
from vitfleet.fleet.base import EvalReply, EvalResult, Reply, Request, RequestKind
from vitfleet.flower.transport.payloads import CHUNK, HEADER, EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message
from vitfleet.methods.reported import MAX_NUMBER, RejectedUpdateError, check_numbers
from vitfleet.wire import decode_received, encode_chunks


def pack_train_request(payload: TrainPayload) -> RecordDict:
    """Return a training request as the content of a Flower message."""
    request = payload.request
    header = {
        "round": request.round,
        "client": request.client,
        "evaluate": request.evaluate,
        "task_index": request.task_index,
        "kind": request.kind,
    }
    return _pack(header, request.last_round, payload.run_spec, {"message": request.message, "base": payload.base})


def unpack_train_request(content: RecordDict) -> TrainPayload:
    """Read a training request from a Flower message; its chunks are removed."""
    header = _header(content)
    request = Request(
        round=_integer(header, "round"),
        client=_integer(header, "client"),
        message=_pop_message(content, "message"),
        evaluate=bool(header["evaluate"]),
        task_index=_integer(header, "task_index"),
        last_round=_last_round(header),
        kind=_kind(header),
    )
    return TrainPayload(request, _run_spec(header), _pop_base(content))


def pack_eval_request(payload: EvalPayload) -> RecordDict:
    """Return an evaluation request as the content of a Flower message."""
    header: dict[str, int | bool] = {
        "client": payload.client,
        "num_tasks": payload.num_tasks,
        "last_head": payload.last_head,
    }
    return _pack(header, payload.last_round, payload.run_spec, {"server": payload.server, "base": payload.base})


def unpack_eval_request(content: RecordDict) -> EvalPayload:
    """Read an evaluation request from a Flower message; its chunks are removed."""
    header = _header(content)
    return EvalPayload(
        client=_integer(header, "client"),
        num_tasks=_integer(header, "num_tasks"),
        last_round=_last_round(header),
        run_spec=_run_spec(header),
        server=_pop_message(content, "server"),
        base=_pop_base(content),
        last_head=bool(header["last_head"]),
    )


def pack_eval_reply(reply: EvalReply) -> RecordDict:
    """Return a reply to an evaluation request as the content of a Flower message."""
    correct = [evaluation.correct for evaluation in reply.evaluations]
    tested = [evaluation.tested for evaluation in reply.evaluations]
    return RecordDict({HEADER: ConfigRecord({"failure": reply.failure or "", "correct": correct, "tested": tested})})


def unpack_eval_reply(content: RecordDict, client: int, num_tasks: int) -> EvalReply:
    """Read a client's reply to an evaluation request. An invalid reply becomes a failure that names the reason."""
    try:
        header = _header(content)
        if failure := printable(str(header["failure"])):
            return EvalReply(client, failure=failure)
        correct, tested = header["correct"], header["tested"]
        if not (isinstance(correct, list) and isinstance(tested, list) and len(correct) == len(tested) == num_tasks):
            raise RejectedUpdateError(f"its evaluation does not have {num_tasks} tasks")
        return EvalReply(client, tuple(_evaluation(*counts) for counts in zip(correct, tested, strict=True)))
    except KeyError as error:
        return EvalReply(client, failure=f"its reply has no {error.args[0]!r}")
    except RejectedUpdateError as error:
        return EvalReply(client, failure=printable(str(error)))


def pack_reply(reply: Reply, round: int) -> RecordDict:
    """Return a reply to the training request of a round as the content of a Flower message."""
    evaluation = reply.evaluation or EvalResult(0, -1)
    header = ConfigRecord(
        {
            "round": round,
            "failure": reply.failure or "",
            "state_lost": reply.state_lost,
            "correct": evaluation.correct,
            "tested": evaluation.tested,
        }
    )
    return RecordDict({HEADER: header, **({} if reply.message is None else _chunks("message", reply.message))})


def unpack_reply(content: RecordDict, client: int, round: int, max_bytes: int) -> Reply:
    """Read a client's reply to the training request of a round. An invalid reply becomes a failure with the reason."""
    try:
        header = _header(content)
        if (replied := _integer(header, "round")) != round:
            raise RejectedUpdateError(f"its reply is to round {replied}, not {round}")
        if failure := printable(str(header["failure"])):
            return Reply(client, None, failure=failure, state_lost=bool(header["state_lost"]))
        message = _pop_message(content, "message", max_bytes)
        check_numbers(message.numbers)
        tested = _integer(header, "tested")
        return Reply(client, message, _evaluation(header["correct"], tested) if tested >= 0 else None)
    except KeyError as error:
        return Reply(client, None, failure=f"its reply has no {error.args[0]!r}")
    except (RejectedUpdateError, UserError) as error:
        return Reply(client, None, failure=printable(str(error)))


def _pack(
    header: Mapping[str, int | bool | str],
    last_round: int | None,
    run_spec: RunSpec,
    messages: dict[str, Message | None],
) -> RecordDict:
    spec = {field.name: getattr(run_spec, field.name) for field in fields(RunSpec)}
    record = ConfigRecord({**header, "last_round": -1 if last_round is None else last_round, **spec})
    chunks: dict[str, ConfigRecord] = {}
    for name, message in messages.items():
        chunks |= {} if message is None else _chunks(name, message)
    return RecordDict({HEADER: record, **chunks})


def _kind(header: ConfigRecord) -> RequestKind:
    kinds: tuple[RequestKind, ...] = get_args(RequestKind)
    return next((kind for kind in kinds if kind == header["kind"]), "round")


def _last_round(header: ConfigRecord) -> int | None:
    last_round = _integer(header, "last_round")
    return None if last_round < 0 else last_round


def _run_spec(header: ConfigRecord) -> RunSpec:
    return RunSpec(
        run_id=str(header["run_id"]),
        config=str(header["config"]),
        classes=_strings(header, "classes"),
        channels=_integer(header, "channels"),
        image_size=_integer(header, "image_size"),
        plugins=_strings(header, "plugins"),
    )


def _evaluation(correct: object, tested: object) -> EvalResult:
    """Return an evaluation if its counts are possible."""
    if isinstance(correct, int) and isinstance(tested, int) and 0 <= correct <= tested <= MAX_NUMBER:
        return EvalResult(correct, tested)
    counts = f"{shown(correct)} of {shown(tested)}"
    raise RejectedUpdateError(f"its evaluation is impossible: {counts} images predicted correctly")


def _chunks(name: str, message: Message) -> dict[str, ConfigRecord]:
    return {f"{name}/{number:06d}": ConfigRecord({CHUNK: chunk}) for number, chunk in enumerate(encode_chunks(message))}


def _chunk_keys(content: RecordDict, name: str) -> list[str]:
    """Return the keys of a message's chunks, in order."""
    return sorted(key for key in content if key.startswith(f"{name}/"))


def _pop_base(content: RecordDict) -> Message | None:
    return _pop_message(content, "base") if _chunk_keys(content, "base") else None


def _pop_message(content: RecordDict, name: str, max_bytes: int | None = None) -> Message:
    """Remove a message's chunks from a content, one by one, and return the message."""
    keys = _chunk_keys(content, name)
    if not keys:
        raise KeyError(name)
    size = sum(len(_chunk(content[key])) for key in keys)
    if max_bytes is not None and size > max_bytes:
        raise RejectedUpdateError(f"its message has {size} bytes; expected: at most {max_bytes}")
    return decode_received(Message, (_chunk(content.pop(key)) for key in keys), size)


def _chunk(record: RecordType) -> bytes:
    chunk = record[CHUNK]
    if not isinstance(chunk, bytes):
        raise RejectedUpdateError("a chunk of its message is not bytes")
    return chunk


def _header(content: RecordDict) -> ConfigRecord:
    # Not `content.config_records`: that view is part of a reference cycle, so all chunks would stay in memory until
    # Python's garbage collector finds it.
    header = content[HEADER]
    if not isinstance(header, ConfigRecord):
        raise RejectedUpdateError(f"its {HEADER!r} is a {type(header).__name__}, not a ConfigRecord")
    return header


def _strings(header: ConfigRecord, name: str) -> list[str]:
    values = header[name]
    if not isinstance(values, list):
        raise RejectedUpdateError(f"its {name!r} is {shown(values)}, not a list")
    return [str(value) for value in values]


def _integer(header: ConfigRecord, name: str) -> int:
    value = header[name]
    if not isinstance(value, int):
        raise RejectedUpdateError(f"its {name!r} is {shown(value)}, not an integer")
    return value
