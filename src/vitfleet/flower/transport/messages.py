"""Send one message to a node, poll for its reply, and read it, whatever bytes the node made of it.

Flower's SuperLink checks that a reply has the size and the hash that its sender declared. What the bytes mean is found
here, on the server: a reply that cannot be read must not end the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from vitfleet.errors import printable

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 1.0  # between two polls; the interval doubles while nothing arrives


@dataclass(frozen=True)
class Clock:
    """Source of time, so that a test can replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@contextmanager
def object_polling(max_seconds: float) -> Iterator[None]:
    """Make Flower poll often, and at most for ``max_seconds``, for the pieces of a reply that is being uploaded.

    Flower announces a reply before its first piece arrives. By default it polls for each piece after 1, 2, 4, 8, 10,
    10, … seconds, for up to two hours. On a slow connection a round would then take seconds longer than necessary, and
    no deadline would apply to a client that stops during an upload. Flower offers no setting except these defaults.
    """
    defaults = pull_objects.__kwdefaults__ or {}
    original = dict(defaults)
    defaults.update(
        initial_backoff=MIN_INTERVAL_S,
        backoff_cap=MAX_INTERVAL_S,
        max_time=max(0.0, max_seconds),
        max_tries_per_object=None,
    )
    try:
        yield
    finally:
        defaults.update(original)


MAX_REASON_LENGTH = 200  # characters of Flower's own error messages
# What Flower's classes raise when they read made-up bytes. No error of the connection to the SuperLink is one of these.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    DecodeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

logger = logging.getLogger(__name__)


def push_message(grid: Grid, message: Message) -> str | None:
    """Send a message and return its id; ``None`` if Flower does not accept it."""
    return next(iter(grid.push_messages([message])), None) or None  # Flower's id of a refused message is ""


def pull_reply(grid: Grid, message_id: str) -> RecordDict | Error | None:
    """Return the content of the reply to a message, or why there will be none; ``None`` if there is none yet.

    An error has one line as its reason. Messages that do not reply to this one are ignored.
    """
    try:
        for message in grid.pull_messages([message_id]):
            if message.metadata.reply_to_message_id == message_id:
                return _one_line(message.error) if message.has_error() else message.content
            logger.warning("a message that replies to none of the server's was ignored")
    except UNREADABLE as error:
        logger.warning("a reply cannot be read: %s", repr(error)[:MAX_REASON_LENGTH])
        return Error(ErrorCode.UNKNOWN, f"its reply cannot be read ({type(error).__name__})")
    return None


def _one_line(error: Error) -> Error:
    """Return Flower's error with the first line of its reason, which a client may have made up."""
    lines = (error.reason or "").strip().splitlines()
    return Error(
        error.code, f"Flower: {printable(lines[0], MAX_REASON_LENGTH)}" if lines else "Flower lost the message"
    )
