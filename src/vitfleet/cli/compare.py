"""The command ``compare``: several configurations on the same partition.

``vitfleet run`` without a configuration is one too: what TransFL, EFTViT and FedViT gain against FedAvg, on digits.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitfleet.cli import options
from vitfleet.cli.base import app, console, require_consent, reserve_stdout, say, show_estimate, warn, with_options
from vitfleet.cli.train import resumable
from vitfleet.config.registry import method_label
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.api import Comparison
    from vitfleet.api.request import ComparisonRequest
    from vitfleet.report.console.progress import ComparisonClock
    from vitfleet.run.comparison.jobs import JobResult
    from vitfleet.run.comparison.manifest import ComparedRun

# What `vitfleet run` compares without a configuration; on tasks only if no key is set that these presets are fitted to.
PRESETS = ("start-fedavg", "start-transfl", "start-eftvit")
TASK_PRESETS = ("start-fedavg-tasks", "start-fedvit")
FITTED = ("rounds", "data", "model", "method", "fleet")
MAX_JOBS = 2  # runs at a time: more would wait for the longest one anyway

Sweep = Annotated[
    list[str],
    typer.Option("-s", "--sweep", metavar="KEY=V,V,…", help="Run every configuration with each of these values."),
]
Methods = Annotated[
    list[str],
    typer.Option(
        metavar="'NAME [KEY=VALUE…]'",
        help="Run every configuration with this method, and with overrides for it alone. May be repeated.",
    ),
]
BestOf = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Instead of PRESET|FILE: a comparison with -s and data.validation. Each of its configurations is run "
        "with the values that were best on the held-out images.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        help="An accuracy, 0…1: when does each run reach it? Default: what all reach, if well above chance.",
        min=0,
        max=1,
    ),
]


@app.command()
def compare(
    sources: Annotated[list[str] | None, typer.Argument(metavar="PRESET|FILE…", help="What to compare.")] = None,
    override: options.Overrides = [],  # noqa: B006
    plugin: options.Plugins = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds, as 0,1,2: one run of every configuration per seed.")] = "0",
    sweep: Sweep = [],  # noqa: B006
    method: Methods = [],  # noqa: B006
    best_of: BestOf = None,
    jobs: options.Jobs = 1,
    target: Target = None,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Run several configurations on the same partition, one after the other or several at a time, and show one table.

    If it is stopped, `vitfleet resume DIR` resumes it. `compare.csv` in its folder holds every run's summary.

    Examples
    --------
    * `vitfleet compare digits transfl-digits eftvit-digits --seeds 0,1,2`
    * `vitfleet compare transfl-digits -s method.k=1,2,3 --target 0.4`
    * `vitfleet compare digits --method fedavg --method 'fed-lora train.lr=5e-3' --jobs 2`
    * `vitfleet compare mine.toml other.toml -o rounds=50 --out runs/both`
    * `vitfleet compare digits --method fedavg --method fed-head -s train.lr=1e-3,4e-3 -o data.validation=0.2`
    * `vitfleet compare --best-of runs/compare-001 --seeds 0,1,2`
    """
    from vitfleet.api.comparison import create
    from vitfleet.api.request import ComparisonRequest

    check_single_process()
    reserve_stdout(as_json)
    if not all(seed.strip().isdecimal() for seed in seeds.split(",")):
        raise UserError(f"--seeds {seeds}: must be whole numbers separated by commas, such as 0,1,2")
    request = ComparisonRequest(
        configs=sources or [],
        best_of=best_of,
        methods=method,
        seeds=[int(seed) for seed in seeds.split(",")],
        sweep=parse_sweep(sweep),
        overrides=with_options(override, {"data.dir": data_dir}),
        plugins=plugin,
        target=target,
        out=out,
        command=["vitfleet", *sys.argv[1:]],
    )
    comparison, _ = create(request)
    if comparison.best_of is not None:
        _print_best_trials(comparison.best_of["trials"])
    run_comparison(comparison, jobs, yes, is_new=True, as_json=as_json)


def first_run(request: ComparisonRequest, yes: bool, as_json: bool) -> None:
    """Compare the methods, and FedViT with FedAvg on a sequence of tasks, and say what each gained."""
    from vitfleet.api.comparison import create
    from vitfleet.config.load import parse_overrides
    from vitfleet.report.console.results import gain_sentences

    check_single_process()
    changed = (key for key in parse_overrides(request.overrides) if key != "data.dir")
    fits_tasks = not any(key.partition(".")[0] in FITTED for key in changed)
    comparison, _ = create(replace(request, configs=(*PRESETS, *TASK_PRESETS) if fits_tasks else PRESETS))
    # Each run is on one core: so small a model gains nothing from more.
    jobs = min(MAX_JOBS, os.cpu_count() or 1)
    run_comparison(comparison, jobs, yes, is_new=True, as_json=as_json, figure_files=False)
    say("")
    for sentence in gain_sentences(comparison.result.rows):
        say(sentence)


def _print_best_trials(trials: Sequence[dict[str, Any]]) -> None:
    """Print which values were the best for each configuration, and where others might be better."""
    for trial in trials:
        label = method_label(trial["name"])
        values = ", ".join(f"{key} = {value}" for key, value in trial["values"].items())
        accuracy = f"{trial['accuracy']:.1%} on held-out images"
        say(f"{label}: {values} (best of {trial['trials']} trials, {accuracy})")
        if trial["tied"]:
            warn(f"note: {label}: another trial was as good")
        for key in trial["at_edge"]:
            warn(f"note: {label}: {key} is at the edge of what was tried; try a wider range")


def parse_sweep(texts: list[str]) -> dict[str, list[Any]]:
    """Return the values of every swept key: ``method.k=1,2`` is ``{"method.k": [1, 2]}``."""
    from vitfleet.config.load import parse_overrides

    sweep: dict[str, list[Any]] = {}
    for text in texts:
        key, sign, values = text.partition("=")
        if not sign or not key.strip() or not all(value.strip() for value in values.split(",")):
            raise UserError(f"-s {text}: must look like key=value,value,…, for example -s method.k=1,2,3")
        key = key.strip()
        if key in sweep:
            raise UserError(f"-s {text}: {key} is swept already; give all of its values after one -s, as {key}=1,2,3")
        sweep[key] = [parse_overrides([f"{key}={value}"])[key] for value in values.split(",")]
    return sweep


def run_comparison(
    comparison: Comparison,
    jobs: int,
    yes: bool = True,
    is_new: bool = False,
    as_json: bool = False,
    figure_files: bool = True,
) -> None:
    """Run what is left of a comparison, if what it takes is wanted, show its table and write its report.

    If it is not wanted, a folder ``is_new``, which only has the manifest, is removed.
    """
    from vitfleet.cli.display import TerminalRun
    from vitfleet.report.console.results import comparison_costs_table, comparison_metrics_tables, comparison_tables
    from vitfleet.run.comparison.manifest import discard_comparison
    from vitfleet.run.comparison.results import partitions_differ

    try:
        clock = _show_plan(comparison, jobs, yes)
    except (UserError, typer.Abort):
        if is_new:
            discard_comparison(comparison.path)
        raise
    path = comparison.path
    display = TerminalRun(clock)
    with resumable(path, display, jobs):
        show_job = _job_lines(comparison.left, path)
        comparison.resume(jobs=jobs, callbacks=[display], progress=display, on_job_end=show_job)
    result = comparison.result
    accuracies = comparison_tables(result)
    for table in (*accuracies, *comparison_metrics_tables(result.rows), comparison_costs_table(result.rows)):
        console.print(table)
        console.print()
    if partitions_differ(path):
        warn("note: these runs have different partitions, so their accuracies are not comparable")
    say(f"comparison folder: {path}")
    page = comparison.report(display, figure_files)
    say(f"report: {page}")
    if not figure_files:
        say(f"figures as files: vitfleet report {shlex.quote(str(path))}")
    if as_json:
        tree = {"folder": str(path), "report": str(page), "target": result.target}
        print(json.dumps({**tree, "runs": {row.name: row.summaries for row in result.rows}}))


def _show_plan(comparison: Comparison, jobs: int, yes: bool) -> ComparisonClock | None:
    """Print what the runs that are left will take; return the clock of runs that are made one after the other.

    If they take too much, consent is required.
    """
    from vitfleet.costs.estimate import combine
    from vitfleet.report.console.progress import ComparisonClock

    left = comparison.left
    if not left:
        return None
    runs = f"{len(left)} run{'s' if len(left) > 1 else ''}"
    seeds = [member.config.seed for member in left]
    estimates = comparison.estimate()
    if estimates is None:
        say(f"{runs}; how long they take is known after the first rounds")
        rounds = [float(member.config.rounds) for member in left]
        return None if jobs > 1 else ComparisonClock(rounds, seeds, in_seconds=False)
    total = combine(estimates, jobs)
    show_estimate(f"{runs}, estimated", total)
    require_consent(total, comparison.path, yes)
    return None if jobs > 1 else ComparisonClock([estimate.seconds for estimate in estimates], seeds)


def _job_lines(members: Sequence[ComparedRun], comparison: Path) -> Callable[[JobResult], None]:
    """Return a function that prints a line about each run that has ended, where several are made at a time."""
    by_folder = {member.folder(comparison): member for member in members}
    numbers = count(1)

    def show(job: JobResult) -> None:
        from vitfleet.run.output.summary import read_summary

        member = by_folder[job.folder]
        which = f"run {next(numbers)} of {len(members)}: {method_label(member.name)}, seed {member.config.seed}"
        if job.code:
            warn(f"{which}: failed: {job.last_line}")
            return
        summary = read_summary(job.folder)
        accuracy, continual = summary["accuracy"]["global"], summary.get("continual")
        reached = continual["average_accuracy"] if continual else accuracy
        shown = "" if reached is None else f", {reached:.1%} accuracy{' over all tasks' if continual else ''}"
        say(f"{which}: finished after {job.seconds:.0f} s{shown}")

    return show


def check_single_process() -> None:
    """Reject a comparison that torchrun started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a comparison runs in one process; with torchrun, use `vitfleet run` for each configuration")
