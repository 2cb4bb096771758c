"""Validation errors as one sentence that names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from vitfleet.errors import ConfigError, UserError


def explain(error: ErrorDetails, table: type[BaseModel], where: str = "") -> UserError:
    """Turn pydantic's description of an error in a table (``where``: its dotted name) into an error for the user."""
    path = [str(part) for part in error["loc"] if part != "[key]"]  # pydantic's mark for a name in a table of names
    key = ".".join([where, *path] if where else path)
    value = error["input"]
    kind = error["type"]
    if kind == "extra_forbidden":
        return UserError(f"{key}: no such key; {_suggest_key(table, path, where)}")
    if kind == "value_error":  # raised by our own validators, which name the key themselves
        return UserError(str(error["ctx"]["error"]))
    if kind == "missing":
        return UserError(f"{key}: is missing")
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return ConfigError(key, value, "is a table of keys, not a value")
    if kind in {"int_type", "int_from_float"} and isinstance(value, float):
        return ConfigError(key, value, "must be a whole number, written without a point or an exponent: 1000, not 1e3")
    message = error["msg"].removeprefix("Input ").replace("should", "must")
    return ConfigError(key, value, message)


def suggest(name: str, allowed: Sequence[str], where: str) -> str:
    """Return what may stand in a table, and what a wrong name was probably meant to be."""
    close = difflib.get_close_matches(name, allowed, n=1)
    known = f"{where or 'the top level'} has the keys {', '.join(allowed)}" if allowed else f"{where} has no keys"
    return f"did you mean {f'{where}.' if where else ''}{close[0]}? ({known})" if close else known


def _suggest_key(table: type[BaseModel], path: Sequence[str], where: str) -> str:
    """Suggest a key instead of the last part of a path through nested tables."""
    *parents, leaf = path
    for parent in parents:
        where = f"{where}.{parent}" if where else parent
        annotation = table.model_fields[parent].annotation
        members = [annotation, *get_args(annotation)]
        table = next(member for member in members if isinstance(member, type) and issubclass(member, BaseModel))
    return suggest(leaf, sorted(table.model_fields), where)
