"""Registries of what users may extend: methods, data sets, models, partitions, metrics, trackers and more.

A component is registered under a name, with a table of its parameters. The configuration's tables are built from the
registries, so a component from a user's own file is configured, validated and listed like a built-in one. The built-in
components are registered by the same decorators; their modules are imported when a registry is first looked at.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from vitfleet.config.base import Table
from vitfleet.errors import ConfigError, UserError

T = TypeVar("T")
Registered = TypeVar("Registered")
PACKAGE = "vitfleet"


class NoParams(Table):
    """The parameter table of a component without parameters."""


@dataclass(frozen=True)
class Origin:
    """Where a component was defined.

    Attributes
    ----------
    module
        Name of the module that registered it.
    file
        The module's file; empty for code that was typed into an interpreter or a notebook.
    sha256
        Hash of the file's content when it was registered.
    """

    module: str
    file: str = ""
    sha256: str = ""

    @property
    def built_in(self) -> bool:
        """Whether the component is part of vitfleet itself."""
        return self.module.split(".")[0] == PACKAGE

    @classmethod
    def of(cls, target: object) -> Origin:
        """Return the origin of a class or function."""
        module = str(getattr(target, "__module__", ""))
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        content = Path(file).read_bytes() if file and Path(file).is_file() else b""
        return cls(module, file, sha256(content).hexdigest() if content else "")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered component.

    Attributes
    ----------
    title
        What it is called in tables and figures.
    target
        The registered class or function.
    declared_params
        Its parameter table, as it was registered.
    params
        The table with the component's name fixed in its tag, if the registry has one.
    """

    name: str
    title: str
    target: T
    declared_params: type[Table]
    params: type[Table]
    origin: Origin

    @property
    def summary(self) -> str:
        """First line of the parameter table's docstring, or of the component's."""
        documented = next((doc for doc in (self.params.__doc__, getattr(self.target, "__doc__", None)) if doc), "")
        return documented.strip().splitlines()[0] if documented.strip() else ""


class Registry(Generic[T]):
    """Components of one kind, by name.

    Parameters
    ----------
    kind
        What a component is, for messages: ``method``, ``partition``, …
    key
        The configuration key that names a component: ``method.name``.
    builtin
        Modules whose import registers the built-in components.
    tagged
        Whether a component's parameters form a table of their own that holds the name too (``[method]``), instead of
        lying under the name (``[metrics.NAME]``).
    """

    def __init__(self, kind: str, key: str, builtin: tuple[str, ...], tagged: bool = True) -> None:
        self.kind = kind
        self.key = key
        self.tag = key.rpartition(".")[2] if tagged else None
        self._builtin = builtin
        self._loading = False
        self._entries: dict[str, Entry[T]] = {}
        ALL.append(self)

    def register(
        self, name: str, params: type[Table] = NoParams, title: str = ""
    ) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a class or function under a name.

        A name can be registered again by the module that registered it, as a notebook cell does when it is run twice.

        Parameters
        ----------
        title
            What it is called in tables and figures; by default its name.
        """

        def decorator(target: Registered) -> Registered:
            origin = Origin.of(target)
            known = self._entries.get(name)
            if known is not None and known.origin.module != origin.module and known.origin.file != origin.file:
                raise UserError(
                    f"{self.kind} {name!r} ({origin.file or origin.module}): the name is taken by "
                    f"{known.origin.file or known.origin.module}; choose another name"
                )
            table = params if self.tag is None else _tagged(params, self.tag, name)
            self._entries[name] = Entry(name, title or name, target, params, table, origin)  # type: ignore[arg-type]
            _rebuild_configuration()
            return target

        return decorator

    def __iter__(self) -> Iterator[Entry[T]]:
        self._load_builtin()
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        self._load_builtin()
        return name in self._entries

    def __getitem__(self, name: str) -> Entry[T]:
        self._load_builtin()
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(self.key, name, f"must be one of {', '.join(self._entries)}{hint}")
        return self._entries[name]

    def get(self, name: str) -> Entry[T] | None:
        """Return a component's entry; ``None`` if no component has this name."""
        self._load_builtin()
        return self._entries.get(name)

    def entry_of(self, params: Table) -> Entry[T]:
        """Return the component that a parameter table belongs to."""
        found = [entry for entry in self if type(params) in (entry.params, entry.declared_params)]
        if not found:
            raise TypeError(f"{type(params).__name__} is not the parameter table of a registered {self.kind}")
        return found[-1]

    def names(self) -> list[str]:
        """Return all names, in the order of registration."""
        return [entry.name for entry in self]

    def make_params(self, name: str, **values: Any) -> Any:
        """Return a component's parameter table with these values."""
        return self[name].params(**values)

    def _load_builtin(self) -> None:
        if self._builtin and not self._loading:
            self._loading = True
            for module in self._builtin:
                import_module(module)


ALL: list[Registry[Any]] = []
_on_change: list[Callable[[], None]] = []


def on_change(callback: Callable[[], None]) -> Callable[[], None]:
    """Call a function whenever a component is registered."""
    _on_change.append(callback)
    return callback


def _rebuild_configuration() -> None:
    for callback in _on_change:
        callback()


def _tagged(params: type[Table], tag: str, name: str) -> type[Table]:
    """Return a parameter table in which the tag has one possible value."""
    fields: dict[str, Any] = {tag: (Literal[name], name)}
    table: type[Table] = create_model(
        params.__name__, __base__=params, __module__=params.__module__, __doc__=params.__doc__, **fields
    )
    return table


class OneOf:
    """Annotation of a field that holds the table of one registered component, which the table's tag names.

    Parameters
    ----------
    default
        The component that is meant where the tag is left out; ``None``: leaving it out is an error.
    """

    def __init__(self, registry: Registry[Any], default: str | None = None) -> None:
        self.registry = registry
        self.default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a union of the tables of all registered components."""
        choices = {entry.name: handler.generate_schema(entry.params) for entry in self.registry}
        union = core_schema.tagged_union_schema(choices, discriminator=self.registry.tag or "")
        return core_schema.no_info_before_validator_function(self._with_tag, union)

    def _with_tag(self, value: Any) -> Any:
        """Add the tag to a table that has none: a component's own parameter table, or one that means the default."""
        tag = self.registry.tag or ""
        if isinstance(value, Table) and not getattr(value, tag, None):
            return {**value.model_dump(), tag: self.registry.entry_of(value).name}
        if isinstance(value, dict) and self.default is not None:
            return {tag: self.default, **value}
        return value


class ByName:
    """Annotation of a field that holds the tables of several registered components, by name."""

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a table whose keys are the names of all registered components."""
        fields = {
            entry.name: core_schema.typed_dict_field(handler.generate_schema(entry.params), required=False)
            for entry in self.registry
        }
        return core_schema.typed_dict_schema(fields, extra_behavior="forbid", total=False)


def registry_of(field: FieldInfo) -> OneOf | ByName | None:
    """Return the annotation of a field whose tables come from a registry; ``None`` for any other field."""
    return next((mark for mark in field.metadata if isinstance(mark, OneOf | Parameters)), None)


def tables_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the tables of all components that may stand in a field."""
    mark = registry_of(field)
    return [] if mark is None else [entry.params for entry in mark.registry]


def validate_params(registry: Registry[Any], name: str, values: dict[str, Any], prefix: str) -> Table:
    """Validate the parameters of a component that lie in a table beside its name.

    Raises
    ------
    ConfigError
        Names the key, its value and the remedy.
    """
    entry = registry.get(name)
    table = NoParams if entry is None else entry.params
    unknown = sorted(set(values) - set(table.model_fields))
    if unknown:
        allowed = f"{name!r} has the parameters {', '.join(table.model_fields)}" if table.model_fields else (
            f"{name!r} has no parameters"
        )  # fmt: skip
        raise ConfigError(f"{prefix}.{unknown[0]}", values[unknown[0]], f"no such key; {allowed}")
    try:
        return table.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([prefix, *map(str, first["loc"])])
        raise ConfigError(key, first["input"], first["msg"].removeprefix("Input ").replace("should", "must")) from None


METHODS: Registry[Any] = Registry("method", "method.name", ("vitfleet.methods",))
PARTITIONS: Registry[Any] = Registry("partition", "data.partition.kind", ("vitfleet.data.partitions.partitioners",))
AGGREGATIONS: Registry[Any] = Registry("aggregation", "aggregate.rule", ("vitfleet.methods.aggregation.rules",))
SERVER_OPTIMIZERS: Registry[Any] = Registry(
    "server optimiser", "server.optimizer", ("vitfleet.methods.aggregation.server_optimizers",)
)
DATASETS: Registry[Any] = Registry("data set", "data.name", ("vitfleet.data.sources.named",), tagged=False)
MODELS: Registry[Any] = Registry("model", "model.name", ("vitfleet.models.zoo",), tagged=False)
METRICS: Registry[Any] = Registry("metric", "metrics", ("vitfleet.run.evaluate.metrics",), tagged=False)
TRACKERS: Registry[Any] = Registry("tracker", "trackers", ("vitfleet.run.output.trackers",), tagged=False)
CALLBACKS: Registry[Any] = Registry("callback", "callbacks", ("vitfleet.run.callbacks",), tagged=False)

register_method = METHODS.register
register_partition = PARTITIONS.register
register_aggregation = AGGREGATIONS.register
register_server_optimizer = SERVER_OPTIMIZERS.register
register_dataset = DATASETS.register
register_model = MODELS.register
register_metric = METRICS.register
register_tracker = TRACKERS.register
register_callback = CALLBACKS.register


def method_label(name: str) -> str:
    """Return a run's name with the method that it begins with as its title: ``FedProx mu=0.1`` for ``fedprox mu=0.1``.

    A name that begins with something else is returned as it is, as is that of a method that is not loaded.
    """
    method, space, rest = name.partition(" ")
    entry = METHODS.get(method)
    return name if entry is None else f"{entry.title}{space}{rest}"
