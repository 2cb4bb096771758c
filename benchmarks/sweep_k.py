"""Compare FedViT's runs with several k and choosers, without training twice what they have in common.

Runs of different k are the same until a client has stored more than k tasks. So the run with the largest k is trained
first, and the others continue from its checkpoint at the end of task k + 1. What remains is an ordinary comparison.

Examples::

    python benchmarks/sweep_k.py fedvit-cifar100 --k 8 6 4 2 1 --choosers wasserstein angle --jobs 10 \\
        -o method.rho=0.4 -o method.rank_every=10 -o machine.compile=true --data-dir data --out k
    python benchmarks/plot_curves.py k docs/results/fedvit-cifar100-k
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitfleet.api.comparison import Comparison, create
from vitfleet.api.training import run_in
from vitfleet.config import Config
from vitfleet.run.callbacks import Callback
from vitfleet.run.compare import ComparedRun
from vitfleet.run.context import RunContext
from vitfleet.run.folder import create_run_folder
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState

# Everything else in a run's folder is what it has trained so far.
OWN_FILES = frozenset(
    {"about.json", "config.json", "plugins.json", ".lock", "output.txt", "summary.json", "tensorboard"}
)


@dataclass
class Branch(Callback):
    """Copies a run into the folders of others, once the checkpoint that they have in common with it is complete.

    Attributes
    ----------
    folders
        The folders that continue from each checkpoint, by its round.
    """

    folders: Mapping[int, Sequence[Path]]

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        self.context = context

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        # The checkpoint of the round before: that of this one is written after it. Resuming, a run drops later records.
        for folder in self.folders.get(record.round - 1, ()):
            self.context.checkpoints.wait()
            copy_training(self.context.folder, folder)


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


def make_comparison(args: argparse.Namespace) -> tuple[Comparison, ComparedRun]:
    """Create the comparison; return it with the run that is trained first."""
    largest = max(args.k)
    methods = [{"name": "fedvit", "k": k, "chooser": name} for k in args.k for name in args.choosers if k < largest]
    first = {"name": "fedvit", "k": largest, "chooser": args.choosers[0]}
    overrides = [*args.overrides, *([f"data.dir={args.data_dir}"] if args.data_dir else [])]
    comparison, _ = create(
        args.preset, methods=[*methods, first], seeds=[args.seed], overrides=overrides, out=args.out, command=sys.argv
    )
    (member,) = (member for member in comparison.members if k_of(member) == largest)
    tasks = member.config.data.tasks
    if tasks is None or largest < tasks.count - 1:
        needed = "tasks" if tasks is None else f"--k {tasks.count - 1} or more among the values: all stored tasks"
        raise SystemExit(f"{args.preset}: needs {needed}")
    if last_common_round(member.config, 0) % member.config.machine.checkpoint_every:
        raise SystemExit("machine.checkpoint_every: must divide data.tasks.rounds_per_task")
    return comparison, member


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--k", type=int, nargs="+", required=True, help="one of them at least the stored tasks")
    parser.add_argument("--choosers", nargs="+", default=["wasserstein", "angle"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="key=value")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    comparison, first = make_comparison(args)
    folders: dict[int, list[Path]] = {}
    for member in comparison.members:
        if member.name != first.name:
            create_run_folder(member.config, member.folder(comparison.path), member.name, sys.argv).release()
            folders.setdefault(last_common_round(member.config, k_of(member)), []).append(
                member.folder(comparison.path)
            )
    folder = create_run_folder(first.config, first.folder(comparison.path), first.name, sys.argv)
    try:
        run_in(folder, None, [Branch(folders)])
    finally:
        folder.release()
    comparison.resume(jobs=args.jobs)
    for member in comparison.members:
        print(member.name, member.folder(comparison.path))


if __name__ == "__main__":
    main()
