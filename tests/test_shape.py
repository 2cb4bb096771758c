"""The shape of the code: functions fit on a screen; modules do not know what they must not know."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vitfleet

ROOT = Path(vitfleet.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FUNCTION_LINES = 60


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(ROOT), node


def test_functions_fit_on_a_screen() -> None:
    too_long = [
        f"{path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]
    assert not too_long


def test_no_module_compares_the_devices_of_tensors() -> None:
    """``cuda`` and ``cuda:0`` are not equal: such a comparison holds on a CPU and fails on a GPU."""
    compared = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, node in nodes()
        if isinstance(node, ast.Compare)
        if any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
        if any(isinstance(side, ast.Attribute) and side.attr == "device" for side in (node.left, *node.comparators))
        if "config.device" not in ast.unparse(node)  # the key, which is a text
    ]
    assert not compared


def test_no_module_names_a_method_that_is_not_its_own() -> None:
    """No generic module knows a method by its name."""
    from vitfleet.config.registry import METHODS

    names = set(METHODS.names()) - {"fedavg"}  # the configuration's default
    known = [
        f"{path}:{node.lineno} {node.value!r}"
        for path, node in nodes()
        if path.parts[0] not in {"methods", "cli"}
        if isinstance(node, ast.Constant) and node.value in names
        if (path.name, node.value) != ("head.py", "closed-form")  # a value of the key head.start
    ]
    assert not known
