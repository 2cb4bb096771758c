"""The commands that train one run: ``run`` and ``resume``."""

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
    configure,
    console,
    error_console,
    print_text,
    raise_interrupt,
    reserve_stdout,
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
        str | None, typer.Argument(metavar="[PRESET|FILE]", help="Name of a preset, or a .toml or .json file.")
    ] = None,
    override: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    data_dir: DataDir = None,
    seed: Annotated[int | None, typer.Option(help="The same as -o seed=N.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one configuration. Without one, compare FedAvg, TransFL and EFTViT on embedded digits in a minute.

    Examples
    --------
    * `vitfleet run`
    * `vitfleet run transfl-cifar10 --data-dir ~/data --out runs/first`
    * `vitfleet run digits -o method.name=fedprox -o method.mu=0.1 -o rounds=30`

    `vitfleet presets` lists the presets, `vitfleet keys` every key that -o can set.
    """
    from vitfleet.run.folder import create_run_folder

    if source is None:
        from vitfleet.cli.compare import compare

        seeds = "0" if seed is None else str(seed)
        compare(list(DEFAULT_COMPARISON), override, seeds, out=out, data_dir=data_dir, as_json=as_json)
        return
    if process_rank() > 0:
        _follow()
        return
    reserve_stdout(as_json)
    config = configure(source, override, seed, data_dir)
    run_folder = create_run_folder(config, out, Path(source).stem, ["vitfleet", *sys.argv[1:]])
    summary = train(run_folder, is_new=True)
    if as_json:
        print(json.dumps({"folder": str(run_folder.path), **summary}))
    _show_summary(summary, run_folder)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run or comparison that was stopped.")],
    jobs: Jobs = 1,
) -> None:
    """Resume a run or a comparison from its last checkpoint. It ends as if it had never been stopped.

    Example: `vitfleet resume runs/digits-fedavg-001`
    """
    from vitfleet.run.compare import MANIFEST
    from vitfleet.run.folder import open_run_folder

    if (folder / MANIFEST).exists():
        from vitfleet.cli.compare import check_single_process, run_comparison

        check_single_process()
        run_comparison(folder, jobs=jobs)
        return
    if process_rank() > 0:
        _follow()
        return
    run_folder = open_run_folder(folder)
    _show_summary(train(run_folder), run_folder)


def train(run_folder: RunFolder, is_new: bool = False, comparison: Path | None = None) -> dict[str, Any]:
    """Run the remaining rounds of a run and return its summary.

    Parameters
    ----------
    is_new
        Whether the folder was just created: if the run cannot even be set up, it is removed.
    comparison
        The folder of the comparison that the run is part of.
    """
    folder = run_folder.path
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        return _run_remaining_rounds(run_folder)
    except KeyboardInterrupt:
        resumable = shlex.quote(str(comparison or folder))
        print_text(error_console, f"\nStopped. To resume from the last checkpoint: vitfleet resume {resumable}")
        raise typer.Exit(130) from None
    except UserError:
        from vitfleet.run.records import read_records

        if is_new and next(read_records(folder), None) is None:  # no round was run
            run_folder.discard()
        raise


def _run_remaining_rounds(run_folder: RunFolder) -> dict[str, Any]:
    config = run_folder.config()
    from vitfleet.fleet.distributed import join_process_group
    from vitfleet.report.run_plots import draw_results, draw_setup
    from vitfleet.report.terminal import RoundDisplay, TerminalProgress
    from vitfleet.run.context import load_state
    from vitfleet.run.loop import run_rounds
    from vitfleet.run.setup import open_run

    folder = run_folder.path
    with join_process_group() as processes:
        processes.broadcast(str(folder.resolve()).encode())
        context = open_run(config, folder, TerminalProgress(console), processes=processes)
        draw_setup(context)
        state = load_state(context)
        _show_start(context, state)
        with RoundDisplay(console, config.rounds, state.round) as display:
            summary = run_rounds(context, state, [display], display).summary
    draw_results(folder)
    return summary


def _show_start(context: RunContext, state: RunState) -> None:
    """Print what is about to run."""
    config, machine, processes = context.config, context.machine, context.processes
    for name in context.data.skipped:
        print_text(error_console, f"skipped image that cannot be read: {name}")
    precision = "bf16" if machine.bf16 else "fp32"
    shared = f", {processes.size} processes" if processes.size > 1 else ""
    print_text(
        console,
        f"{config.method.name} on {context.data.name}: {config.fleet.clients} clients, "
        f"{config.fleet.per_round} per round, {context.params:,} parameters, {machine.device.type}, "
        f"{precision}{shared}",
    )
    if state.stop_reason is not None:
        print_text(console, f"this run is finished: it was stopped after round {state.round} ({state.stop_reason})")
    elif state.round == config.rounds:
        print_text(console, "this run is finished")
    elif state.round:
        print_text(console, f"resuming after round {state.round}")


def _show_summary(summary: dict[str, Any], run_folder: RunFolder) -> None:
    from vitfleet.report.tables import summary_table

    console.print(summary_table(summary, run_folder.config().title))
    print_text(console, f"run folder: {run_folder.path}")
    total = summary["total"]
    if total["failures"] == total["participations"]:
        raise UserError(f"no client's update could be used: {total['failure']}")


def process_rank() -> int:
    """Return the rank of this process among those that torchrun started; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def _follow() -> None:
    """Take part in the run that the first process started."""
    from vitfleet.config.load import read_config
    from vitfleet.fleet.distributed import join_process_group
    from vitfleet.run.loop import follow
    from vitfleet.run.setup import open_run

    try:
        with join_process_group() as processes:
            folder = Path(processes.broadcast(b"").decode())
            follow(open_run(read_config(folder / "config.json"), folder, processes=processes))
    except KeyboardInterrupt:  # the first process prints how to resume
        raise typer.Exit(130) from None
