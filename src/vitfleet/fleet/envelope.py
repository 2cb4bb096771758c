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
from vitfleet.fleet.base import Marks, Reply, Verdict
from vitfleet.message import Message
from vitfleet.methods.base import RefusalError
from vitfleet.wire import assemble, cut

WORDS, PIECE = "words", "piece"
LARGEST_NUMBER = 2**53  # beyond it a float no longer counts by ones
LONGEST_LIST = 65536
LONGEST_REASON = 500


@dataclass(frozen=True)
class Terms:
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
class Order:
    """What a device is asked; ``base`` comes with it for a newcomer. See :class:`~vitfleet.fleet.base.Request`."""

    round: int
    client: int
    evaluate: bool
    stage: int
    since: int | None
    terms: Terms
    down: Message
    base: Message | None


@dataclass(frozen=True)
class Paper:
    """One device's part of an exam; ``base`` comes with it for a newcomer. See :class:`~vitfleet.fleet.base.Exam`."""

    client: int
    stages: int
    since: int | None
    terms: Terms
    server: Message
    base: Message | None


def pack_order(order: Order) -> RecordDict:
    """Put an order into an envelope."""
    words = {"round": order.round, "client": order.client, "evaluate": order.evaluate, "stage": order.stage}
    return _pack(words, order.since, order.terms, {"down": order.down, "base": order.base})


def unpack_order(content: RecordDict) -> Order:
    """Take an order out of its envelope."""
    words = _words(content)
    return Order(
        round=_whole(words, "round"),
        client=_whole(words, "client"),
        evaluate=bool(words["evaluate"]),
        stage=_whole(words, "stage"),
        since=_since(words),
        terms=_terms(words),
        down=_take(content, "down"),
        base=_take(content, "base") if _names(content, "base") else None,
    )


def pack_exam(paper: Paper) -> RecordDict:
    """Put an exam into an envelope."""
    words: dict[str, int | bool] = {"client": paper.client, "stages": paper.stages}
    return _pack(words, paper.since, paper.terms, {"server": paper.server, "base": paper.base})


def unpack_exam(content: RecordDict) -> Paper:
    """Take an exam out of its envelope."""
    words = _words(content)
    return Paper(
        client=_whole(words, "client"),
        stages=_whole(words, "stages"),
        since=_since(words),
        terms=_terms(words),
        server=_take(content, "server"),
        base=_take(content, "base") if _names(content, "base") else None,
    )


def pack_marks(marks: Marks) -> RecordDict:
    """Put a device's marks into an envelope."""
    right, tested = [one.right for one in marks.verdicts], [one.tested for one in marks.verdicts]
    return RecordDict({WORDS: ConfigRecord({"failure": marks.failure or "", "right": right, "tested": tested})})


def unpack_marks(content: RecordDict, client: int, stages: int) -> Marks:
    """Take a device's marks out of their envelope; what cannot be marks is a failure that says why."""
    try:
        words = _words(content)
        failure = str(words["failure"])[:LONGEST_REASON] or None
        if failure is not None:
            return Marks(client, failure=failure)
        right, tested = words["right"], words["tested"]
        if not (isinstance(right, list) and isinstance(tested, list) and len(right) == len(tested) == stages):
            raise RefusalError(f"it was asked for marks on {stages} tasks and sent others")
        return Marks(client, tuple(_verdict(*pair) for pair in zip(right, tested, strict=True)))
    except KeyError as error:
        return Marks(client, failure=f"its marks have no {error.args[0]!r} in them")
    except RefusalError as error:
        return Marks(client, failure=str(error)[:LONGEST_REASON])


def pack_reply(reply: Reply) -> RecordDict:
    """Put a device's reply into an envelope."""
    verdict = reply.verdict or Verdict(0, -1)
    words = ConfigRecord(
        {"failure": reply.failure or "", "lost": reply.lost, "right": verdict.right, "tested": verdict.tested}
    )
    return RecordDict({WORDS: words, **({} if reply.up is None else _pieces("up", reply.up))})


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
            return Reply(client, None, failure=failure, lost=bool(words["lost"]))
        up = _take(content, "up", limit)
        check_numbers(up)
        tested = _whole(words, "tested")
        return Reply(client, up, _verdict(words["right"], tested) if tested >= 0 else None)
    except KeyError as error:
        return Reply(client, None, failure=f"its reply has no {error.args[0]!r} in it")
    except (RefusalError, UserError) as error:
        return Reply(client, None, failure=str(error)[:LONGEST_REASON])


def check_numbers(up: Message) -> None:
    """Refuse numbers that no honest client sends: they go into sums and into the records."""
    loss, samples = up.numbers.get("loss"), up.numbers.get("samples")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise RefusalError(f"it says its loss is {loss}")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
        raise RefusalError(f"it says it has {samples} samples")
    for name, value in up.numbers.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > LONGEST_LIST:
            raise RefusalError(f"it sent {len(values)} numbers as {name!r}")
        if not all(abs(one) <= LARGEST_NUMBER for one in values):  # also false for what is not a number
            raise RefusalError(f"it sent a number as {name!r} that is too large or none at all")


def _pack(
    words: dict[str, int | bool], since: int | None, terms: Terms, messages: dict[str, Message | None]
) -> RecordDict:
    about = {field.name: getattr(terms, field.name) for field in fields(Terms)}
    written = ConfigRecord({**words, "since": -1 if since is None else since, **about})
    pieces: dict[str, ConfigRecord] = {}
    for name, message in messages.items():
        pieces |= {} if message is None else _pieces(name, message)
    return RecordDict({WORDS: written, **pieces})


def _since(words: ConfigRecord) -> int | None:
    since = _whole(words, "since")
    return None if since < 0 else since


def _terms(words: ConfigRecord) -> Terms:
    classes = words["classes"]
    assert isinstance(classes, list)
    return Terms(
        run=str(words["run"]),
        config=str(words["config"]),
        classes=[str(name) for name in classes],
        channels=_whole(words, "channels"),
        side=_whole(words, "side"),
    )


def _verdict(right: object, tested: object) -> Verdict:
    """Return how a model did, if a device can have said so honestly."""
    if isinstance(right, int) and isinstance(tested, int) and 0 <= right <= tested <= LARGEST_NUMBER:
        return Verdict(right, tested)
    raise RefusalError(f"it says it named {right} of {tested} images rightly")


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
        raise RefusalError(f"its message has {size} bytes, and fleet.max_message_mb allows {limit}")
    return assemble(Message, (_piece(content.pop(key)) for key in names), size)


def _piece(record: RecordType) -> bytes:
    piece = record[PIECE]
    if not isinstance(piece, bytes):
        raise RefusalError("a piece of its message is not made of bytes")
    return piece


def _words(content: RecordDict) -> ConfigRecord:
    # Not `content.config_records`: what that returns refers to itself and so keeps every piece until Python looks for
    # such things.
    words = content[WORDS]
    if not isinstance(words, ConfigRecord):
        raise RefusalError(f"its {WORDS!r} are a {type(words).__name__}")
    return words


def _whole(words: ConfigRecord, name: str) -> int:
    value = words[name]
    if not isinstance(value, int):
        raise RefusalError(f"it sent {value!r} as {name!r}, not a whole number")
    return value
