"""What all commands share: the application, its two consoles, and options that several have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from vitfleet import __version__

if TYPE_CHECKING:
    from vitfleet.config import Config

app = typer.Typer(
    help="Train vision transformers across a fleet of edge devices.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
complaints = Console(stderr=True)

Overrides = Annotated[
    list[str],
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Set a key: `-o train.lr=1e-3`. May be repeated."),
]


Out = Annotated[Path | None, typer.Option(help="The folder; default: the next free one in runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON; all else goes to standard error.")]
Jobs = Annotated[
    int, typer.Option(min=1, help="Runs of a comparison at a time, each a process of its own: they can share a GPU.")
]
DataDir = Annotated[str | None, typer.Option(envvar="VITFLEET_DATA", help="Where data sets lie, one folder each.")]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"vitfleet {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    pass


def configure(
    source: str, override: list[str], seed: int | None, data_dir: str | None, more: Mapping[str, Any] | None = None
) -> Config:
    """Read a configuration as the command line asks for it."""
    from vitfleet.config import load_config

    given = {"seed": seed, "data.dir": data_dir, **(more or {})}
    return load_config(source, override, {key: value for key, value in given.items() if value is not None})


def for_machines(as_json: bool) -> None:
    """Leave standard output to the JSON that is asked for."""
    console.stderr = as_json


def say(to: Console, text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks that a reader would have to undo."""
    to.print(text, highlight=False, markup=False, soft_wrap=True)


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Take a signal for a Ctrl-C."""
    raise KeyboardInterrupt
