"""Plug-ins: a user's own methods, data sets, metrics, … from a file or an installed package.

A plug-in is a Python file whose import registers components (:mod:`vitfleet.config.registry`). It is named by a path
(``--plugin mine.py``, the key ``plugins``, or ``method.name = "mine.py:Mine"``), or it comes with an installed package
that has an entry point in the group ``vitfleet.plugins``. A plug-in is code: it is loaded only from the machine it runs
on, because the person at that machine named or installed it. A server never makes a client load one.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfleet.config.registry import ALL, Registry
from vitfleet.config.trust import trust_plugins
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.config.schema import Config

GROUP = "vitfleet.plugins"
_loaded: dict[str, str] = {}  # hash of each plug-in file, by its path
_entry_points_loaded = False


@dataclass(frozen=True)
class UsedComponent:
    """A component that a configuration uses and that is not part of vitfleet."""

    kind: str  # what it is: `method`, …
    name: str  # under which it is registered
    origin: str  # its file, or its module where it has none
    sha256: str  # of the file; empty where it has none
    title: str = ""  # its name in tables


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Load plug-in files, and those of installed packages; one that is loaded already is not run again."""
    load_installed()
    for path in paths:
        load_file(Path(path))


def load_file(path: Path) -> str:
    """Import a plug-in file and return its absolute path."""
    file = path.expanduser().resolve()
    if not file.is_file() or file.suffix != ".py":
        raise UserError(f"plug-in {path}: no such Python file; give the path of a .py file")
    digest = sha256(file.read_bytes()).hexdigest()
    if _loaded.get(str(file)) == digest:
        return str(file)
    name = f"vitfleet_plugin_{re.sub(r'[^a-zA-Z0-9]', '_', file.stem)}_{sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pydantic look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        if isinstance(error, UserError):
            raise
        raise UserError(f"plug-in {path}: {_location(error, file)}{type(error).__name__}: {error}") from error
    _loaded[str(file)] = digest
    trust_plugins(file)  # one that a saved run names was trusted before
    return str(file)


def _location(error: Exception, file: Path) -> str:
    """Return the line of the plug-in at which an import failed, as far as it can be told."""
    traceback, line = error.__traceback__, getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(file):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: " if line else ""


def load_installed() -> None:
    """Load the plug-ins of installed packages, once per process."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except UserError:
            raise
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            raise UserError(
                f"plug-in {point.name} of the installed package {package}: {type(error).__name__}: {error}; "
                f"update or uninstall {package}"
            ) from error


def resolve(reference: str, registry: Registry[Any]) -> tuple[str, str]:
    """Resolve ``FILE.py:NAME`` to the plug-in's absolute path and the registered name of a component in it."""
    path, _, name = reference.rpartition(":")
    file = load_file(Path(path))
    own = [entry for entry in registry if entry.origin.file == file]
    for entry in own:
        if name in (entry.name, getattr(entry.target, "__name__", "")):
            return file, entry.name
    known = ", ".join(f"{getattr(entry.target, '__name__', '')} ({entry.name})" for entry in own) or "none"
    raise UserError(
        f"{registry.key} = {reference!r}: {path} registers no {registry.kind} {name!r}; it registers {known}"
    )


def used_components(config: Config) -> list[UsedComponent]:
    """Return the components of a configuration that come from plug-ins, notebooks or installed packages."""
    used = []
    for registry in ALL:
        value = attrgetter(registry.key)(config)
        for name in value if isinstance(value, dict) else [value]:
            entry = registry.get(str(name))
            if entry is not None and not entry.origin.built_in:
                origin = entry.origin
                where = origin.file or origin.module
                used.append(UsedComponent(registry.kind, entry.name, where, origin.sha256, entry.title))
    return used


def check_unchanged(config: Config, recorded: Iterable[UsedComponent], where: str) -> None:
    """Check that a configuration's plug-ins are the ones that a run began with."""
    now = {(used.kind, used.name): used for used in used_components(config)}
    for before in recorded:
        found = now.get((before.kind, before.name))
        if found is None or found.sha256 != before.sha256:
            raise UserError(
                f"{where}: {before.kind} {before.name!r} comes from {before.origin}, which has changed since the run "
                "began; restore it, or start a new run"
            )
