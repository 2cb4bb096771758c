"""The arguments of ``train`` and ``compare`` as one value each, and the runs that they describe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from vitfleet.api.best_trials import BestTrial
from vitfleet.config.base import MethodParams
from vitfleet.config.load import Overrides, from_tree, load_config, parse_overrides
from vitfleet.config.plugins import load_plugins
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.data.images import DataSet
from vitfleet.data.sources.from_objects import fingerprint, from_hf, from_tensors
from vitfleet.errors import UserError
from vitfleet.run.comparison.manifest import ComparedRun

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
    """Return a data set that was passed as an object; ``None`` for a name, a path or nothing."""
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


def members_of(request: ComparisonRequest) -> list[ComparedRun]:
    """Return the runs of every configuration × method × combination of swept values × seed."""
    sources = request.sources
    if not sources:
        raise UserError(
            "compare: name at least one configuration, or the sweep whose best values are to be run with --best-of"
        )
    found: list[tuple[str, str, str, ComparedRun]] = []
    for seed, source, (variant, own), (swept, values) in product(
        request.seeds, sources, variants(request.methods), combinations(request.sweep)
    ):
        config = _member_config(request, source, seed, {**parse_overrides(request.overrides), **own, **values})
        # The methods of a single configuration are called by their own names alone.
        stem = source_name(source) if len(sources) > 1 or not variant else ""
        found.append((stem, variant, swept, ComparedRun("", config, swept=values)))
    stems = {} if request.methods else _stems_by_method({stem: member.config for stem, _, _, member in found})
    members = []
    for stem, variant, swept, member in found:
        group = f"{stems.get(stem, stem)} {variant}".strip()
        members.append(replace(member, name=f"{group} {swept}".strip(), group=group))
    return members


def _member_config(request: ComparisonRequest, source: ConfigSource, seed: int, overrides: Mapping[str, Any]) -> Config:
    """Return a configuration of a comparison with the seed and the keys of one of its runs."""
    run = RunRequest(source, data=request.data, seed=seed, overrides=overrides, plugins=request.plugins)
    return run.resolve()[0]


def _stems_by_method(configs: Mapping[str, Config]) -> dict[str, str]:
    """Return the method's name for each configuration, with the number of its tasks if there are others of the method.

    Nothing if these names are not different.
    """
    methods = {stem: config.method.name for stem, config in configs.items()}
    tasks = {stem: f" tasks={config.num_tasks}" if config.data.tasks else "" for stem, config in configs.items()}
    names = {
        stem: method + (tasks[stem] if list(methods.values()).count(method) > 1 else "")
        for stem, method in methods.items()
    }
    return names if len(set(names.values())) == len(names) > 1 else {}


def final_members(request: ComparisonRequest, trials: Sequence[BestTrial]) -> list[ComparedRun]:
    """Return the runs of the best trials with all training images, measured on the test images."""
    overrides = parse_overrides(request.overrides)
    for trial in trials:
        chosen = [key for key in overrides if key in trial.values and key != "rounds"]
        if chosen or "data.validation" in overrides:
            key = (chosen or ["data.validation"])[0]
            raise UserError(f"{key}: is set by the best trial of {trial.name}; leave it out")
    keys = {"data.validation": 0, **overrides}
    return [
        ComparedRun(trial.name, _member_config(request, trial.config, seed, keys), trial.name)
        for seed, trial in product(request.seeds, trials)
    ]


def variants(methods: Sequence[str | Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each method's name and the keys that it sets; one without a name if there are no methods."""
    parsed = [_variant(method) for method in methods]
    names = [name for name, _ in parsed]
    found = []
    for name, keys in parsed:
        shown = [f"{key.rpartition('.')[2]}={value}" for key, value in keys.items()]
        called = " ".join([name, *shown]).replace("/", "_") if names.count(name) > 1 else name  # a folder's name too
        found.append((called, {"method.name": name, **keys}))
    return found or [("", {})]


def _variant(method: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if not isinstance(method, str):
        keys = _method_keys(method)
        return str(keys.pop("method.name")), keys
    name, *texts = method.split() or [""]
    if not name or "=" in name or not all("=" in text for text in texts):
        example = "'fed-full train.lr=3e-4 train.mask_ratio=0'"
        raise UserError(f"method {method!r}: must be a method's name, and key=value after it; for example {example}")
    # A key without a table is one of the method's own: "fedprox mu=0.1".
    return name, parse_overrides([text if "." in text.partition("=")[0] else f"method.{text}" for text in texts])


def combinations(sweep: Mapping[str, Sequence[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return every combination of swept values: its name, and the keys that it sets.

    ``{"method.k": [1, 2], "train.lr": [1e-3, 1e-4]}`` has four combinations, the first named ``k=1 lr=0.001``. Without
    a sweep there is one, without a name.
    """
    axes = [[(key, value) for value in values] for key, values in sweep.items()]
    if empty := [key for key, values in sweep.items() if not values]:
        raise UserError(f"sweep: {empty[0]} has no values; give some, for example {{'method.k': [1, 2, 3]}}")
    return [
        (" ".join(f"{key.rpartition('.')[2]}={value}" for key, value in combination), dict(combination))
        for combination in product(*axes)
    ]
