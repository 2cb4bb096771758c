"""The command that writes a starting point for a plug-in."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from vitfleet.cli.base import app, console, print_text
from vitfleet.errors import UserError

new_app = typer.Typer(help="Write a starting point for a plug-in.", no_args_is_help=True)
app.add_typer(new_app, name="new")

TEMPLATES = {"method.py.txt": "{module}.py", "test_method.py.txt": "test_{module}.py", "method.toml.txt": "{name}.toml"}


@new_app.command()
def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The method's name, such as fedmine or fed-mine.")],
    folder: Annotated[Path, typer.Option(help="Where to write the files.")] = Path("."),
) -> None:
    """Write a working method with a test and a configuration: NAME.py, test_NAME.py, NAME.toml.

    Example: `vitfleet new method fedmine`, then `vitfleet run fedmine.toml` and `pytest test_fedmine.py`
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or keyword.iskeyword(module):
        raise UserError(f"{name!r}: a method's name has small letters, digits, '-' and '_', such as fedmine")
    words = {
        "name": name,
        "module": module,
        "file": f"{module}.py",
        "title": "".join(part.capitalize() for part in re.split(r"[-_]", name)),
    }
    targets = {template: folder / target.format(**words) for template, target in TEMPLATES.items()}
    if there := [target for target in targets.values() if target.exists()]:
        raise UserError(f"{there[0]} exists already; choose another name or --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for template, target in targets.items():
        text = (files("vitfleet") / "templates" / template).read_text(encoding="utf-8")
        target.write_text(text.format(**words), encoding="utf-8")
        print_text(console, f"written: {target}")
    print_text(console, f"run it: vitfleet run {targets['method.toml.txt']}")
