"""The command ``compare``: several configurations on the same partition."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitfleet.cli.base import (
    AsJson,
    DataDir,
    Jobs,
    Out,
    Overrides,
    app,
    configure,
    console,
    error_console,
    print_text,
    raise_interrupt,
    reserve_stdout,
)
from vitfleet.cli.train import train
from vitfleet.errors import UserError


@app.command()
def compare(
    sources: Annotated[list[str], typer.Argument(metavar="PRESET|FILE…", help="What to compare.")],
    override: Overrides = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds, as 0,1,2: one run of every configuration per seed.")] = "0",
    sweep: Annotated[
        list[str],
        typer.Option("-s", "--sweep", metavar="KEY=V,V,…", help="Run every configuration with each of these values."),
    ] = [],  # noqa: B006
    method: Annotated[
        list[str],
        typer.Option(
            metavar="'NAME [KEY=VALUE…]'",
            help="Run every configuration with this method, and with overrides for it alone. May be repeated.",
        ),
    ] = [],  # noqa: B006
    jobs: Jobs = 1,
    target: Annotated[
        float | None,
        typer.Option(
            help="An accuracy, 0…1: when does each run reach it? Default: the best that all of them reach.",
            min=0,
            max=1,
        ),
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run several configurations on the same partition, one after the other or several at a time, and show one table.

    If it is stopped, `vitfleet resume DIR` resumes it. `compare.csv` in its folder holds every run's summary.

    Examples
    --------
    * `vitfleet compare digits transfl-digits eftvit-digits --seeds 0,1,2`
    * `vitfleet compare transfl-digits -s method.k=1,2,3 --target 0.4`
    * `vitfleet compare digits --method fedavg --method 'fed-lora train.lr=5e-3' --jobs 2`
    * `vitfleet compare mine.toml other.toml -o rounds=50 --out runs/both`
    """
    from vitfleet.run.compare import ComparedRun, create_comparison, parse_method_variants, parse_sweeps

    check_single_process()
    reserve_stdout(as_json)
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise UserError(f"--seeds {seeds}: must be whole numbers separated by commas, such as 0,1,2")
    variants = parse_method_variants(method)
    members = [
        ComparedRun(
            # The methods of a single configuration are called by their own names alone.
            " ".join(filter(None, (Path(source).stem if len(sources) > 1 or not variant else "", variant, swept))),
            configure(source, [*override, *variant_overrides, *sweep_overrides], int(seed), data_dir),
        )
        for seed in seeds.split(",")
        for source in sources
        for variant, variant_overrides in variants
        for swept, sweep_overrides in parse_sweeps(sweep)
    ]
    folder = create_comparison(members, out, shlex.join(["vitfleet", *sys.argv[1:]]), target)
    run_comparison(folder, as_json, jobs)


def run_comparison(path: Path, as_json: bool = False, jobs: int = 1) -> None:
    """Run the remaining runs of a comparison, show its table and write its report."""
    from vitfleet.run.compare import read_command, read_members
    from vitfleet.run.folder import create_run_folder, open_run_folder

    members = [member for member in read_members(path) if not (member.folder(path) / "summary.json").exists()]
    command = shlex.split(read_command(path))
    if jobs > 1:
        for member in members:
            if not (member.folder(path) / "config.json").exists():
                create_run_folder(member.config, member.folder(path), member.name, command).release()
        _run_in_parallel([member.folder(path) for member in members], jobs, path)
    else:
        for member in members:
            folder = member.folder(path)
            if (folder / "config.json").exists():
                train(open_run_folder(folder), comparison=path)
            else:
                train(create_run_folder(member.config, folder, member.name, command), is_new=True, comparison=path)
    _show_comparison(path, as_json)


def _show_comparison(path: Path, as_json: bool) -> None:
    from vitfleet.report.tables import comparison_costs_table, comparison_table
    from vitfleet.report.terminal import TerminalProgress
    from vitfleet.report.write import write_report
    from vitfleet.run.compare import partitions_differ, read_comparison

    comparison = read_comparison(path)
    console.print(comparison_table(comparison))
    console.print()
    console.print(comparison_costs_table(comparison.rows))
    if partitions_differ(path):
        print_text(error_console, "note: these runs have different partitions, so their accuracies are not comparable")
    print_text(console, f"comparison folder: {path}")
    written = write_report([path], progress=TerminalProgress(console))
    print_text(console, f"report: {written.page}")
    if as_json:
        tree = {"folder": str(path), "report": str(written.page), "target": comparison.target}
        print(json.dumps({**tree, "runs": {row.name: row.summaries for row in comparison.rows}}))


def _run_in_parallel(folders: list[Path], jobs: int, comparison: Path) -> None:
    """Run several runs of a comparison at a time."""
    from vitfleet.report.terminal import TerminalProgress
    from vitfleet.run.jobs import OUTPUT, run_jobs

    signal.signal(signal.SIGTERM, raise_interrupt)
    failed = []
    results = run_jobs(folders, jobs, TerminalProgress(console))
    try:
        for result in results:
            outcome = f"finished after {result.seconds:.0f} s" if result.code == 0 else f"failed: {result.last_line}"
            print_text(console if result.code == 0 else error_console, f"{result.folder.name}: {outcome}")
            failed += [result] if result.code else []
    except KeyboardInterrupt:
        results.close()
        arguments = f"{shlex.quote(str(comparison))} --jobs {jobs}"
        print_text(error_console, f"\nStopped. To resume from the last checkpoints: vitfleet resume {arguments}")
        raise typer.Exit(130) from None
    if failed:
        output = failed[0].folder / OUTPUT
        raise UserError(f"{len(failed)} of {len(folders)} runs failed; see {output} for the first of them")


def check_single_process() -> None:
    """Reject a comparison that torchrun started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a comparison runs in one process; with torchrun, use `vitfleet run` for each configuration")
