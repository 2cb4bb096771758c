"""The commands that train nothing: what a configuration would cost, what runs came to, what can be set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vitfleet.cli.base import Overrides, app, configure, console, say


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

    from vitfleet.costs.report import cost_reports
    from vitfleet.progress import NO_PROGRESS
    from vitfleet.report.terminal import TerminalProgress, cost_table, device_table

    config = configure(source, override, None, None)
    sheets = list(cost_reports(config, method, NO_PROGRESS if as_json else TerminalProgress(console)))
    if as_json:
        print(json.dumps({"methods": {sheet.method: asdict(sheet) for sheet in sheets}}, indent=2))
        return
    console.print(cost_table(sheets))
    console.print()
    console.print(device_table(sheets[0]))


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
        say(console, f"report: {write_report(runs, out, TerminalProgress(console)).page}")
        return
    try:
        written = watch_report(runs, out, lambda page: say(console, f"live report: {page} (Ctrl-C ends it)"))
    except KeyboardInterrupt:
        return
    say(console, f"report: {written.page}")


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
    from vitfleet.config import keys as key_table

    if markdown:
        print(key_table.markdown(), end="")
        return
    if not console.is_terminal:  # for grep: a line a key
        for key in key_table.every_key():
            print(key.name, key.variant, key.allowed, key.default, key.meaning, sep="\t")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "of", "allowed", "default", "meaning"):
        table.add_column(heading, overflow="fold")
    for key in key_table.every_key():
        table.add_row(key.name, key.variant, key.allowed, key.default, key.meaning)
    console.print(table, highlight=False, markup=False)
