"""Shared by all commands: the application, its two consoles, and common options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
error_console = Console(stderr=True)

Overrides = Annotated[
    list[str],
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Set a key: `-o train.lr=1e-3`. May be repeated."),
]
Plugins = Annotated[
    list[Path],
    typer.Option(
        "--plugin", metavar="FILE", help="A Python file of your own methods, data sets, metrics, …. May be repeated."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Output folder. Default: the next free one in runs/.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON at the end; everything else goes to standard error.")
]
Jobs = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of runs at a time, each in a process of its own. On a GPU each has an equal share of its memory.",
    ),
]
DataDir = Annotated[
    str | None, typer.Option(envvar="VITFLEET_DATA", help="Folder of the data sets, one subfolder each.")
]


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"vitfleet {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def configure(
    source: str,
    override: list[str],
    seed: int | None,
    data_dir: str | None,
    more: Mapping[str, Any] | None = None,
    plugins: Sequence[Path] = (),
) -> Config:
    """Load a configuration with the options of the command line."""
    from vitfleet.config import load_config

    options = {"seed": seed, "data.dir": data_dir, **(more or {})}
    return load_config(source, override, {key: value for key, value in options.items() if value is not None}, plugins)


def with_data_dir(data_dir: str | None, override: list[str]) -> dict[str, Any]:
    """Return the overrides of a command, with ``--data-dir`` as one of them."""
    from vitfleet.config.load import parse_overrides

    return {**({} if data_dir is None else {"data.dir": data_dir}), **parse_overrides(override)}


def reserve_stdout(as_json: bool) -> None:
    """Print to standard error instead if standard output is reserved for JSON."""
    console.stderr = as_json


def print_text(target: Console, text: str) -> None:
    """Print text unchanged: without markup, colours or line breaks."""
    target.print(text, highlight=False, markup=False, soft_wrap=True)


def raise_interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal like Ctrl-C."""
    raise KeyboardInterrupt
