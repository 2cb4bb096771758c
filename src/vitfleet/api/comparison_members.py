"""The runs of a comparison: configurations × methods × swept values × seeds, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from vitfleet.api.best_trials import BestTrial
from vitfleet.api.request import ComparisonRequest, ConfigSource, RunRequest, source_name
from vitfleet.config.load import parse_overrides
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.run.comparison.manifest import ComparedRun


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
        keys = dict(method)
        name = keys.pop("name", "")
        if not name:
            raise UserError(f"methods: {dict(method)} has no name; give {{'name': 'fedprox', 'mu': 0.1}}, for example")
        return str(name), {f"method.{key}": value for key, value in keys.items()}
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
