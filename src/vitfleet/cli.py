"""The command ``vitfleet``. Help is quick: torch is imported only by the commands that compute."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from vitfleet import __version__
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.config import Config
    from vitfleet.run.folder import RunFolder

DEFAULT_COMPARISON = ("digits", "transfl-digits", "eftvit-digits")

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
DataDir = Annotated[str | None, typer.Option(envvar="VITFLEET_DATA", help="Where data sets lie, one folder each.")]


@app.command()
def run(
    source: Annotated[
        str | None, typer.Argument(metavar="[PRESET|FILE]", help="A preset's name or a .toml or .json file.")
    ] = None,
    override: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    data_dir: DataDir = None,
    seed: Annotated[int | None, typer.Option(help="The same as -o seed=N.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one configuration; without one, compare FedAvg, TransFL and EFTViT on embedded digits in a minute.

    Examples
    --------
    * `vitfleet run`
    * `vitfleet run transfl-cifar10 --data-dir ~/data --out runs/first`
    * `vitfleet run digits -o method.name=fedprox -o method.mu=0.1 -o rounds=30`

    `vitfleet presets` lists the presets, `vitfleet keys` every key that -o can set.
    """
    from vitfleet.run.folder import create

    if source is None:
        seeds = "0" if seed is None else str(seed)
        compare(list(DEFAULT_COMPARISON), override, seeds, [], None, out, data_dir, as_json)
        return
    if _rank() > 0:
        _follow()
        return
    _for_machines(as_json)
    config = _load(source, override, seed, data_dir)
    folder = create(config, out, Path(source).stem, ["vitfleet", *sys.argv[1:]])
    summary = _play(folder, fresh=True)
    if as_json:
        print(json.dumps({"folder": str(folder.path), **summary}))
    _show(summary, folder)


@app.command()
def compare(
    sources: Annotated[list[str], typer.Argument(metavar="PRESET|FILE…", help="What to compare.")],
    override: Overrides = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds, as 0,1,2: each is a run of every configuration.")] = "0",
    sweep: Annotated[
        list[str],
        typer.Option("-s", "--sweep", metavar="KEY=V,V,…", help="Run every configuration with each of these values."),
    ] = [],  # noqa: B006
    target: Annotated[
        float | None,
        typer.Option(
            help="An accuracy, 0…1: who reaches it when? Default: the best that all of them reach.", min=0, max=1
        ),
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run several configurations on the same shards, one after the other, and end with one table.

    Stopped, it goes on with `vitfleet resume DIR`. `compare.csv` in its folder holds every run's summary.

    Examples
    --------
    * `vitfleet compare digits transfl-digits eftvit-digits --seeds 0,1,2`
    * `vitfleet compare transfl-digits -s method.k=1,2,3 --target 0.4`
    * `vitfleet compare mine.toml other.toml -o rounds=50 --out runs/both`
    """
    from vitfleet.run.compare import Member, begin, sweep_of

    _check_alone()
    _for_machines(as_json)
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise UserError(f"--seeds {seeds}: must be whole numbers with commas between them, such as 0,1,2")
    members = [
        Member(f"{Path(source).stem} {called}".strip(), _load(source, [*override, *swept], int(seed), data_dir))
        for seed in seeds.split(",")
        for source in sources
        for called, swept in sweep_of(sweep)
    ]
    _compare(begin(members, out, shlex.join(["vitfleet", *sys.argv[1:]]), target), as_json)


@app.command()
def cost(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE", help="What would be run.")],
    override: Overrides = [],  # noqa: B006
    method: Annotated[
        list[str], typer.Option("--method", help="Only this method; may be repeated. Default: all of them.")
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say what a configuration would cost a client, without data and without training.

    Operations, memory and bytes of every method, and how long a round takes on each kind of device.

    Examples
    --------
    * `vitfleet cost eftvit-cifar100`
    * `vitfleet cost transfl-cifar10 --method transfl --method fedavg --json`
    * `vitfleet cost digits -o model.name=vit_tiny_patch16_224`
    """
    from dataclasses import asdict

    from vitfleet.progress import SILENCE
    from vitfleet.report.terminal import TerminalProgress, cost_table, device_table
    from vitfleet.run.sheet import cost_sheets

    config = _load(source, override, None, None)
    sheets = list(cost_sheets(config, method, SILENCE if as_json else TerminalProgress(console)))
    if as_json:
        print(json.dumps({"methods": {sheet.method: asdict(sheet) for sheet in sheets}}, indent=2))
        return
    console.print(cost_table(sheets))
    console.print()
    console.print(device_table(sheets[0]))


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run or comparison that was stopped.")],
) -> None:
    """Go on with a run or a comparison from its last checkpoint; it ends as if it had never stopped.

    Example: `vitfleet resume runs/digits-fedavg-001`
    """
    from vitfleet.run.compare import MANIFEST
    from vitfleet.run.folder import reopen

    if (folder / MANIFEST).exists():
        _check_alone()
        _compare(folder)
        return
    if _rank() > 0:
        _follow()
        return
    held = reopen(folder)
    _show(_play(held), held)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs and comparisons.")],
    out: Annotated[
        Path | None, typer.Option(help="The report's folder; default: the run's own, of several a new one in runs/.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep the page up to date until its runs are finished.")
    ] = False,
) -> None:
    """Make one HTML page of runs and comparisons, which opens offline, and every figure of it as SVG and PNG.

    Examples
    --------
    * `vitfleet report runs/compare-001`
    * `vitfleet report runs/a runs/b --out runs/both`
    * `vitfleet report --watch runs/a`, while `vitfleet run` goes on in another terminal
    """
    from vitfleet.report.terminal import TerminalProgress
    from vitfleet.report.write import watch_report, write_report

    if not watch:
        _say(console, f"report: {write_report(runs, out, TerminalProgress(console)).page}")
        return
    try:
        written = watch_report(runs, out, lambda page: _say(console, f"live report: {page} (Ctrl-C ends it)"))
    except KeyboardInterrupt:
        return
    _say(console, f"report: {written.page}")


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
    if not console.is_terminal:  # for grep: a line a key
        for key in describe.every_key():
            print(key.name, key.variant, key.allowed, key.default, key.meaning, sep="\t")
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


def _load(
    source: str, override: list[str], seed: int | None, data_dir: str | None, more: Mapping[str, Any] | None = None
) -> Config:
    from vitfleet.config import load_config

    given = {"seed": seed, "data.dir": data_dir, **(more or {})}
    return load_config(source, override, {key: value for key, value in given.items() if value is not None})


def _compare(path: Path, as_json: bool = False) -> None:
    """Play what is left of a comparison and show its table."""
    from vitfleet.run.compare import command_of, members_of, read_comparison, shards_differ
    from vitfleet.run.folder import create, reopen

    for member in members_of(path):
        folder = member.folder(path)
        if (folder / "summary.json").exists():
            continue
        if (folder / "config.json").exists():
            _play(reopen(folder), comparison=path)
        else:
            command = shlex.split(command_of(path))
            _play(create(member.config, folder, member.name, command), fresh=True, comparison=path)
    from vitfleet.report.terminal import TerminalProgress, compare_table, costs_table
    from vitfleet.report.write import write_report

    comparison = read_comparison(path)
    console.print(compare_table(comparison))
    console.print()
    console.print(costs_table(comparison.rows))
    if shards_differ(path):
        _say(complaints, "note: these runs were not dealt the same images, so their accuracies do not compare")
    _say(console, f"comparison folder: {path}")
    written = write_report([path], progress=TerminalProgress(console))
    _say(console, f"report: {written.page}")
    if as_json:
        tree = {"folder": str(path), "report": str(written.page), "target": comparison.target}
        print(json.dumps({**tree, "runs": {row.name: row.summaries for row in comparison.rows}}))


def _show(summary: dict[str, Any], held: RunFolder) -> None:
    from vitfleet.report.terminal import summary_table

    console.print(summary_table(summary, held.config().title))
    _say(console, f"run folder: {held.path}")
    total = summary["total"]
    if total["failures"] == total["participations"]:
        raise UserError(f"no client's training could be used: {total['failure']}")


def _play(held: RunFolder, fresh: bool = False, comparison: Path | None = None) -> dict[str, Any]:
    """Conduct a run's remaining rounds.

    Parameters
    ----------
    fresh
        Whether the folder was made for this: if the run cannot even be set up, it is taken back.
    comparison
        The folder of the comparison that the run is part of.
    """
    folder = held.path
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        config = held.config()
        from vitfleet.fleet.ranks import joined
        from vitfleet.report.pictures import draw_partition, draw_rounds
        from vitfleet.report.terminal import RoundDisplay, TerminalProgress
        from vitfleet.run.conduct import conduct
        from vitfleet.run.session import open_session

        with joined() as ranks:
            ranks.tell(str(folder.resolve()).encode())
            session = open_session(config, folder, TerminalProgress(console), ranks=ranks)
            for name in session.data.skipped:
                _say(complaints, f"left out, cannot be read: {name}")
            draw_partition(session)
            where = f"{session.machine.device.type}, {'bf16' if session.machine.bf16 else 'fp32'}"
            among = f", {ranks.size} processes" if ranks.size > 1 else ""
            _say(
                console,
                f"{config.method.name} on {session.data.name}: {config.fleet.clients} clients, "
                f"{config.fleet.per_round} a round, {session.params:,} parameters, {where}{among}",
            )
            if session.round == config.rounds:
                _say(console, "this run was finished already")
            elif session.round:
                _say(console, f"going on after round {session.round}")
            with RoundDisplay(console, config.rounds, session.round) as display:
                summary = conduct(session, display, display)
        draw_rounds(folder)
    except KeyboardInterrupt:
        where_to = shlex.quote(str(comparison or folder))
        _say(complaints, f"\nStopped. To go on from the last checkpoint: vitfleet resume {where_to}")
        raise typer.Exit(130) from None
    except UserError:
        from vitfleet.run.records import read_records

        if fresh and next(read_records(folder), None) is None:  # it never got under way
            held.discard()
        raise
    return summary


def _for_machines(as_json: bool) -> None:
    """Leave standard output to the JSON that is asked for."""
    console.stderr = as_json


def _rank() -> int:
    """Return which of the processes that torchrun started this is; 0 where it started none."""
    return int(os.environ.get("RANK", "0"))


def _follow() -> None:
    """Take part in the run that the first process conducts."""
    from vitfleet.config.load import read_config
    from vitfleet.fleet.ranks import joined
    from vitfleet.run.conduct import follow
    from vitfleet.run.session import open_session

    try:
        with joined() as ranks:
            folder = Path(ranks.tell(b"").decode())
            follow(open_session(read_config(folder / "config.json"), folder, ranks=ranks))
    except KeyboardInterrupt:  # the first process says what is to be said
        raise typer.Exit(130) from None


def _check_alone() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a comparison is played by one process; with torchrun, `vitfleet run` its configurations in turn"
        )


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
