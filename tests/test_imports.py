"""Imports point one way: cli → report → run → fleet → methods → training → models, data → config."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitfleet

PACKAGE = "vitfleet"
ROOT = Path(vitfleet.__file__).parent

# What lies on the way from anywhere to anywhere: these know each other and the configuration only.
LOOSE = {"errors", "files", "progress", "randomness", "message", "packing", "system", "torchvision_operators", "wire"}

# Each room and the rooms it may know besides itself and the loose modules.
_BELOW_TRAINING = {"config", "data", "models"}
_BELOW_METHODS = {*_BELOW_TRAINING, "training"}
_BELOW_RUN = {*_BELOW_METHODS, "methods", "fleet", "costs"}
_BELOW_CLI = {*_BELOW_RUN, "run", "inference", "exporters", "demo", "report"}
MAY_KNOW = {
    "config": set[str](),
    "data": {"config"},
    "models": {"config"},
    "training": _BELOW_TRAINING,
    "methods": _BELOW_METHODS,
    "fleet": {*_BELOW_METHODS, "methods"},  # a fleet drives the client half of a method; never the reverse
    "costs": {*_BELOW_METHODS, "methods"},
    "run": _BELOW_RUN,
    "inference": {*_BELOW_RUN, "run"},  # uses the models that runs wrote
    "demo": {*_BELOW_RUN, "run", "inference"},
    "exporters": {*_BELOW_RUN, "run", "inference"},
    "report": {*_BELOW_RUN, "run", "inference"},  # reads what runs wrote; a run knows nothing of its pictures
    "flower": {*_BELOW_RUN, "run"},  # starts Flower's processes and is what they run
    "api": {*_BELOW_CLI, "flower"},
    "cli": {*_BELOW_CLI, "flower", "api"},
    "__main__": {"cli"},
    **{loose: {"config"} for loose in LOOSE},
}
# The families of methods, and those that each builds on. What is beside them (``base`` …) serves all of them.
FAMILIES = {
    "aggregation": set[str](),
    "averaging": {"aggregation"},
    "tuning": {"aggregation", "averaging"},
    "split": {"aggregation"},
    "personal": {"aggregation", "averaging"},
    "closed_form": {"aggregation"},
    "continual": {"aggregation", "averaging", "personal", "closed_form"},
}
MODULES = sorted(path for path in ROOT.rglob("*.py"))


def name_of(path: Path) -> list[str]:
    """Return a module's place in the package: ['data', 'batches'], ['cli'], [] for the package itself."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield every import of our own, wherever it stands (in a function, under TYPE_CHECKING), and its line."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [PACKAGE, *package[: len(package) - node.level + 1]] if node.level else []
            origin = [*above, *(node.module.split(".") if node.module else [])]
            # `from vitfleet import wire` names a room; `from vitfleet import __version__` does not.
            targets = [[*origin, alias.name] for alias in node.names] if origin == [PACKAGE] else [origin]
        else:
            continue
        for target in targets:
            if target[0] == PACKAGE:
                yield node.lineno, target[1:]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    place = name_of(path)
    if not place:
        return  # the public names: imported lazily, as `test_import_is_cheap_and_lists_the_public_names` checks
    room = place[0]
    assert room in MAY_KNOW, f"say in this test where the room {room!r} stands"
    allowed = {room, *LOOSE, *MAY_KNOW[room]}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {'.'.join(target)}"
        for line, target in imported(path)
        if target and target[0] in MAY_KNOW and target[0] not in allowed
    ]
    assert not wrong


def test_families_of_methods_build_on_each_other_one_way() -> None:
    """What serves all families knows none of them; the package itself registers all."""
    wrong = []
    for path in sorted((ROOT / "methods").rglob("*.py")):
        family = name_of(path)[1:2]
        if not family:
            continue
        allowed = {family[0], *FAMILIES.get(family[0], set())}
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {'.'.join(target)}"
            for line, target in imported(path)
            if target[:1] == ["methods"] and target[1:2] and target[1] in FAMILIES and target[1] not in allowed
        ]
    assert not wrong
    assert {path.name for path in (ROOT / "methods").iterdir() if (path / "__init__.py").exists()} == set(FAMILIES)


@pytest.mark.parametrize("rooms", [{r: known for r, known in MAY_KNOW.items() if r not in LOOSE}, FAMILIES], ids=len)
def test_the_order_has_no_circle(rooms: dict[str, set[str]]) -> None:
    """Rooms can be put in a row in which each knows only those before it."""
    placed: set[str] = set()
    while len(placed) < len(rooms):
        ready = {room for room, known in rooms.items() if room not in placed and known <= placed}
        assert ready
        placed |= ready


def test_the_reader_of_imports_reads_them_all() -> None:
    """Hold this test's own eyes to every way in which an import can be written."""
    seen = {(path.relative_to(ROOT).as_posix(), ".".join(target)) for path in MODULES for _, target in imported(path)}
    assert ("wire.py", "message") in seen
    assert ("cli/train.py", "run.loop") in seen  # inside a function
    assert ("cli/train.py", "run.output.folder") in seen  # under TYPE_CHECKING
    assert ("data/batches.py", "config.schema") in seen


def test_config_is_light() -> None:
    """What every command reads must not pull in what only training needs."""
    heavy = {"torch", "timm", "torchvision", "numpy", "safetensors", "pyarrow", "PIL"}
    for path in (ROOT / "config").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.split(".")[0] for name in names}, path.name
