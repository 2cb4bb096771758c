"""What a Flower message holds: an order to a device, and the device's report. Tensors as safetensors, never pickle.

Every field that comes from the other end is checked for its type here; what the tensors and numbers mean is checked
by whoever uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from vitfleet.errors import UserError
from vitfleet.fleet.base import Reply, Verdict
from vitfleet.message import Message
from vitfleet.methods.base import RefusalError
from vitfleet.wire import decode, encode

WORDS, TENSORS = "words", "tensors"
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
    since: int | None
    terms: Terms
    down: Message
    base: Message | None


def pack_order(order: Order) -> RecordDict:
    """Put an order into an envelope."""
    terms = {field.name: getattr(order.terms, field.name) for field in fields(Terms)}
    words = ConfigRecord(
        {
            "round": order.round,
            "client": order.client,
            "evaluate": order.evaluate,
            "since": -1 if order.since is None else order.since,
            **terms,
        }
    )
    tensors = ArrayRecord({"down": _array(order.down)})
    if order.base is not None:
        tensors["base"] = _array(order.base)
    return RecordDict({WORDS: words, TENSORS: tensors})


def unpack_order(content: RecordDict) -> Order:
    """Take an order out of its envelope."""
    words, tensors = content.config_records[WORDS], content.array_records[TENSORS]
    since = _whole(words, "since")
    classes = words["classes"]
    assert isinstance(classes, list)
    return Order(
        round=_whole(words, "round"),
        client=_whole(words, "client"),
        evaluate=bool(words["evaluate"]),
        since=None if since < 0 else since,
        terms=Terms(
            run=str(words["run"]),
            config=str(words["config"]),
            classes=[str(name) for name in classes],
            channels=_whole(words, "channels"),
            side=_whole(words, "side"),
        ),
        down=decode(Message, tensors["down"].data),
        base=decode(Message, tensors["base"].data) if "base" in tensors else None,
    )


def pack_reply(reply: Reply) -> RecordDict:
    """Put a device's reply into an envelope."""
    verdict = reply.verdict or Verdict(0, -1)
    words = ConfigRecord(
        {"failure": reply.failure or "", "lost": reply.lost, "right": verdict.right, "tested": verdict.tested}
    )
    tensors = ArrayRecord({} if reply.up is None else {"up": _array(reply.up)})
    return RecordDict({WORDS: words, TENSORS: tensors})


def unpack_reply(content: RecordDict, client: int, limit: int) -> Reply:
    """Take a reply out of its envelope; what cannot be one is a failure that says why.

    Parameters
    ----------
    limit
        Bytes that a message may have.
    """
    try:
        words, tensors = content.config_records[WORDS], content.array_records[TENSORS]
        failure = str(words["failure"])[:LONGEST_REASON] or None
        if failure is not None:
            return Reply(client, None, failure=failure, lost=bool(words["lost"]))
        data = tensors["up"].data
        if len(data) > limit:
            raise RefusalError(f"its message has {len(data)} bytes, and fleet.max_message_mb allows {limit}")
        up = decode(Message, data)
        check_numbers(up)
        tested, right = _whole(words, "tested"), _whole(words, "right")
        if tested >= 0 and not 0 <= right <= tested <= LARGEST_NUMBER:
            raise RefusalError(f"it says it named {right} of {tested} images rightly")
        return Reply(client, up, Verdict(right, tested) if tested >= 0 else None)
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


def _array(message: Message) -> Array:
    data = encode(message)
    return Array(dtype="uint8", shape=(len(data),), stype="safetensors", data=data)


def _whole(words: ConfigRecord, name: str) -> int:
    value = words[name]
    if not isinstance(value, int):
        raise RefusalError(f"it sent {value!r} as {name!r}, not a whole number")
    return value
