"""Compare FedViT's runs with several k and rankings of stored tasks; what they have in common is trained once.

Runs of different k are the same until a client has stored more than k tasks. So the run with the largest k is trained
first, and the others continue from its checkpoint at the end of task k + 1: with ``--jobs``, the number of runs at a
time, as soon as it is written, else after the first run. What remains is an ordinary comparison.

Examples::

    python benchmarks/sweep_k.py fedvit-cifar100 --k 8 6 4 2 1 --rankings wasserstein angle --jobs 10 \\
        -o method.stored_share=0.4 -o method.rerank=10 -o machine.compile=true --data-dir data --out k
    python benchmarks/plot_curves.py k docs/results/fedvit-cifar100-k
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from vitfleet.api.comparison import Comparison, create
from vitfleet.api.request import ComparisonRequest
from vitfleet.api.run import run_in
from vitfleet.config import Config, load_config
from vitfleet.data.image_cache import shared_images
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.files import ABOUT_FILE, CONFIG_FILE, OUTPUT_FILE, PLUGINS_FILE, SUMMARY_FILE
from vitfleet.run.callbacks import Callback
from vitfleet.run.comparison.jobs import start_job, stop_jobs
from vitfleet.run.comparison.manifest import ComparedRun
from vitfleet.run.context import RunContext
from vitfleet.run.output.folder import create_run_folder
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState
from vitfleet.training.execution.memory_budget import GPU_SHARE_VARIABLE

# Everything else in a run's folder is what it has trained so far.
OWN_FILES = frozenset({ABOUT_FILE, CONFIG_FILE, PLUGINS_FILE, ".lock", OUTPUT_FILE, SUMMARY_FILE, "tensorboard"})


@dataclass
class Branch(Callback):
    """Copies a run into the folders of others, once the checkpoint that they have in common with it is complete.

    Attributes
    ----------
    folders
        The folders that continue from each checkpoint, by its round.
    jobs
        Runs at a time, with the one that is copied; those that continue it are started as soon as they can be.
    """

    folders: Mapping[int, Sequence[Path]]
    jobs: int
    waiting: list[Path] = field(default_factory=list)
    running: list[Popen[bytes]] = field(default_factory=list)

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        self.context = context

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        # The checkpoint of the round before: that of this one is written after it. Resuming, a run drops later records.
        for folder in self.folders.get(record.round - 1, ()):
            self.context.checkpoints.wait()
            copy_training(self.context.folder, folder)
            self.waiting.append(folder)
        self.running = [process for process in self.running if process.poll() is None]
        while self.waiting and len(self.running) < self.jobs - 1:
            self.running.append(start_job(self.waiting.pop(0), self.jobs))

    def wait(self) -> None:
        """Wait for the runs that were started."""
        for process in self.running:
            process.wait()


def copy_training(source: Path, target: Path) -> None:
    """Copy what a run has trained into the folder of another one."""
    for path in source.iterdir():
        if path.name in OWN_FILES:
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)


def last_common_round(config: Config, k: int) -> int:
    """Return the last round in which no client has more than k tasks stored before the one that it learns."""
    tasks = config.data.tasks
    assert tasks is not None
    return tasks.rounds_per_task * (k + 1)


def k_of(member: ComparedRun) -> int:
    """Return a run's k."""
    k: int = member.config.method.model_dump()["k"]
    return k


def check_values(config: Config, values: Sequence[int]) -> None:
    """Check that one of the values is all stored tasks, and that there is a checkpoint at the end of every task."""
    tasks = config.data.tasks
    if tasks is None:
        raise UserError("data.tasks: there are none; choose a preset with tasks, for example fedvit-cifar100")
    if max(values) < tasks.count - 1:
        raise UserError(f"--k: one value must be at least {tasks.count - 1}, all stored tasks: the others continue it")
    if tasks.rounds_per_task % config.machine.checkpoint_every:
        every = config.machine.checkpoint_every
        raise UserError(f"machine.checkpoint_every = {every}: must divide the {tasks.rounds_per_task} rounds of a task")


def make_comparison(args: argparse.Namespace, overrides: list[str]) -> tuple[Comparison, ComparedRun]:
    """Create the comparison; return it with the run that is trained first."""
    largest = max(args.k)
    methods = [
        {"name": "fedvit", "k": k, "task_ranking": name} for k in args.k for name in args.rankings if k < largest
    ]
    first = {"name": "fedvit", "k": largest, "task_ranking": args.rankings[0]}
    comparison, _ = create(
        ComparisonRequest(
            args.preset,
            methods=[*methods, first],
            seeds=[args.seed],
            overrides=overrides,
            out=args.out,
            command=sys.argv,
        )
    )
    return comparison, next(member for member in comparison.members if k_of(member) == largest)


def train(comparison: Comparison, first: ComparedRun, jobs: int) -> None:
    """Train the first run and those that branch off, then what is left."""
    folders: dict[int, list[Path]] = {}
    for member in comparison.members:
        if member.name != first.name:
            create_run_folder(member.config, member.folder(comparison.path), member.name, sys.argv).release()
            folders.setdefault(last_common_round(member.config, k_of(member)), []).append(
                member.folder(comparison.path)
            )
    folder = create_run_folder(first.config, first.folder(comparison.path), first.name, sys.argv)
    branch = Branch(folders, jobs)
    os.environ.setdefault(GPU_SHARE_VARIABLE, f"{1 / jobs:.4f}")  # also for the first run, which is this process
    try:
        run_in(folder, None, [branch])
        branch.wait()
    finally:
        stop_jobs(branch.running)  # where this one failed; they can be resumed
        folder.release()
    comparison.resume(jobs=jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--k", type=int, nargs="+", required=True, help="one of them at least the stored tasks")
    parser.add_argument("--rankings", nargs="+", default=["wasserstein", "angle"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="key=value")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: must be at least 1")
    overrides = [*args.overrides, *([f"data.dir={args.data_dir}"] if args.data_dir else [])]
    config = load_config(args.preset, overrides)
    check_values(config, args.k)
    with shared_images([config.data, config.data]):
        load_dataset(config.data)  # for all runs; missing images are reported before a folder is created
        comparison, first = make_comparison(args, overrides)
        train(comparison, first, args.jobs)
    for member in comparison.members:
        print(member.name, member.folder(comparison.path))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"sweep_k.py: {error}")
