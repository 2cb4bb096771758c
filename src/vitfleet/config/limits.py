"""Limits on what a configuration holds, checked before it is copied, merged and validated.

A configuration has a few hundred values. Text of a megabyte that is no configuration becomes a hundred times as much
memory on its way through TOML and the validation (which describes every wrong value), and text that is nested deeply
exceeds Python's stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vitfleet.errors import UserError

MAX_TEXT = 2**17  # characters of a TOML file or of all overrides; a shell's argument has no more either
MAX_SAVED_TEXT = 4 * MAX_TEXT  # of a saved configuration: complete, as JSON with one value to a line
MAX_VALUES = 5_000
MAX_DEPTH = 20
MAX_KEY = 1_000  # characters

_LONG_WORD = re.compile(rf"[\w.+-]{{{MAX_KEY + 1}}}")


def check_text(source: str, length: int, limit: int = MAX_TEXT) -> None:
    """Refuse the text of a configuration if it is too long; it need not have been read."""
    if length > limit:
        raise UserError(f"{source}: has {length} characters; a configuration has at most {limit}")


def check_words(source: str, text: str) -> None:
    """Refuse a TOML text with a key or a number that is longer than any: its parser takes 140 bytes for a digit."""
    found = _LONG_WORD.search(text)
    if found is not None:
        raise UserError(f"{source}: {found[0][:100]}… has more than {MAX_KEY} characters; no key and no value has")


def check_tree(values: Iterable[Any]) -> None:
    """Refuse values if they hold too many others, or are nested too deeply."""
    level, count = list(values), 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_VALUES:
            raise UserError(f"the configuration has more than {MAX_VALUES} values; leave some out")
        level = [item for value in level for item in _items(value)]
        if not level:
            return
    raise UserError(f"the configuration has tables or lists nested more than {MAX_DEPTH} deep; write them flat")


def check_key(key: str) -> None:
    """Refuse a dotted key that is longer than any, or has more parts."""
    if key.count(".") >= MAX_DEPTH or len(key) > MAX_KEY:
        raise UserError(f"{key[:100]}…: no such key; keys have at most {MAX_KEY} characters and {MAX_DEPTH} parts")


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
