"""The commands that train: one configuration, a comparison of several, and what was stopped."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitfleet.cli.base import (
    AsJson,
    DataDir,
    Jobs,
    Out,
    Overrides,
    app,
    complaints,
    configure,
    console,
    for_machines,
    interrupt,
    say,
)
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.run.context import RunContext
    from vitfleet.run.folder import RunFolder
    from vitfleet.run.state import RunState

DEFAULT_COMPARISON = ("digits", "transfl-digits", "eftvit-digits")


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
        compare(list(DEFAULT_COMPARISON), override, seeds, out=out, data_dir=data_dir, as_json=as_json)
        return
    if _rank() > 0:
        _follow()
        return
    for_machines(as_json)
    config = configure(source, override, seed, data_dir)
    folder = create(config, out, Path(source).stem, ["vitfleet", *sys.argv[1:]])
    summary = _train(folder, is_new=True)
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
    method: Annotated[
        list[str],
        typer.Option(
            metavar="'NAME [KEY=VALUE…]'",
            help="Run every configuration with this method, and what it alone is given. May be repeated.",
        ),
    ] = [],  # noqa: B006
    jobs: Jobs = 1,
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
    """Run several configurations on the same shards, one after the other or several at a time; end with one table.

    Stopped, it goes on with `vitfleet resume DIR`. `compare.csv` in its folder holds every run's summary.

    Examples
    --------
    * `vitfleet compare digits transfl-digits eftvit-digits --seeds 0,1,2`
    * `vitfleet compare transfl-digits -s method.k=1,2,3 --target 0.4`
    * `vitfleet compare digits --method fedavg --method 'fed-lora train.lr=5e-3' --jobs 2`
    * `vitfleet compare mine.toml other.toml -o rounds=50 --out runs/both`
    """
    from vitfleet.run.compare import ComparedRun, begin, sweep_of, variants_of

    _check_alone()
    for_machines(as_json)
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise UserError(f"--seeds {seeds}: must be whole numbers with commas between them, such as 0,1,2")
    variants = variants_of(method)
    members = [
        ComparedRun(
            # Methods of one configuration are called by their own names alone.
            " ".join(filter(None, (Path(source).stem if len(sources) > 1 or not variant else "", variant, called))),
            configure(source, [*override, *own, *swept], int(seed), data_dir),
        )
        for seed in seeds.split(",")
        for source in sources
        for variant, own in variants
        for called, swept in sweep_of(sweep)
    ]
    _compare(begin(members, out, shlex.join(["vitfleet", *sys.argv[1:]]), target), as_json, jobs)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run or comparison that was stopped.")],
    jobs: Jobs = 1,
) -> None:
    """Go on with a run or a comparison from its last checkpoint; it ends as if it had never stopped.

    Example: `vitfleet resume runs/digits-fedavg-001`
    """
    from vitfleet.run.compare import MANIFEST
    from vitfleet.run.folder import reopen

    if (folder / MANIFEST).exists():
        _check_alone()
        _compare(folder, jobs=jobs)
        return
    if _rank() > 0:
        _follow()
        return
    run_folder = reopen(folder)
    _show(_train(run_folder), run_folder)


def _compare(path: Path, as_json: bool = False, jobs: int = 1) -> None:
    """Play what is left of a comparison and show its table."""
    from vitfleet.run.compare import command_of, read_comparison, read_members, shards_differ
    from vitfleet.run.folder import create, reopen

    left = [one for one in read_members(path) if not (one.folder(path) / "summary.json").exists()]
    command = shlex.split(command_of(path))
    if jobs > 1:
        for member in left:
            if not (member.folder(path) / "config.json").exists():
                create(member.config, member.folder(path), member.name, command).release()
        _play_jobs([member.folder(path) for member in left], jobs, path)
    else:
        for member in left:
            folder = member.folder(path)
            if (folder / "config.json").exists():
                _train(reopen(folder), comparison=path)
            else:
                _train(create(member.config, folder, member.name, command), is_new=True, comparison=path)
    from vitfleet.report.tables import comparison_costs_table, comparison_table
    from vitfleet.report.terminal import TerminalProgress
    from vitfleet.report.write import write_report

    comparison = read_comparison(path)
    console.print(comparison_table(comparison))
    console.print()
    console.print(comparison_costs_table(comparison.rows))
    if shards_differ(path):
        say(complaints, "note: these runs were not dealt the same images, so their accuracies do not compare")
    say(console, f"comparison folder: {path}")
    written = write_report([path], progress=TerminalProgress(console))
    say(console, f"report: {written.page}")
    if as_json:
        tree = {"folder": str(path), "report": str(written.page), "target": comparison.target}
        print(json.dumps({**tree, "runs": {row.name: row.summaries for row in comparison.rows}}))


def _play_jobs(folders: list[Path], jobs: int, comparison: Path) -> None:
    """Play several runs of a comparison at a time."""
    from vitfleet.report.terminal import TerminalProgress
    from vitfleet.run.jobs import OUTPUT, play

    signal.signal(signal.SIGTERM, interrupt)
    wrong = []
    playing = play(folders, jobs, TerminalProgress(console))
    try:
        for ended in playing:
            outcome = f"finished after {ended.seconds:.0f} s" if ended.code == 0 else f"failed: {ended.complaint}"
            say(console if ended.code == 0 else complaints, f"{ended.folder.name}: {outcome}")
            wrong += [ended] if ended.code else []
    except KeyboardInterrupt:
        playing.close()
        where_to = f"{shlex.quote(str(comparison))} --jobs {jobs}"
        say(complaints, f"\nStopped. To go on from the last checkpoints: vitfleet resume {where_to}")
        raise typer.Exit(130) from None
    if wrong:
        client_metrics = wrong[0].folder / OUTPUT
        raise UserError(f"{len(wrong)} of {len(folders)} runs failed; {client_metrics} says why the first of them did")


def _show(summary: dict[str, Any], held: RunFolder) -> None:
    from vitfleet.report.tables import summary_table

    console.print(summary_table(summary, held.config().title))
    say(console, f"run folder: {held.path}")
    total = summary["total"]
    if total["failures"] == total["participations"]:
        raise UserError(f"no client's training could be used: {total['failure']}")


def _train(run_folder: RunFolder, is_new: bool = False, comparison: Path | None = None) -> dict[str, Any]:
    """Run the remaining rounds of a run and return its summary.

    Parameters
    ----------
    is_new
        Whether the folder was just created: if the run cannot even be set up, it is removed.
    comparison
        The folder of the comparison that the run is part of.
    """
    folder = run_folder.path
    try:
        signal.signal(signal.SIGTERM, interrupt)
        config = run_folder.config()
        from vitfleet.fleet.distributed import join_process_group
        from vitfleet.report.run_plots import draw_results, draw_setup
        from vitfleet.report.terminal import RoundDisplay, TerminalProgress
        from vitfleet.run.context import load_state
        from vitfleet.run.loop import run_rounds
        from vitfleet.run.setup import open_run

        with join_process_group() as processes:
            processes.broadcast(str(folder.resolve()).encode())
            context = open_run(config, folder, TerminalProgress(console), processes=processes)
            draw_setup(context)
            state = load_state(context)
            _show_start(context, state)
            with RoundDisplay(console, config.rounds, state.round) as display:
                summary = run_rounds(context, state, [display], display).summary
        draw_results(folder)
    except KeyboardInterrupt:
        resumable = shlex.quote(str(comparison or folder))
        say(complaints, f"\nStopped. To resume from the last checkpoint: vitfleet resume {resumable}")
        raise typer.Exit(130) from None
    except UserError:
        from vitfleet.run.records import read_records

        if is_new and next(read_records(folder), None) is None:  # no round was run
            run_folder.discard()
        raise
    return summary


def _show_start(context: RunContext, state: RunState) -> None:
    """Print what is about to run."""
    config, machine, processes = context.config, context.machine, context.processes
    for name in context.data.skipped:
        say(complaints, f"skipped, cannot be read: {name}")
    precision = "bf16" if machine.bf16 else "fp32"
    shared = f", {processes.size} processes" if processes.size > 1 else ""
    say(
        console,
        f"{config.method.name} on {context.data.name}: {config.fleet.clients} clients, "
        f"{config.fleet.per_round} per round, {context.params:,} parameters, {machine.device.type}, "
        f"{precision}{shared}",
    )
    if state.stop_reason is not None:
        say(console, f"this run is finished: it was stopped after round {state.round} ({state.stop_reason})")
    elif state.round == config.rounds:
        say(console, "this run is finished")
    elif state.round:
        say(console, f"resuming after round {state.round}")


def _rank() -> int:
    """Return which of the processes that torchrun started this is; 0 where it started none."""
    return int(os.environ.get("RANK", "0"))


def _follow() -> None:
    """Take part in the run that the first process conducts."""
    from vitfleet.config.load import read_config
    from vitfleet.fleet.distributed import join_process_group
    from vitfleet.run.loop import follow
    from vitfleet.run.setup import open_run

    try:
        with join_process_group() as processes:
            folder = Path(processes.broadcast(b"").decode())
            follow(open_run(read_config(folder / "config.json"), folder, processes=processes))
    except KeyboardInterrupt:  # the first process says what is to be said
        raise typer.Exit(130) from None


def _check_alone() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a comparison is played by one process; with torchrun, `vitfleet run` its configurations in turn"
        )
