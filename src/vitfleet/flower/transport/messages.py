"""Send one message to a node, and read its reply, whatever bytes the node made of it.

Flower's SuperLink checks that a reply has the size and the hash that its sender declared. What the bytes mean is found
here, on the server: a reply that cannot be read must not end the run.
"""

from __future__ import annotations

import logging

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from vitfleet.errors import printable

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
