"""Registries of what users may extend: methods, data sets, models, partitions, metrics, trackers and more.

A component is registered under a name, with a table of its parameters. A key of the configuration that holds such
parameters is validated by the registry (:class:`Parameters`), so a component from a user's own file is configured,
validated and listed like a built-in one. The built-in components are registered by the same decorators; their modules
are imported when a registry is first looked at.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_origin

from pydantic import GetCoreSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, PydanticKnownError, core_schema

from vitfleet.config.base import Table
from vitfleet.config.explain import explain, suggest
from vitfleet.errors import ConfigError, UserError

T = TypeVar("T")
Registered = TypeVar("Registered")
PACKAGE = "vitfleet"
#: Where a component's parameters stand: in the table that names it (``[method]``), in a table under its name
#: (``[metrics.NAME]``), or in a table ``params`` beside the key that names it (``model.name``, ``[model.params]``).
Layout: TypeAlias = Literal["tagged", "by name", "beside"]


class NoParams(Table):
    """The parameter table of a component without parameters."""


@dataclass(frozen=True)
class Origin:
    """Where a component was defined."""

    module: str  # name of the module that registered it
    file: str = ""  # empty for code that was typed into an interpreter or a notebook
    sha256: str = ""  # of the file's content when it was registered

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
    """One registered component."""

    name: str
    title: str  # what it is called in tables and figures
    target: T  # the registered class or function
    declared_params: type[Table]  # its parameter table, as it was registered
    params: type[Table]  # the table with the component's name fixed in its tag, if the registry has one
    origin: Origin

    @property
    def summary(self) -> str:
        """First line of the parameter table's docstring, or of the component's."""
        documented = next((doc for doc in (self.params.__doc__, getattr(self.target, "__doc__", None)) if doc), "")
        return documented.strip().splitlines()[0] if documented.strip() else ""


class Registry(Generic[T]):
    """Components of one kind, by name."""

    def __init__(self, kind: str, key: str, builtin: tuple[str, ...], layout: Layout = "tagged") -> None:
        self.kind = kind  # what a component is, for messages: method, partition, …
        self.key = key  # the configuration key that names a component: method.name
        self.layout = layout
        self.table, _, self.tag = key.rpartition(".")
        self._builtin = builtin  # modules whose import registers the built-in components
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
            table = _tagged(params, self.tag, name) if self.layout == "tagged" else params
            self._entries[name] = Entry(name, title or name, target, params, table, origin)  # type: ignore[arg-type]
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
        if not isinstance(name, str) or name not in self._entries:
            close = difflib.get_close_matches(str(name), self._entries, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(self.key, str(name), f"must be one of {', '.join(self._entries)}{hint}")
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

    def make_params(self, name: str, /, **values: Any) -> Any:
        """Return a component's parameter table with these values."""
        return self.validate(name, values)

    def validate(self, name: str, values: Any) -> Table:
        """Return the parameter table of a component, from the values of its keys."""
        params = self._params_of(name)
        try:
            return params.model_validate(values)
        except ValidationError as error:
            raise self._explain(error.errors()[0], name, params) from None

    def _params_of(self, name: str) -> type[Table]:
        if self.layout == "beside":  # a name may also be that of the user's own images, or of a model of timm
            entry = self.get(name)
            return NoParams if entry is None else entry.params
        if self.layout == "by name" and name not in self:
            raise UserError(f"{self.key}.{name}: no such key; {suggest(str(name), self.names(), self.key)}")
        return self[name].params

    def _explain(self, error: ErrorDetails, name: str, params: type[Table]) -> UserError:
        """Explain what is wrong with the parameters of a component."""
        where = {"tagged": self.table, "by name": f"{self.key}.{name}", "beside": f"{self.table}.params"}[self.layout]
        if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
            key = str(error["loc"][0])
            if self.layout == "beside":
                known = ", ".join(params.model_fields)
                allowed = f"has the parameters {known}" if known else "has no parameters"
                return ConfigError(f"{where}.{key}", error["input"], f"no such key; {name!r} {allowed}")
            owners = [entry.name for entry in self if key in entry.params.model_fields]
            if self.layout == "tagged" and owners:
                owned = f"it belongs to {self.key} = {' or '.join(owners)}, and {self.key} is {name}"
                return UserError(f"{where}.{key}: no such key; {owned}")
        return explain(error, params, where)

    def _load_builtin(self) -> None:
        if self._builtin and not self._loading:
            self._loading = True
            for module in self._builtin:
                import_module(module)


ALL: list[Registry[Any]] = []


def _tagged(params: type[Table], tag: str, name: str) -> type[Table]:
    """Return a parameter table in which the tag has one possible value."""
    if tag in params.model_fields and get_origin(params.model_fields[tag].annotation) is Literal:
        return params  # it says so itself
    fields: dict[str, Any] = {tag: (Literal[name], name)}
    table: type[Table] = create_model(
        params.__name__, __base__=params, __module__=params.__module__, __doc__=params.__doc__, **fields
    )
    return table


class Parameters:
    """Annotation of a field that holds parameters of a registry's components, in the registry's layout.

    The value is a parameter table, or for parameters under their components' names a dictionary of them. Parameters
    beside the name stay as they were given: what is saved holds no defaults of theirs.
    Where the tag is left out, the component ``default`` is meant; without one that is an error.
    """

    def __init__(self, registry: Registry[Any], default: str | None = None) -> None:
        self.registry = registry
        self.default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that asks the registry when it validates: components may be registered at any time."""
        serialization = core_schema.plain_serializer_function_ser_schema(_as_tree, info_arg=True)
        return core_schema.with_info_plain_validator_function(self._validate, serialization=serialization)

    def _validate(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        registry = self.registry
        if registry.layout == "tagged" and isinstance(value, dict | Table):
            return self._validate_tagged(value)
        if not isinstance(value, dict):
            raise PydanticKnownError("dict_type")
        if registry.layout == "by name":
            return {name: registry.validate(name, values) for name, values in value.items()}
        if registry.tag in (info.data or {}):  # else the name is wrong, and reported
            registry.validate(info.data[registry.tag], value)
        return value

    def _validate_tagged(self, value: dict[str, Any] | Table) -> Table:
        registry, tag = self.registry, self.registry.tag
        if isinstance(value, Table):
            name = getattr(value, tag, None) or registry.entry_of(value).name
            if type(value) is registry[name].params:
                return value
            value = {**value.model_dump(), tag: name}
        if tag not in value and self.default is None:
            raise UserError(f"{registry.key}: is missing; set it")
        value = {tag: self.default, **value}
        return registry.validate(value[tag], value)


def _as_tree(value: Any, info: core_schema.SerializationInfo) -> Any:
    """Return parameters as plain values."""
    if isinstance(value, Table):
        return value.model_dump(mode=info.mode)
    return {key: _as_tree(item, info) for key, item in value.items()} if isinstance(value, dict) else value


def parameters_of(field: FieldInfo) -> Parameters | None:
    """Return the annotation of a field that holds parameters of components; ``None`` for any other field."""
    return next((mark for mark in field.metadata if isinstance(mark, Parameters)), None)


METHODS: Registry[Any] = Registry("method", "method.name", ("vitfleet.methods",))
PARTITIONS: Registry[Any] = Registry("partition", "data.partition.kind", ("vitfleet.data.partitions.partitioners",))
AGGREGATIONS: Registry[Any] = Registry("aggregation", "aggregate.rule", ("vitfleet.methods.aggregation.rules",))
SERVER_OPTIMIZERS: Registry[Any] = Registry(
    "server optimiser", "server.optimizer", ("vitfleet.methods.aggregation.server_optimizers",)
)
SCHEDULES: Registry[Any] = Registry("schedule", "fleet.schedule.kind", ("vitfleet.config.fleet",))
DATASETS: Registry[Any] = Registry("data set", "data.name", ("vitfleet.data.sources.named",), "beside")
MODELS: Registry[Any] = Registry("model", "model.name", ("vitfleet.models.zoo",), "beside")
METRICS: Registry[Any] = Registry("metric", "metrics", ("vitfleet.run.evaluate.metrics",), "by name")
TRACKERS: Registry[Any] = Registry("tracker", "trackers", ("vitfleet.run.output.trackers",), "by name")
CALLBACKS: Registry[Any] = Registry("callback", "callbacks", ("vitfleet.run.callbacks",), "by name")

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
