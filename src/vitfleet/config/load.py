"""Configurations from a preset or a file, with overrides."""

from __future__ import annotations

import copy
import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from vitfleet.config import plugins as plugin_loader
from vitfleet.config.data import tasks_divide
from vitfleet.config.explain import explain
from vitfleet.config.limits import MAX_SAVED_TEXT, MAX_TEXT, check_key, check_text, check_tree, check_words
from vitfleet.config.registry import ALL, MODELS, Registry
from vitfleet.config.run_title import titled_parts
from vitfleet.config.schema import Config
from vitfleet.config.train import NAMED_WEIGHTS
from vitfleet.config.trust import check_trusted
from vitfleet.errors import ConfigError, UserError
from vitfleet.files import COMPARISON_FILE, CONFIG_FILE, parse_json, read_json

Tree = dict[str, Any]
#: Keys to set: ``{"train.lr": 1e-3}``, or texts as given to ``-o``: ``["train.lr=1e-3"]``.
Overrides: TypeAlias = Mapping[str, Any] | Iterable[str]

# Tables that are emptied when one key changes: the other keys were set for its earlier value.
FRESH = {
    "method": "name",
    "data.partition": "kind",
    "fleet.schedule": "kind",
    "model": "name",
    "server": "optimizer",
}
# Keys that name a file or folder.
PATHS = ("data.path", "data.dir", "data.partition.path", "model.weights")


@cache
def _preset_texts() -> dict[str, str]:
    """Return the text of every shipped preset's file."""
    entries = {entry.name: entry for entry in (files("vitfleet") / "presets").iterdir()}
    names = sorted(name for name in entries if name.endswith(".toml"))
    return {name.removesuffix(".toml"): entries[name].read_text(encoding="utf-8") for name in names}


def presets() -> dict[str, str]:
    """Return every shipped preset's name and its one-line title."""
    return {name: str(tomllib.loads(text).get("title", "")) for name, text in _preset_texts().items()}


def preset_text(name: str) -> str:
    """Return a shipped preset as the text of its file."""
    if name not in _preset_texts():
        raise _unknown_preset(name)
    return _preset_texts()[name]


def load_config(
    source: str,
    overrides: Overrides = (),
    base: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Config:
    """Read a preset or a file and apply overrides.

    Parameters
    ----------
    source
        A preset's name, or the path of a ``.toml`` or ``.json`` file.
    overrides
        Values by dotted key, or ``key=value`` texts as given to ``-o``, whose value is TOML or a bare string.
    base
        Values that replace the source's before the overrides are applied, by dotted key (``--seed``, ``--data-dir``);
        ``None``: not given.
    plugins
        Plug-in files to load in addition to those that the source names.
    """
    return from_tree(_read_source(source), overrides, base, plugins)


def from_tree(
    tree: Tree,
    overrides: Overrides = (),
    base: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Config:
    """Apply overrides to a tree of plain values and validate it: see :func:`load_config`."""
    given = list(parse_overrides(overrides).items())
    check_tree([tree, *(value for _, value in given)])
    tree = copy.deepcopy(tree)
    tree["plugins"] = [*_listed_plugins(tree), *map(str, plugins)]
    plugin_loader.load_plugins(tree["plugins"])  # what they register counts as known below
    meant = copy.deepcopy(titled_parts(tree))
    for key, value in (base or {}).items():
        if value is not None:
            _put(tree, key, value)
    # The deciding keys first: `-o method.mu=1 -o method.name=fedprox` means the same in either order.
    given.sort(key=lambda pair: not any(pair[0] == f"{table}.{key}" for table, key in FRESH.items()))
    had_tasks = _tasks(tree) is not None
    for key, value in given:
        _put(tree, key, value)
    if _tasks(tree) is not None and not _partitions_tasks(tree):
        if any(key.startswith("data.partition") for key, _ in given):
            raise tasks_divide(_table_of(tree, "data.partition.kind")[0].get("kind", "dirichlet"))
        if not had_tasks:  # the source's partition is not for them
            tree["data"].pop("partition", None)
    if meant != titled_parts(tree) and "title" not in dict(given):
        tree["title"] = ""  # the source's title says what it was
    _make_paths_absolute(tree)
    return validate(tree)


def read_config(path: Path) -> Config:
    """Read back the configuration that a run saved."""
    check_text(str(path), path.stat().st_size, MAX_SAVED_TEXT)
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: is damaged (it holds no table); restore it from a copy")
    return validate_saved(tree)


def validate_saved(tree: Tree) -> Config:
    """Turn a saved tree into a configuration. It may be somebody else's: its plug-ins must be trusted here."""
    check_tree([tree])
    check_trusted([*_listed_plugins(tree), *(table[leaf].rpartition(":")[0] for _, table, leaf in _references(tree))])
    return validate(tree)


def validate(tree: Tree, load_plugins: bool = True) -> Config:
    """Turn a tree of plain values into a configuration.

    ``load_plugins`` is false for a tree that came from another machine: then only what is installed or loaded here
    already can be used.
    """
    check_tree([tree])
    if load_plugins:
        tree = _with_plugins(tree)
    else:
        plugin_loader.load_installed()
        tree = {**tree, "plugins": []}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise explain(error.errors()[0], Config) from None


def _with_plugins(tree: Tree) -> Tree:
    """Load a tree's plug-ins, and resolve names such as ``mine.py:Mine``."""
    paths = _listed_plugins(tree)
    plugin_loader.load_plugins(paths)
    tree = copy.deepcopy(tree)
    for registry, table, leaf in _references(tree):
        path, table[leaf] = plugin_loader.resolve(table[leaf], registry)
        paths.append(path)
    tree["plugins"] = list(dict.fromkeys(os.path.abspath(os.path.expanduser(path)) for path in paths))
    return tree


def _listed_plugins(tree: Tree) -> list[str]:
    """Return the plug-ins that a tree names."""
    listed = tree.get("plugins", ())
    if not isinstance(listed, list | tuple) or not all(isinstance(path, str) for path in listed):
        raise ConfigError("plugins", listed, "must be a list of paths of .py files")
    return list(listed)


def _references(tree: Tree) -> Iterator[tuple[Registry[Any], Tree, str]]:
    """Yield where a tree names a component by its file, ``mine.py:Mine``: its registry, the table and the key in it."""
    for registry in ALL:
        table, leaf = _table_of(tree, registry.key)
        if isinstance(table.get(leaf), str) and table[leaf].rpartition(":")[0].endswith(".py"):
            yield registry, table, leaf


def _unknown_preset(name: str) -> UserError:
    if "=" in name:
        quoted = f"--method 'NAME {name}'"
        return UserError(f"{name}: a key is set with -o {name}; those of one method are inside its quotes: {quoted}")
    if (Path(name) / CONFIG_FILE).is_file():
        return UserError(f"{name}: is the folder of a run; name its {Path(name) / CONFIG_FILE}, or a preset")
    if (Path(name) / COMPARISON_FILE).is_file():
        return UserError(f"{name}: is the folder of a comparison; `vitfleet resume {name}` resumes it")
    if Path(name).is_dir():
        return UserError(
            f"{name}: is a folder; name a preset or a file, and the images of a folder with -o data.path={name}"
        )
    close = difflib.get_close_matches(name, _preset_texts(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`vitfleet presets` lists them."
    return UserError(f"no preset is called {name!r}: {hint} A file's name must end in .toml or .json.")


def _read_source(source: str) -> Tree:
    if source in _preset_texts():
        return tomllib.loads(_preset_texts()[source])
    path = Path(source)
    if path.suffix not in {".toml", ".json"}:
        raise _unknown_preset(source)
    if not path.is_file():
        raise UserError(f"{source}: there is no such file; `vitfleet presets` lists the shipped configurations.")
    check_text(source, path.stat().st_size, MAX_SAVED_TEXT if path.suffix == ".json" else MAX_TEXT)
    try:
        text = path.read_text(encoding="utf-8")
        tree = _parse_toml(source, text) if path.suffix == ".toml" else parse_json(text)
    except ValueError as error:
        raise UserError(f"{source}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{source}: must hold a table of keys, not a {type(tree).__name__}.")
    _resolve_beside(tree, path.parent)
    return tree


def _resolve_beside(tree: Tree, folder: Path) -> None:
    """Resolve the plug-ins that a file names by relative paths: they lie beside the file."""
    listed = tree.get("plugins")
    if isinstance(listed, list):
        tree["plugins"] = [str(folder / name) if isinstance(name, str) else name for name in listed]
    for _, table, leaf in _references(tree):
        if (folder / table[leaf].rpartition(":")[0]).is_file():
            table[leaf] = str(folder / table[leaf])


def parse_overrides(overrides: Overrides) -> dict[str, Any]:
    """Return overrides as values by dotted key; of a key that is given twice, the last value."""
    if isinstance(overrides, Mapping):
        parsed = dict(overrides)
    else:
        texts = list(overrides)
        check_text("-o", sum(map(len, texts)))
        parsed = dict(map(_parse_override, texts))
    for key in parsed:
        check_key(key)
    return parsed


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Return the method's name and the keys of ``NAME [KEY=VALUE…]``: a key without a table is the method's own."""
    name, *texts = text.split() or [""]
    if not name or "=" in name or not all("=" in text for text in texts):
        example = "'fed-full train.lr=3e-4 train.mask_ratio=0'"
        raise UserError(f"method {text!r}: must be a method's name, and key=value after it; for example {example}")
    return name, parse_overrides([text if "." in text.partition("=")[0] else f"method.{text}" for text in texts])


def _parse_override(text: str) -> tuple[str, Any]:
    key, sign, raw = text.partition("=")
    key = key.strip()
    if not sign or not key:
        raise UserError(f"-o {text}: must look like key=value, for example -o train.lr=1e-3")
    raw = raw.strip()
    if raw in {"null", "none", "None"}:  # TOML has no word for it
        return key, None
    try:
        return key, _parse_toml(f"-o {key}", f"value = {raw}")["value"]
    except ValueError:
        return key, raw


def _parse_toml(source: str, text: str) -> Tree:
    """Return what a TOML text says; a ``ValueError`` if it is not TOML, or nested too deeply."""
    check_words(source, text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _table_of(tree: Tree, key: str) -> tuple[Tree, str]:
    """Return the table that holds a dotted key, empty if there is none, and the key's last part."""
    *parents, leaf = key.split(".")
    table: Any = tree
    for parent in parents:
        table = table.get(parent) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}, leaf


def _tasks(tree: Tree) -> Any:
    table, leaf = _table_of(tree, "data.tasks")
    return table.get(leaf)


def _partitions_tasks(tree: Tree) -> bool:
    """Whether the partition divides each task's images."""
    table, leaf = _table_of(tree, "data.tasks.partitioned")
    return table.get(leaf) is True


def _make_paths_absolute(tree: Tree) -> None:
    """Make paths absolute: a run may be resumed from another folder."""
    for key in PATHS:
        table, leaf = _table_of(tree, key)
        path = table.get(leaf)
        named = key == "model.weights" and path in NAMED_WEIGHTS
        if isinstance(path, str) and path and not named:
            table[leaf] = os.path.abspath(os.path.expanduser(path))


def _put(tree: Tree, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    table = tree
    for depth, parent in enumerate(parents):
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(".".join(parents[: depth + 1]), table, f"is a value, so {key!r} cannot be set in it")
    if FRESH.get(".".join(parents)) == leaf and table.get(leaf) != value:
        _clear(table, key, value)
    if key in FRESH and not isinstance(value, dict):
        raise ConfigError(key, value, f"is a table of keys, not a value; did you mean {key}.{FRESH[key]}={value}?")
    table[leaf] = copy.deepcopy(value)


def _clear(table: Tree, key: str, value: Any) -> None:
    """Empty a table whose deciding key changes.

    Registered models take any image size, so the size is part of the experiment and is kept. The models of timm have
    sizes of their own.
    """
    kept = {"image_size": table["image_size"]} if key == "model.name" and "image_size" in table else {}
    table.clear()
    if kept and isinstance(value, str) and (value in MODELS or ".py:" in value):  # registered, or to be registered
        table.update(kept)
