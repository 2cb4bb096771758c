"""The commands that train one run: ``run`` and ``resume``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitfleet.cli import options
from vitfleet.cli.base import (
    INTERRUPTED,
    app,
    console,
    create_confirmed,
    end_at_once,
    raise_interrupt,
    reserve_stdout,
    say,
    warn,
    with_options,
)
from vitfleet.errors import UserError, describe_os_error
from vitfleet.files import CHECKPOINT_FILE, COMPARISON_FILE, CONFIG_FILE

if TYPE_CHECKING:
    from vitfleet.cli.display import TerminalRun
    from vitfleet.config.schema import Config
    from vitfleet.run.output.folder import RunFolder


@app.command()
def run(
    source: Annotated[
        str | None, typer.Argument(metavar="[PRESET|FILE]", help="Name of a preset, or a .toml or .json file.")
    ] = None,
    override: options.Overrides = [],  # noqa: B006  (typer copies it)
    plugin: options.Plugins = [],  # noqa: B006
    out: options.Out = None,
    data_dir: options.DataDir = None,
    seed: options.Seed = None,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Train one configuration. Without one, compare FedAvg, TransFL, EFTViT and FedViT in a minute.

    Examples
    --------
    * `vitfleet run`
    * `vitfleet run transfl-cifar10 --data-dir ~/data --out runs/first`
    * `vitfleet run digits -o method.name=fedprox -o method.mu=0.1 -o rounds=30`
    * `vitfleet run digits --plugin mine.py -o method.name=mine`

    `vitfleet presets` lists the presets, `vitfleet keys` every key that -o can set.
    """
    reserve_stdout(as_json)
    if process_rank() > 0 and source is not None:
        _follow()
        return
    from vitfleet.api.request import ComparisonRequest, RunRequest

    overrides, command = with_options(override, {"data.dir": data_dir}), ["vitfleet", *sys.argv[1:]]
    if source is None:
        from vitfleet.cli.compare import first_run

        runs = ComparisonRequest(seeds=[seed or 0], overrides=overrides, plugins=plugin, out=out, command=command)
        first_run(runs, yes, as_json)
        return
    request = RunRequest(source, seed=seed, overrides=overrides, plugins=plugin, out=out, command=command)
    run_folder = create_confirmed(request, yes)
    summary = train(run_folder, is_new=True)
    if as_json:
        print(json.dumps({"folder": str(run_folder.path), **summary}))
    _show_summary(summary, run_folder)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run or comparison that was stopped.")],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Give the run this many rounds in all, even if it is finished.")
    ] = None,
    jobs: options.Jobs = 1,
    trust_plugins: options.TrustPlugins = False,
) -> None:
    """Resume a run or a comparison from its last checkpoint. It ends as if it had never been stopped.

    Examples
    --------
    * `vitfleet resume runs/digits-fedavg-001`
    * `vitfleet resume runs/digits-fedavg-001 --rounds 50`
    """
    from vitfleet.run.output.folder import add_rounds, open_run_folder

    if (folder / COMPARISON_FILE).exists():
        if rounds is not None:
            raise UserError(f"--rounds {rounds}: is for one run; name the folder of a run in {folder}")
        from vitfleet.api.comparison import Comparison
        from vitfleet.cli.compare import check_single_process, run_comparison

        check_single_process()
        run_comparison(Comparison(folder), jobs)
        return
    if process_rank() > 0:
        _follow()
        return
    run_folder = open_run_folder(folder)
    if rounds is not None:
        add_rounds(run_folder, rounds)
    _show_summary(train(run_folder), run_folder)


def train(run_folder: RunFolder, is_new: bool = False) -> dict[str, Any]:
    """Run the remaining rounds of a run, show them, and return its summary.

    A folder ``is_new`` that was just created is removed if its first round cannot be run.
    """
    from vitfleet.api.run import discard_unstarted, run_in
    from vitfleet.cli.display import TerminalRun

    display = TerminalRun()
    with resumable(run_folder.path, display):
        try:
            return run_in(run_folder, None, [display], display)
        except Exception:
            if is_new:
                discard_unstarted(run_folder)
            raise


@contextmanager
def resumable(path: Path, display: TerminalRun, jobs: int = 1) -> Iterator[None]:
    """Print how to resume what is interrupted, and close the display in any case."""
    command = f"vitfleet resume {shlex.quote(str(path))}" + (f" --jobs {jobs}" if jobs > 1 else "")
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        yield
    except KeyboardInterrupt:
        end_at_once()
        display.close()
        warn(f"\nStopped. To resume from the last checkpoint: {command}")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        sentence = describe_os_error(error)
        if sentence is None or not (path / CHECKPOINT_FILE).exists():
            raise
        raise UserError(f"{sentence}. The last checkpoint is sound: then resume with {command}") from None
    finally:
        display.close()


def _show_summary(summary: dict[str, Any], run_folder: RunFolder) -> None:
    print_summary(summary, run_folder.config(), run_folder.path)
    total = summary["total"]
    if total["failures"] == total["participations"]:
        raise UserError(f"no client's update could be used: {total['failure']}")


def print_summary(summary: dict[str, Any], config: Config, folder: Path) -> None:
    """Print what came out of a run, and where it is."""
    from vitfleet.config.run_title import run_title
    from vitfleet.report.console.results import summary_table

    console.print(summary_table(summary, run_title(config.model_dump(mode="json"))))
    say(f"run folder: {folder}")


def process_rank() -> int:
    """Return the rank of this process among those that torchrun started; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def _follow() -> None:
    """Take part in the run that the first process started."""
    from vitfleet.api.run import full_memory_as_sentence
    from vitfleet.config.load import read_config
    from vitfleet.fleet.distributed import join_process_group
    from vitfleet.run.loop import follow
    from vitfleet.run.setup import open_run

    try:
        with join_process_group() as processes:
            folder = Path(processes.broadcast(b"").decode())
            with full_memory_as_sentence(folder):
                follow(open_run(read_config(folder / CONFIG_FILE), folder, processes=processes))
    except KeyboardInterrupt:  # the first process prints how to resume
        raise typer.Exit(INTERRUPTED) from None
