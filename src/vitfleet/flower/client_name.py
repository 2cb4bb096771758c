"""The names of clients: files and folders are named after them."""

from __future__ import annotations

import re

from vitfleet.errors import UserError

SHOWN_NAME = 80  # characters of a wrong name in a message
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_client_name(name: str) -> None:
    """Raise an error if a client cannot have this name."""
    if not CLIENT_NAME.fullmatch(name):
        shown = name if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]}…"
        raise UserError(
            f"{shown!r}: a client's name must have at most 63 characters: letters, digits, '.', '_', '-'; "
            "the first a letter or digit"
        )
