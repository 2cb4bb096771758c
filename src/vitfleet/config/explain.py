"""Validation errors as one sentence that names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from vitfleet.config.registry import Parameters, registry_of, tables_of
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError

# Tables whose other keys depend on one key, their tag; {dotted path of the table: tag}.
VARIANTS = {
    "method": "name",
    "data.partition": "kind",
    "fleet.schedule": "kind",
    "aggregate": "rule",
    "server": "optimizer",
}


def explain(error: ErrorDetails) -> UserError:
    """Turn pydantic's description of an error into an error for the user."""
    location, tags = _without_tags(error["loc"])
    key = ".".join(location)
    value = error["input"]
    kind = error["type"]
    if kind == "extra_forbidden":
        return UserError(f"{key}: no such key; {_suggest(location, tags)}")
    if kind == "value_error":  # raised by our own validators, which name the key themselves
        return UserError(str(error["ctx"]["error"]))
    if kind == "union_tag_invalid":
        return _unknown_tag(key, str(error["ctx"]["tag"]), error["ctx"]["expected_tags"])
    if kind == "union_tag_not_found":
        return UserError(f"{key}.{VARIANTS[key]}: is missing; set it")
    if kind == "missing":
        return UserError(f"{key}: is missing")
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return ConfigError(key, value, "is a table of keys, not a value")
    if kind in {"int_type", "int_from_float"} and isinstance(value, float):
        return ConfigError(key, value, "must be a whole number, written without a point or an exponent: 1000, not 1e3")
    message = error["msg"].removeprefix("Input ").replace("should", "must")
    return ConfigError(key, value, message)


def _unknown_tag(table: str, tag: str, expected: str) -> UserError:
    allowed = expected.replace("'", "")
    close = difflib.get_close_matches(tag, allowed.split(", "), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(f"{table}.{VARIANTS[table]}", tag, f"must be one of {allowed}{hint}")


def _without_tags(location: tuple[int | str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Separate the tags that pydantic puts into a path from the path: ('method', 'fedprox', 'mu') is method.mu."""
    path: list[str] = []
    tags: dict[str, str] = {}
    for part in location:
        if part == "[key]":  # pydantic's mark for a name in a table of names
            continue
        table = ".".join(path)
        if table in VARIANTS and table not in tags:
            tags[table] = str(part)
        else:
            path.append(str(part))
    return tuple(path), tags


def _suggest(location: tuple[str, ...], tags: Mapping[str, str]) -> str:
    *parents, leaf = location
    where = ".".join(parents)
    tables: list[type[BaseModel]] = [Config]
    names: list[str] = []  # of components that may stand in the table
    for depth, parent in enumerate(parents):
        names = _component_names(tables, parent)
        tables = [inner for table in tables for inner in _tables_of(table, parent, parents[depth + 1 :])]
        path = ".".join(parents[: depth + 1])
        if path in tags and path != where:
            tables = [table for table in tables if _tag(table, path) == tags[path]]
        if names and depth + 1 < len(parents):  # the next part names the component whose table this is
            names = []
            break
    holders = [_tag(table, where) for table in tables if leaf in table.model_fields] if where in tags else []
    if holders:
        deciding = f"{where}.{VARIANTS[where]}"
        return f"it belongs to {deciding} = {' or '.join(holders)}, and {deciding} is {tags[where]}"
    if where in tags:
        tables = [table for table in tables if _tag(table, where) == tags[where]]
    allowed = names or sorted({name for table in tables for name in table.model_fields})
    close = difflib.get_close_matches(leaf, allowed, n=1)
    known = f"{where or 'the top level'} has the keys {', '.join(allowed)}" if allowed else f"{where} has no keys"
    return f"did you mean {'.'.join([*parents, close[0]])}? ({known})" if close else known


def _tag(table: type[BaseModel], path: str) -> str:
    return str(table.model_fields[VARIANTS[path]].default)


def _component_names(tables: list[type[BaseModel]], field: str) -> list[str]:
    marks = [registry_of(table.model_fields[field]) for table in tables if field in table.model_fields]
    return [name for mark in marks if isinstance(mark, Parameters) for name in mark.registry.names()]


def _tables_of(table: type[BaseModel], field: str, below: list[str]) -> list[type[BaseModel]]:
    """Return the tables that may stand in a field; of components by name, the one that the path goes on with."""
    if field not in table.model_fields:
        return []
    info = table.model_fields[field]
    mark = registry_of(info)
    if isinstance(mark, Parameters):
        entry = mark.registry.get(below[0]) if below else None
        return [] if entry is None else [entry.params]
    if mark is not None:
        return tables_of(info)
    candidates = [info.annotation, *get_args(info.annotation)]
    return [member for member in candidates if isinstance(member, type) and issubclass(member, BaseModel)]
