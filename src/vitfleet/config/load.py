"""From a preset or a file, plus overrides, to a validated configuration.

Every complaint is one sentence that names the key, the value and what is allowed.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError

Tree = dict[str, Any]

# Tables whose other keys depend on one key; {dotted path of the table: the deciding key}.
VARIANTS = {"method": "name", "data.partition": "kind", "fleet.schedule": "kind"}
# Tables that start anew when one key changes: what stood beside it was meant for what it was before.
FRESH = {**VARIANTS, "model": "name"}
# Keys that name a file or folder.
PATHS = ("data.path", "data.dir", "data.partition.path", "model.weights")


def presets() -> dict[str, str]:
    """Return every shipped preset's name and its one-line title."""
    folder = files("vitfleet") / "presets"
    names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name: str(_read_preset(name).get("title", "")) for name in names}


def load_config(source: str, overrides: Iterable[str] = (), base: Mapping[str, Any] | None = None) -> Config:
    """Read a preset or a file and apply overrides.

    Parameters
    ----------
    source
        A preset's name, or the path of a ``.toml`` or ``.json`` file.
    overrides
        ``key=value`` texts with dotted keys, as given to ``-o``; the value is TOML, or a bare string.
    base
        Values laid over the source before the overrides, by dotted key (``--seed``, ``--data-dir``).
    """
    tree = _read_source(source)
    for key, value in (base or {}).items():
        _put(tree, key, value)
    given = [_parse_override(text) for text in overrides]
    # The deciding keys first: `-o method.mu=1 -o method.name=fedprox` means the same in either order.
    given.sort(key=lambda pair: not any(pair[0] == f"{table}.{key}" for table, key in FRESH.items()))
    meant = [copy.deepcopy(tree.get(table)) for table in ("data", "model", "method")]
    for key, value in given:
        _put(tree, key, value)
    if meant != [tree.get(table) for table in ("data", "model", "method")] and "title" not in dict(given):
        tree["title"] = ""  # the source's title says what it was
    _settle_paths(tree)
    return validate(tree)


def read_config(path: Path) -> Config:
    """Read back the configuration that a run saved."""
    return validate(json.loads(path.read_text(encoding="utf-8")))


def validate(tree: Tree) -> Config:
    """Turn a tree of plain values into a configuration, or complain about the first wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error.errors()[0]) from None


def _read_preset(name: str) -> Tree:
    return tomllib.loads((files("vitfleet") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))


def _read_source(source: str) -> Tree:
    known = presets()
    if source in known:
        return _read_preset(source)
    path = Path(source)
    if path.suffix not in {".toml", ".json"}:
        close = difflib.get_close_matches(source, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`vitfleet presets` lists them."
        raise UserError(f"no preset is called {source!r}: {hint} A file's name must end in .toml or .json.")
    if not path.is_file():
        raise UserError(f"{source}: there is no such file; `vitfleet presets` lists the shipped configurations.")
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{source}: must hold a table of keys, not a {type(tree).__name__}.")
    return tree


def _parse_override(text: str) -> tuple[str, Any]:
    key, sign, raw = text.partition("=")
    key = key.strip()
    if not sign or not key:
        raise UserError(f"-o {text}: must look like key=value, for example -o train.lr=1e-3")
    raw = raw.strip()
    if raw in {"null", "none", "None"}:  # TOML has no word for it
        return key, None
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw


def _settle_paths(tree: Tree) -> None:
    """Make paths absolute: a run is resumed, perhaps, from another folder."""
    for key in PATHS:
        *parents, leaf = key.split(".")
        table: Any = tree
        for parent in parents:
            table = table.get(parent, {}) if isinstance(table, dict) else {}
        path = table.get(leaf) if isinstance(table, dict) else None
        if isinstance(path, str) and path not in {"", "hub"}:
            table[leaf] = os.path.abspath(os.path.expanduser(path))


def _put(tree: Tree, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    table = tree
    for depth, parent in enumerate(parents):
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(".".join(parents[: depth + 1]), table, f"is a value, so {key!r} cannot be set in it")
    if FRESH.get(".".join(parents)) == leaf and table.get(leaf) != value:
        table.clear()
    if key in FRESH and not isinstance(value, dict):
        raise ConfigError(key, value, f"is a table of keys, not a value; did you mean {key}.{FRESH[key]}={value}?")
    table[leaf] = copy.deepcopy(value)


def _explain(error: ErrorDetails) -> UserError:
    location, tags = _without_tags(error["loc"])
    key = ".".join(location)
    value = error["input"]
    kind = error["type"]
    if kind == "extra_forbidden":
        return UserError(f"{key}: no such key; {_suggest(location, tags)}")
    if kind == "value_error":  # raised by our own validators, which name the key themselves
        return UserError(str(error["ctx"]["error"]))
    if kind == "union_tag_invalid":
        deciding = f"{key}.{VARIANTS[key]}"
        tag = error["ctx"]["tag"]
        allowed = error["ctx"]["expected_tags"].replace("'", "")
        close = difflib.get_close_matches(str(tag), allowed.split(", "), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return ConfigError(deciding, tag, f"must be one of {allowed}{hint}")
    if kind == "union_tag_not_found":
        return UserError(f"{key}.{VARIANTS[key]}: is missing; say which one is meant")
    if kind == "missing":
        return UserError(f"{key}: is missing")
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return ConfigError(key, value, "is a table of keys, not a value")
    message = error["msg"].removeprefix("Input ").replace("should", "must")
    return ConfigError(key, value, message)


def _without_tags(location: tuple[int | str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Part the variants' tags that pydantic puts into a path from it: ('method', 'fedprox', 'mu') is method.mu."""
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
    for depth, parent in enumerate(parents):
        tables = [inner for table in tables for inner in _tables_of(table, parent)]
        path = ".".join(parents[: depth + 1])
        if path in tags and path != where:
            tables = [table for table in tables if _tag(table, path) == tags[path]]
    holders = [_tag(table, where) for table in tables if leaf in table.model_fields] if where in tags else []
    if holders:
        deciding = f"{where}.{VARIANTS[where]}"
        return f"it belongs to {deciding} = {' or '.join(holders)}, and {deciding} is {tags[where]}"
    if where in tags:
        tables = [table for table in tables if _tag(table, where) == tags[where]]
    allowed = sorted({name for table in tables for name in table.model_fields})
    close = difflib.get_close_matches(leaf, allowed, n=1)
    known = f"{where or 'the top level'} knows {', '.join(allowed)}"
    return f"did you mean {'.'.join([*parents, close[0]])}? ({known})" if close else known


def _tag(table: type[BaseModel], path: str) -> str:
    return str(table.model_fields[VARIANTS[path]].default)


def _tables_of(table: type[BaseModel], field: str) -> list[type[BaseModel]]:
    annotation = table.model_fields[field].annotation if field in table.model_fields else None
    candidates = [annotation, *get_args(annotation)]
    return [one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)]
