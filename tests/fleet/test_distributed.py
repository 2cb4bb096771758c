"""Two ranks write the same files as one, bit for bit; a run can be resumed with another number of ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from conftest import Command, InterruptAfter, MakeConfig
from vitfleet.config import load_config
from vitfleet.config.schema import Config
from vitfleet.fleet.distributed import assign_ranks
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import create_run_folder
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run

CASES = {
    "fedavg": ["method.name=fedavg"],
    "transfl": ["method.name=transfl", "method.k=1", "machine.checkpoint_every=2"],
    "eftvit": ["method.name=eftvit", "method.local_layers=1", "train.mask_ratio=0.5"],
    "on-disk": ["method.name=eftvit", "method.local_layers=1", "method.store_on=disk"],
    "adam": ["server.optimizer=adam"],
    "standalone": ["method.name=standalone"],
    "buffered": ["fleet.devices={agx=1,nano=1}", "fleet.schedule.kind=buffered", "fleet.schedule.concurrency=3"],
    "diverging": ["method.name=fedavg", "train.lr=1e30"],
    "stopping": ["rounds=9", "callbacks={early_stopping={patience=1, min_delta=1.0}, best_model={}}"],
    "solved head": [
        "head.solve_every=3",
        "head.solve_last=true",
        "callbacks.early_stopping={patience=1, min_delta=1.0}",
    ],
}
TASKS = ["data.limit=800", "data.tasks.count=2", "data.tasks.rounds_per_task=2", "train.epochs=2"]
TASKS += ["model.dim=16", "model.depth=2", "model.patch_size=4"]
SMALL = ["rounds=3", "data.limit=400", "machine.workers=1"]

# `vitfleet run` on each rank, for several folders in one call of torchrun, which takes seconds to start.
RUN_ALL = """
import sys
from pathlib import Path
from vitfleet.config.load import read_config
from vitfleet.fleet.distributed import join_process_group
from vitfleet.run.loop import run_rounds, follow
from vitfleet.run.setup import open_run

with join_process_group() as processes:
    assert processes.size == 2
    for folder in map(Path, sys.argv[1:]):
        context = open_run(read_config(folder / "config.json"), folder, processes=processes)
        run_rounds(context) if processes.is_first else follow(context)
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in threads if "gloo" in name], threads
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=240)


def create_folder(config: Config, folder: Path) -> Path:
    create_run_folder(config, folder, "run", ["vitfleet"])
    return folder


def written_files(folder: Path) -> Mapping[str, bytes]:
    """Return the files that must not depend on the number of ranks."""
    paths = [folder / "records.jsonl", *folder.glob("*.safetensors"), *folder.glob("checkpoint/*")]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.is_file() and path.name != "checkpoint.json"
    }


#: What processes share in another way: states, parts of the server's state, a server that trains, an early end, tasks.
DIFFERENT = ("transfl", "on-disk", "diverging", "stopping", "solved head", "tasks", "start", "common")


@pytest.mark.parametrize("every_case", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_ranks_write_the_same_files_as_one(every_case: bool, tiny_config: MakeConfig, tmp_path: Path) -> None:
    script = tmp_path / "run_all.py"
    script.write_text(RUN_ALL)
    configs = {name: tiny_config(*overrides, "fleet.per_round=3") for name, overrides in CASES.items()}
    configs["tasks"] = load_config("fedvit-digits", TASKS)
    configs["start"] = load_config("start-eftvit", [*SMALL, "head.start=closed-form", "head.solve_every=2"])
    configs |= {name: load_config("fedvit-digits", [*TASKS, f"method.name={name}"]) for name in ("der++", "joint")}
    tasks = "data.tasks={count=2, classes=3, rounds_per_task=2, order='common', partitioned=true, scenario='class'}"
    common = [*SMALL, tasks, "rounds=4"]
    configs["common"] = load_config("start-fedavg", [*common, "head.start=closed-form"])
    configs["analytic"] = load_config("start-fedavg", [*common, "method.name=analytic"])
    configs = {name: config for name, config in configs.items() if every_case or name in DIFFERENT}
    two_ranks = {name: create_folder(config, tmp_path / f"{name}-2") for name, config in configs.items()}
    done = torchrun(str(script), *map(str, two_ranks.values()))
    assert not done.returncode, done.stderr[-3000:]
    for name, config in configs.items():
        one_rank = tmp_path / f"{name}-1"
        run_rounds(open_run(config, one_rank))
        assert written_files(two_ranks[name]) == written_files(one_rank), name
    failures = [entry.failure for record in read_records(two_ranks["diverging"]) for entry in record.clients]
    assert all(failures)
    assert any("client-" in name for name in written_files(two_ranks["on-disk"]))
    assert [record.round for record in read_records(two_ranks["stopping"])] == [1, 2]
    assert "best.safetensors" in written_files(two_ranks["stopping"])
    heads = {name: [bool(record.head) for record in read_records(two_ranks[name])] for name in ("start", "solved head")}
    assert heads == {"start": [True, False, True, False], "solved head": [False, True]}


@pytest.mark.long
def test_run_of_one_rank_is_resumed_with_two(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(*CASES["eftvit"])
    uninterrupted, resumed = (create_folder(config, tmp_path / name) for name in ("uninterrupted", "resumed"))
    run_rounds(open_run(config, uninterrupted))
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, resumed), callbacks=[InterruptAfter(2)])
    done = torchrun("-m", "vitfleet", "resume", str(resumed))
    assert not done.returncode, done.stderr[-3000:]
    assert "2 processes" in done.stdout
    assert done.stdout.count("resuming after round 1") == 1
    assert written_files(resumed) == written_files(uninterrupted)


def test_compare_rejects_several_processes(vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    done = vitfleet(tmp_path, "compare", "digits", "digits", "--out", "both")
    assert done.returncode == 2
    assert "a comparison runs in one process" in done.stderr
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ([5, 5, 5, 5], [0, 1, 0, 1]),
        ([1, 9, 2, 3], [1, 0, 1, 1]),
        ([0, 0, 0], [0, 1, 0]),
        ([], []),
    ],
)
def test_assign_ranks_balances_by_size(sizes: list[int], ranks: list[int]) -> None:
    assert assign_ranks(sizes, 2) == ranks
