"""The arguments of ``train`` and ``compare`` as one value each, and the configuration that they describe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from vitfleet.config.base import MethodParams
from vitfleet.config.load import Overrides, from_tree, load_config, parse_overrides
from vitfleet.config.plugins import load_plugins
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.data.images import DataSet
from vitfleet.data.sources.from_objects import fingerprint, from_hf, from_tensors
from vitfleet.errors import UserError

#: A preset's name, the path of a TOML or JSON file, a tree of keys, or a configuration.
ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Config
#: A registered method's name, its class, its parameter table, or ``{"name": …, key: value}``.
MethodSource: TypeAlias = str | type | MethodParams | Mapping[str, Any]


@dataclass(frozen=True)
class RunRequest:
    """What a run is asked to be: the arguments of :func:`vitfleet.train`, where they are explained.

    How it is executed (callbacks, progress, force) is not part of it.
    """

    config: ConfigSource
    method: MethodSource | None = None
    data: Any = None
    seed: int | None = None
    overrides: Overrides = ()
    plugins: Iterable[str | Path] = ()
    out: str | Path | None = None
    command: Sequence[str] = ()

    def resolve(self) -> tuple[Config, DataSet | None]:
        """Return the configuration, and the data set if it was passed as an object instead of a name or a path."""
        paths = list(self.plugins)
        load_plugins(paths)
        images = as_data_set(self.data)
        keys = {**_method_keys(self.method), **_data_keys(self.data, images), **parse_overrides(self.overrides)}
        base, source = {"seed": self.seed}, self.config
        if not isinstance(source, Config | Mapping):
            return load_config(os.fspath(source), keys, base, paths), images
        tree = source.model_dump(mode="json") if isinstance(source, Config) else dict(source)
        return from_tree(tree, keys, base, paths), images


@dataclass(frozen=True)
class ComparisonRequest:
    """What a comparison is asked to be: the arguments of :func:`vitfleet.compare`, where they are explained.

    How it is executed (jobs, callbacks, progress, force) is not part of it.
    """

    configs: ConfigSource | Sequence[ConfigSource] = ()
    best_of: str | Path | None = None
    methods: Sequence[str | Mapping[str, Any]] = ()
    seeds: Iterable[int] = (0,)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    data: Any = None
    overrides: Overrides = ()
    plugins: Iterable[str | Path] = ()
    target: float | None = None
    out: str | Path | None = None
    command: Sequence[str] = ()

    @property
    def sources(self) -> Sequence[ConfigSource]:
        """The configurations, as a list even if there is only one."""
        if isinstance(self.configs, str) or not isinstance(self.configs, Sequence):
            return [self.configs]
        return self.configs


def source_name(source: ConfigSource) -> str:
    """Return what a run of a configuration is called: the preset's or the file's name."""
    return "run" if isinstance(source, Config | Mapping) else Path(os.fspath(source)).stem


def _method_keys(method: MethodSource | None) -> dict[str, Any]:
    if method is None:
        return {}
    if isinstance(method, str):
        return {"method.name": method}
    if isinstance(method, type):
        names = [entry.name for entry in METHODS if entry.target is method]
        if not names:
            raise UserError(f"method = {method.__name__}: is not registered; decorate it with @register_method")
        return {"method.name": names[-1]}
    table = method.model_dump() if isinstance(method, MethodParams) else dict(method)
    name = table.pop("name", "") or (METHODS.entry_of(method).name if isinstance(method, MethodParams) else "")
    if not name:
        raise UserError(f"method = {method}: has no name; give {{'name': 'fedprox', 'mu': 0.1}}, for example")
    return {"method.name": name, **{f"method.{key}": value for key, value in table.items()}}


def _data_keys(data: Any, images: DataSet | None) -> dict[str, Any]:
    if images is not None:
        return {"data.name": images.name, "data.path": None, "data.fingerprint": fingerprint(images)}
    if data is None:
        return {}
    text = os.fspath(data)
    if isinstance(data, os.PathLike) or Path(text).exists():
        return {"data.path": text}
    return {"data.name": text}


def as_data_set(data: Any) -> DataSet | None:
    """Return a data set that was passed as an object; ``None`` for a name, a path or nothing.

    Parameters
    ----------
    data
        A :class:`~vitfleet.data.images.DataSet`, a ``datasets.Dataset`` or ``DatasetDict``, or tensors: ``(images,
        labels)``, or ``{"train": (images, labels), "test": (images, labels), "class_names": names}``.
    """
    if data is None or isinstance(data, str | os.PathLike):
        return None
    if isinstance(data, DataSet):
        return data
    if type(data).__module__.split(".")[0] == "datasets":
        return from_hf(data)
    if isinstance(data, tuple) and len(data) == 2:
        return from_tensors(*data)
    if isinstance(data, Mapping) and {"train"} <= data.keys() <= {"train", "test", "class_names"}:
        images, labels = data["train"]
        return from_tensors(images, labels, test=data.get("test"), class_names=data.get("class_names"))
    raise UserError(
        f"data = {type(data).__name__}: must be a folder, a data set's name, hf:owner/name, a datasets.Dataset, "
        "(images, labels), or {'train': (images, labels), 'test': (images, labels), 'class_names': names}"
    )
