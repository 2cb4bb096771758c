"""The commands that neither train nor use a model: costs, reports, tables, lists of presets and keys, templates."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, get_args

import typer
from click import Context
from rich.table import Table
from typer.core import TyperCommand

from vitfleet.cli import options
from vitfleet.cli.base import app, console, say
from vitfleet.errors import UserError
from vitfleet.files import make_folder, write_atomically

new_app = typer.Typer(help="Write a starting point for a plug-in.", no_args_is_help=True)
app.add_typer(new_app, name="new")

TEMPLATES = {"method.py.txt": "{module}.py", "test_method.py.txt": "test_{module}.py", "method.toml.txt": "{name}.toml"}


class _CostCommand(TyperCommand):
    """Takes several devices after one ``--device``."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Repeat the option before each device that follows another one."""
        from vitfleet.config.fleet import DeviceName

        devices = {name for device in get_args(DeviceName) for name in (device, device.split("-")[0])}
        spread: list[str] = []
        for argument in args:
            follows = len(spread) > 1 and spread[-2] == "--device"
            spread += ["--device", argument] if follows and argument in devices else [argument]
        return super().parse_args(ctx, spread)


@app.command(cls=_CostCommand)
def cost(
    source: Annotated[str, typer.Argument(metavar="[PRESET|FILE]", help="The configuration.")] = "eftvit-cifar100",
    override: options.Overrides = [],  # noqa: B006
    plugin: options.Plugins = [],  # noqa: B006
    method: Annotated[
        list[str],
        typer.Option(
            metavar="'NAME [KEY=VALUE…]'", help="Report this method only. May be repeated. Default: all methods."
        ),
    ] = [],  # noqa: B006
    device: Annotated[
        list[str],
        typer.Option("--device", metavar="NAME…", help="Report these devices, as `pi4 nano orin`. Default: all."),
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate what a configuration costs a client, without data and without training.

    Prints FLOPs, memory and bytes of every method, the time of a round on devices, and what would fit into a device
    that cannot hold the training.

    Examples
    --------
    * `vitfleet cost eftvit-cifar100`
    * `vitfleet cost eftvit-cifar100 --method fed-full --device pi4 nano orin`
    * `vitfleet cost transfl-cifar10 --method transfl --method fedavg --json`
    * `vitfleet cost digits -o model.name=vit_tiny_patch16_224`
    """
    from dataclasses import asdict

    from vitfleet.config import load_config
    from vitfleet.costs.fitting import find_remedies
    from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, select_devices
    from vitfleet.costs.report import cost_reports
    from vitfleet.progress import NO_PROGRESS
    from vitfleet.report.console.costs import left_out_lines, print_costs
    from vitfleet.report.console.progress import TerminalProgress

    devices = select_devices(device or list(HARDWARE_PROFILES))
    config = load_config(source, override, plugins=plugin)
    left_out: dict[str, str] = {}
    progress = NO_PROGRESS if as_json else TerminalProgress(console)
    reports = list(cost_reports(config, method, progress, lambda name, why: left_out.update({name: str(why)})))
    remedies = find_remedies(config, reports, devices)
    if as_json:
        costs = {report.method: asdict(report) for report in reports}
        would_fit = {remedy.device: asdict(remedy) for remedy in remedies}
        print(json.dumps({"methods": costs, "would_fit": would_fit, "left_out": left_out}, indent=2))
        return
    print_costs(console, reports, devices, remedies)
    for line in left_out_lines(left_out):
        say(line)


@app.command()
def report(
    runs: options.Runs,
    out: Annotated[
        Path | None,
        typer.Option(help="The report's folder. Default: the run's folder, or for several runs a new one in runs/."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update the page until all runs are finished.")] = False,
    target: Annotated[
        float | None,
        typer.Option(help="An accuracy, 0…1: rounds and traffic to it. Default: a comparison's own.", min=0, max=1),
    ] = None,
) -> None:
    """Write an HTML page about runs and comparisons, which needs no network, and its figures as SVG, PDF and PNG.

    Examples
    --------
    * `vitfleet report runs/compare-001`
    * `vitfleet report runs/a runs/b --out runs/both`
    * `vitfleet report --watch runs/a`, while `vitfleet run` is running in another terminal
    """
    from vitfleet.report.console.progress import TerminalProgress
    from vitfleet.report.html.page import watch_report, write_report

    if not watch:
        say(f"report: {write_report(runs, out, TerminalProgress(console), target)}")
        return
    try:
        page = watch_report(runs, out, lambda live: say(f"live report: {live} (stop with Ctrl-C)"), target=target)
    except KeyboardInterrupt:
        return
    say(f"report: {page}")


@app.command()
def presets(
    show: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print this preset: a file to start your own from.")
    ] = None,
) -> None:
    """List the shipped configurations, or print one.

    Examples
    --------
    * `vitfleet presets`
    * `vitfleet presets --show digits > mine.toml`, then `vitfleet run mine.toml`
    """
    from vitfleet.config import presets as shipped
    from vitfleet.config.load import preset_text

    if show is not None:
        print(preset_text(show), end="")
        return
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("preset", style="bold", no_wrap=True)
    table.add_column("description")
    for name, title in shipped().items():
        table.add_row(name, title)
    console.print(table)


@app.command()
def keys(
    prefix: Annotated[str, typer.Argument(metavar="[KEY]", help="Only this key, or those of this table.")] = "",
    methods: Annotated[bool, typer.Option("--methods", help="Only which methods there are.")] = False,
    plugin: options.Plugins = [],  # noqa: B006
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """List the configuration keys with their allowed values, default and meaning.

    Examples
    --------
    * `vitfleet keys data.tasks`
    * `vitfleet keys --methods`
    """
    from vitfleet.config import keys as key_table
    from vitfleet.config.plugins import load_plugins
    from vitfleet.config.registry import METHODS

    load_plugins(plugin)
    if markdown:
        print(key_table.markdown(), end="")
        return
    if methods:
        _print_rows(("method", "what it is"), [(entry.name, entry.summary) for entry in METHODS])
        return
    rows = [(key.name, key.variant, key.allowed, key.default, key.meaning) for key in key_table.keys_below(prefix)]
    _print_rows(("key", "of", "allowed", "default", "meaning"), rows)


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where the output is no terminal, for grep, one line per row."""
    if not console.is_terminal:
        for row in rows:
            print(*row, sep="\t")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False, markup=False)


@app.command()
def table(
    runs: options.Runs = [],  # noqa: B006
    to: Annotated[str, typer.Option("--to", help="tex, md or csv.")] = "md",
    columns: Annotated[
        str | None,
        typer.Option(help="Columns, as accuracy,local,upload,metrics.NAME.VALUE. `--columns help` lists all of them."),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="An accuracy, 0…1: adds the rounds and the traffic to it.", min=0, max=1)
    ] = None,
    versus: Annotated[
        str | None, typer.Option(help="A row's name: a paired t-test of every other row against it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Print the results of runs and comparisons as a table for a paper: mean ± standard deviation over the seeds.

    The best mean of each column is bold, among rows on the same data and tasks. Runs that differ only in their seed
    are one row.

    Examples
    --------
    * `vitfleet table runs/compare-001 --to tex --out results.tex`
    * `vitfleet table runs/compare-001 --columns accuracy,forgetting --versus fedavg`
    * `vitfleet table runs/a runs/b --to csv --target 0.8`
    """
    from vitfleet.report.columns import columns_of
    from vitfleet.report.result_table import result_table
    from vitfleet.report.runs import read_groups

    if columns == "help":
        groups = read_groups(runs) if runs else []
        for name, column in columns_of(run.summary or {} for group in groups for run in group.runs).items():
            say(f"{name}: {column.heading}; {column.described('evaluation', None).meaning}")
        return
    if not runs:
        raise UserError("RUN: name at least one folder of a run or a comparison, such as runs/compare-001")
    names = [] if columns is None else [name.strip() for name in columns.split(",")]
    text = result_table(runs, names, target=target, versus=versus).to_text(to)
    if out is None:
        print(text, end="")
        return
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file")
    make_folder(out.parent)
    write_atomically(out, text.encode())
    say(f"table: {out}")


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
        say(f"written: {target}")
    say(f"run it: vitfleet run {targets['method.toml.txt']}")
