"""What a Flower message holds: an order to a device and its reply, an exam and its marks.

Tensors travel as safetensors, never as pickle, cut into pieces, each a record of its own: taking a message in, Flower
then holds it once. (Of an array it holds three copies: the pieces it came in, put together, and as bytes.) Who unpacks
takes the pieces out one by one.

Every field that comes from the other end is checked for its type here; what the tensors and numbers mean is checked
by whoever uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from flwr.app import ConfigRecord, RecordDict
from flwr.app.message.recorddict import RecordType

from vitfleet.errors import UserError
from vitfleet.fleet.base import EvalReply, EvalResult, Reply
from vitfleet.message import Message
from vitfleet.methods.base import RejectedUpdateError
from vitfleet.wire import assemble, cut

WORDS, PIECE = "words", "piece"
LARGEST_NUMBER = 2**53  # beyond it a float no longer counts by ones
LONGEST_LIST = 65536
LONGEST_REASON = 500


@dataclass(frozen=True)
class RunSpec:
    """What a device must know of a run besides the round at hand.

    Attributes
    ----------
    run
        What tells this run from every other one: a device keeps what it keeps under it.
    config
        The run's configuration, as JSON.
    classes, channels, side
        What the data has: names of the classes, colour channels, pixels a side.
    """

    run: str
    config: str
    classes: list[str]
    channels: int
    side: int


@dataclass(frozen=True)
class TrainPayload:
    """What a device is asked; ``base`` comes with it for a newcomer. See :class:`~vitfleet.fleet.base.Request`."""

    round: int
    client: int
    evaluate: bool
    task_index: int
    last_round: int | None
    run_spec: RunSpec
    message: Message
    base: Message | None


@dataclass(frozen=True)
class EvalPayload:
    """One device's part of an exam; ``base`` comes with it for a newcomer. See :class:`~vitfleet.fleet.base.Exam`."""

    client: int
    num_tasks: int
    last_round: int | None
    run_spec: RunSpec
    server: Message
    base: Message | None


def pack_train_request(order: TrainPayload) -> RecordDict:
    """Put an order into an envelope."""
    words = {"round": order.round, "client": order.client, "evaluate": order.evaluate, "task_index": order.task_index}
    return _pack(words, order.last_round, order.run_spec, {"message": order.message, "base": order.base})


def unpack_train_request(content: RecordDict) -> TrainPayload:
    """Take an order out of its envelope."""
    words = _words(content)
    return TrainPayload(
        round=_whole(words, "round"),
        client=_whole(words, "client"),
        evaluate=bool(words["evaluate"]),
        task_index=_whole(words, "task_index"),
        last_round=_last_round(words),
        run_spec=_terms(words),
        message=_take(content, "message"),
        base=_take(content, "base") if _names(content, "base") else None,
    )


def pack_eval_request(payload: EvalPayload) -> RecordDict:
    """Put an exam into an envelope."""
    words: dict[str, int | bool] = {"client": payload.client, "num_tasks": payload.num_tasks}
    return _pack(words, payload.last_round, payload.run_spec, {"server": payload.server, "base": payload.base})


def unpack_eval_request(content: RecordDict) -> EvalPayload:
    """Take an exam out of its envelope."""
    words = _words(content)
    return EvalPayload(
        client=_whole(words, "client"),
        num_tasks=_whole(words, "num_tasks"),
        last_round=_last_round(words),
        run_spec=_terms(words),
        server=_take(content, "server"),
        base=_take(content, "base") if _names(content, "base") else None,
    )


def pack_eval_reply(eval_reply: EvalReply) -> RecordDict:
    """Put a device's marks into an envelope."""
    correct, tested = [one.correct for one in eval_reply.evaluations], [one.tested for one in eval_reply.evaluations]
    return RecordDict(
        {WORDS: ConfigRecord({"failure": eval_reply.failure or "", "correct": correct, "tested": tested})}
    )


def unpack_eval_reply(content: RecordDict, client: int, num_tasks: int) -> EvalReply:
    """Take a device's marks out of their envelope; what cannot be marks is a failure that says why."""
    try:
        words = _words(content)
        failure = str(words["failure"])[:LONGEST_REASON] or None
        if failure is not None:
            return EvalReply(client, failure=failure)
        correct, tested = words["correct"], words["tested"]
        if not (isinstance(correct, list) and isinstance(tested, list) and len(correct) == len(tested) == num_tasks):
            raise RejectedUpdateError(f"it was asked for marks on {num_tasks} tasks and sent others")
        return EvalReply(client, tuple(_evaluation(*pair) for pair in zip(correct, tested, strict=True)))
    except KeyError as error:
        return EvalReply(client, failure=f"its marks have no {error.args[0]!r} in them")
    except RejectedUpdateError as error:
        return EvalReply(client, failure=str(error)[:LONGEST_REASON])


def pack_reply(reply: Reply) -> RecordDict:
    """Put a device's reply into an envelope."""
    evaluation = reply.evaluation or EvalResult(0, -1)
    words = ConfigRecord(
        {
            "failure": reply.failure or "",
            "state_lost": reply.state_lost,
            "correct": evaluation.correct,
            "tested": evaluation.tested,
        }
    )
    return RecordDict({WORDS: words, **({} if reply.message is None else _pieces("message", reply.message))})


def unpack_reply(content: RecordDict, client: int, limit: int) -> Reply:
    """Take a reply out of its envelope; what cannot be one is a failure that says why.

    Parameters
    ----------
    limit
        Bytes that a message may have.
    """
    try:
        words = _words(content)
        failure = str(words["failure"])[:LONGEST_REASON] or None
        if failure is not None:
            return Reply(client, None, failure=failure, state_lost=bool(words["state_lost"]))
        up = _take(content, "message", limit)
        check_numbers(up)
        tested = _whole(words, "tested")
        return Reply(client, up, _evaluation(words["correct"], tested) if tested >= 0 else None)
    except KeyError as error:
        return Reply(client, None, failure=f"its reply has no {error.args[0]!r} in it")
    except (RejectedUpdateError, UserError) as error:
        return Reply(client, None, failure=str(error)[:LONGEST_REASON])


def check_numbers(up: Message) -> None:
    """Refuse numbers that no honest client sends: they go into sums and into the records."""
    loss, samples = up.numbers.get("loss"), up.numbers.get("samples")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise RejectedUpdateError(f"it says its loss is {loss}")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
        raise RejectedUpdateError(f"it says it has {samples} samples")
    for name, value in up.numbers.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > LONGEST_LIST:
            raise RejectedUpdateError(f"it sent {len(values)} numbers as {name!r}")
        if not all(abs(one) <= LARGEST_NUMBER for one in values):  # also false for what is not a number
            raise RejectedUpdateError(f"it sent a number as {name!r} that is too large or none at all")


def _pack(
    words: dict[str, int | bool], last_round: int | None, run_spec: RunSpec, messages: dict[str, Message | None]
) -> RecordDict:
    about = {field.name: getattr(run_spec, field.name) for field in fields(RunSpec)}
    written = ConfigRecord({**words, "last_round": -1 if last_round is None else last_round, **about})
    pieces: dict[str, ConfigRecord] = {}
    for name, message in messages.items():
        pieces |= {} if message is None else _pieces(name, message)
    return RecordDict({WORDS: written, **pieces})


def _last_round(words: ConfigRecord) -> int | None:
    last_round = _whole(words, "last_round")
    return None if last_round < 0 else last_round


def _terms(words: ConfigRecord) -> RunSpec:
    classes = words["classes"]
    assert isinstance(classes, list)
    return RunSpec(
        run=str(words["run"]),
        config=str(words["config"]),
        classes=[str(name) for name in classes],
        channels=_whole(words, "channels"),
        side=_whole(words, "side"),
    )


def _evaluation(correct: object, tested: object) -> EvalResult:
    """Return how a model did, if a device can have said so honestly."""
    if isinstance(correct, int) and isinstance(tested, int) and 0 <= correct <= tested <= LARGEST_NUMBER:
        return EvalResult(correct, tested)
    raise RejectedUpdateError(f"it says it named {correct} of {tested} images rightly")


def _pieces(name: str, message: Message) -> dict[str, ConfigRecord]:
    return {f"{name}/{place:06d}": ConfigRecord({PIECE: piece}) for place, piece in enumerate(cut(message))}


def _names(content: RecordDict, name: str) -> list[str]:
    """Return the names of a message's pieces, in their order."""
    return sorted(key for key in content if key.startswith(f"{name}/"))


def _take(content: RecordDict, name: str, limit: int | None = None) -> Message:
    """Take a message out of an envelope, piece by piece."""
    names = _names(content, name)
    if not names:
        raise KeyError(name)
    size = sum(len(_piece(content[key])) for key in names)
    if limit is not None and size > limit:
        raise RejectedUpdateError(f"its message has {size} bytes, and fleet.max_message_mb allows {limit}")
    return assemble(Message, (_piece(content.pop(key)) for key in names), size)


def _piece(record: RecordType) -> bytes:
    piece = record[PIECE]
    if not isinstance(piece, bytes):
        raise RejectedUpdateError("a piece of its message is not made of bytes")
    return piece


def _words(content: RecordDict) -> ConfigRecord:
    # Not `content.config_records`: what that returns refers to itself and so keeps every piece until Python looks for
    # such things.
    words = content[WORDS]
    if not isinstance(words, ConfigRecord):
        raise RejectedUpdateError(f"its {WORDS!r} are a {type(words).__name__}")
    return words


def _whole(words: ConfigRecord, name: str) -> int:
    value = words[name]
    if not isinstance(value, int):
        raise RejectedUpdateError(f"it sent {value!r} as {name!r}, not a whole number")
    return value
