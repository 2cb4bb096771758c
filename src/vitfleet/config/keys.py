"""Every key of the configuration, for people: what `vitfleet keys` and docs/configuration.md show."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vitfleet.config.registry import Registry, parameters_of
from vitfleet.config.schema import Config

_SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


@dataclass(frozen=True)
class Key:
    """One key: its dotted name, the variant it belongs to, what it may be, its default, what it means."""

    name: str
    variant: str
    allowed: str
    default: str
    meaning: str


def every_key(table: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a table, in the order of the tables."""
    for name, field in table.model_fields.items():
        path = f"{prefix}{name}"
        mark = parameters_of(field)
        inner = [one for one in _members(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        if mark is not None and mark.registry.layout == "by name":
            for entry in mark.registry:
                yield Key(f"{path}.{entry.name}", "", "table", "", entry.summary)
                yield from every_key(entry.params, f"{path}.{entry.name}.")
        elif mark is not None and mark.registry.layout == "tagged":
            default = str(getattr(field.get_default(call_default_factory=True), mark.registry.tag))
            yield from _tagged_keys(mark.registry, default)
        elif inner:
            yield from every_key(inner[0], f"{path}.")
        else:
            yield Key(path, "", _allowed(field), _default(field), field.description or "")


def _tagged_keys(registry: Registry[Any], default: str) -> Iterator[Key]:
    """Yield the keys of a table whose tag decides which other keys it has."""
    yield Key(registry.key, "", ", ".join(registry.names()), default, "decides which keys follow")
    for entry in registry:
        for key in every_key(entry.params, f"{registry.table}."):
            if key.name != registry.key:
                yield replace(key, variant=entry.name)


def markdown() -> str:
    """Return the keys as a Markdown table."""
    lines = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for key in every_key():
        name = f"`{key.name}`" + (f" ({key.variant})" if key.variant else "")
        lines.append(f"| {name} | {key.allowed} | {key.default} | {key.meaning} |")
    return "\n".join(lines) + "\n"


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)


def _allowed(field: FieldInfo) -> str:
    return " ".join([" or ".join(map(_type, _members(field.annotation))), *_bounds(field.metadata)])


def _bounds(rules: list[Any]) -> list[str]:
    return [
        f"{sign} {getattr(rule, kind.__name__.lower())}"
        for rule in rules
        for kind, sign in _SIGNS.items()
        if isinstance(rule, kind)
    ]


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"table of numbers by {_type(get_args(annotation)[0])}"
    names = {Any: "value", str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, tuple):
        return ", ".join(map(str, field.default))
    return "null" if field.default is None else str(field.default)
