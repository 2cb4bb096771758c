"""The command ``vitfleet``. Help is quick: torch is imported only by the commands that compute."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from vitfleet import __version__
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.run.folder import RunFolder

DEFAULT_PRESET = "digits"

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


@app.command()
def run(
    source: Annotated[
        str, typer.Argument(metavar="PRESET|FILE", help="A preset's name or a .toml or .json file.")
    ] = DEFAULT_PRESET,
    override: Overrides = [],  # noqa: B006  (typer copies it)
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: the next free one in runs/.")] = None,
    data_dir: Annotated[
        str | None, typer.Option(envvar="VITFLEET_DATA", help="Where data sets lie, one folder each.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same as -o seed=N.")] = None,
) -> None:
    """Train one configuration; without arguments, a small ViT on embedded digits in under a minute.

    Examples
    --------
    * `vitfleet run`
    * `vitfleet run transfl-cifar10 --data-dir ~/data --out runs/first`
    * `vitfleet run digits -o method.name=fedprox -o method.mu=0.1 -o rounds=30`
    """
    from vitfleet.config import load_config
    from vitfleet.run.folder import create

    laid = {"seed": seed, "data.dir": data_dir}
    config = load_config(source, override, {key: value for key, value in laid.items() if value is not None})
    folder = create(config, out, Path(source).stem, ["vitfleet", *sys.argv[1:]])
    try:
        _play(folder)
    except UserError:
        if not (folder.path / "checkpoint").exists():  # it never got under way
            folder.discard()
        raise


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that was stopped or killed.")],
) -> None:
    """Go on with a run from its last checkpoint; it ends as if it had never stopped.

    Example: `vitfleet resume runs/digits-fedavg-001`
    """
    from vitfleet.run.folder import reopen

    _play(reopen(folder))


@app.command()
def presets() -> None:
    """List the shipped configurations."""
    from vitfleet.config import presets as shipped

    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("preset", style="bold", no_wrap=True)
    table.add_column("what it is")
    for name, title in shipped().items():
        table.add_row(name, title)
    console.print(table)


@app.command()
def keys(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """List every configuration key: what it may be, its default, what it means."""
    from vitfleet.config import describe

    if markdown:
        print(describe.markdown(), end="")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "of", "allowed", "default", "meaning"):
        table.add_column(heading, overflow="fold")
    for key in describe.every_key():
        table.add_row(key.name, key.variant, key.allowed, key.default, key.meaning)
    console.print(table, highlight=False, markup=False)


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


def _play(held: RunFolder) -> None:
    """Conduct a run's remaining rounds and say how it went."""
    signal.signal(signal.SIGTERM, _interrupt)
    folder, config = held.path, held.config()
    try:
        from vitfleet.report.pictures import draw_partition, draw_rounds
        from vitfleet.report.terminal import RoundDisplay, TerminalProgress, summary_table
        from vitfleet.run.conduct import conduct
        from vitfleet.run.session import open_session

        session = open_session(config, folder, TerminalProgress(console))
        for name in session.data.skipped:
            _say(complaints, f"left out, cannot be read: {name}")
        draw_partition(session)
        where = f"{session.machine.device.type}, {'bf16' if session.machine.bf16 else 'fp32'}"
        _say(
            console,
            f"{config.method.name} on {session.data.name}: {config.fleet.clients} clients, "
            f"{config.fleet.per_round} a round, {session.params:,} parameters, {where}",
        )
        with RoundDisplay(console, config.rounds, session.round) as display:
            summary = conduct(session, display)
        draw_rounds(folder)
    except KeyboardInterrupt:
        _say(complaints, f"\nStopped. To go on from the last checkpoint: vitfleet resume {shlex.quote(str(folder))}")
        raise typer.Exit(130) from None
    console.print(summary_table(summary, config.title))
    _say(console, f"run folder: {folder}")


def _say(to: Console, text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks that a reader would have to undo."""
    to.print(text, highlight=False, markup=False, soft_wrap=True)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; what is the user's to mend is one sentence and exit code 2."""
    try:
        app()
    except UserError as error:
        complaints.print(f"vitfleet: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
