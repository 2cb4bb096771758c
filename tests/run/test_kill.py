"""A run that is killed at any moment, also during a write, resumes and ends with the same bytes.

Random kills hit what takes time: setup, training, evaluation. Writes take almost none, so two more kinds of test slow
them down: one that stops at every kind of write in turn and is killed there, and random kills of a run with slow
writes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from conftest import DIGITS_BODY, MakeConfig, RecordProperty
from vitfleet.cli import main
from vitfleet.config.registry import METHODS
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

# Every run is a process of its own, forked from one that has done the imports, which take seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pytest",
        "sklearn.datasets",
        "tensorboard",
        "vitfleet.cli",
        "vitfleet.report.figures.folder",
        "vitfleet.run.setup",
    ]
)

Moment: TypeAlias = Callable[[], bool]
LONG_PAUSE_S = 10.0


def slowed(action: Callable[..., Any], before: float, after: float) -> Callable[..., Any]:
    def act(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(before)
        result = action(*arguments, **keywords)
        time.sleep(after)
        return result

    return act


def slow_down(pause: float) -> None:
    """Pause around renaming temporary files and before removing files."""
    for owner, name, before, after in (
        (os, "fsync", pause, 0.0),
        (os, "replace", 0.0, pause),
        (Path, "replace", 0.0, pause),
        (Path, "unlink", pause, 0.0),
    ):
        setattr(owner, name, slowed(getattr(owner, name), before, after))


@dataclass(frozen=True)
class HalfWritten:
    """The files of a folder that exist only while they are written, or whose names a manifest does not have yet."""

    folder: Path
    patterns: tuple[str, ...]

    def paths(self) -> list[Path]:
        return [path for pattern in self.patterns for path in self.folder.glob(pattern)]

    def include(self, file: int) -> bool:
        return any(os.path.samestat(os.fstat(file), path.stat()) for path in self.paths())


def stop_at(files: HalfWritten) -> None:
    """Pause before one of these files is made durable, long enough to be killed there."""
    make_durable = os.fsync

    def pause_and_make_durable(file: int) -> None:
        if files.include(file):
            time.sleep(LONG_PAUSE_S)
        make_durable(file)

    os.fsync = pause_and_make_durable  # type: ignore[assignment]


def command(arguments: Sequence[str], slow: Callable[[], None], log: Path) -> None:
    """Run the command in this process, with slow writes."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    slow()
    sys.argv = ["vitfleet", *arguments]
    main()


@dataclass(frozen=True)
class Runner:
    """Starts and resumes one run."""

    folder: Path
    arguments: Sequence[str]
    pause: float

    def start(self, slow: Callable[[], None]) -> ForkServerProcess:
        exists = (self.folder / "config.json").exists()
        words = ["resume", self.folder] if exists else ["run", "digits", *self.arguments, "--out", self.folder]
        process = FORKS.Process(target=command, args=([*map(str, words)], slow, self._log))
        process.start()
        return process

    def finish(self) -> None:
        process = self.start(partial(slow_down, 0.0))  # writes need not be slow any more
        process.join(timeout=240)
        assert process.exitcode == 0, self.log()

    def kill_at(self, moment: Moment, slow: Callable[[], None] | None = None) -> bool:
        """Start the run, kill it at a moment, and return whether it was still running."""
        process = self.start(slow or partial(slow_down, self.pause))
        while not moment():
            if process.exitcode is not None:
                assert process.exitcode == 0, self.log()
                return False
            time.sleep(0.002)
        process.kill()
        process.join()
        return process.exitcode == -signal.SIGKILL

    def lines(self) -> int:
        records = self.folder / "records.jsonl"
        return records.read_bytes().count(b"\n") if records.exists() else 0

    def round(self) -> int:
        """Return the round of the last complete checkpoint."""
        manifest = self.folder / "checkpoint" / "checkpoint.json"
        return int(json.loads(manifest.read_text())["round"]) if manifest.exists() else 0

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*.tmp"))

    def mid_write(self) -> bool:
        """Whether it was killed between a round's record and the end of its checkpoint."""
        manifest = json.loads((self.folder / "checkpoint" / "checkpoint.json").read_text())
        named = {"checkpoint.json", "previous", manifest["server"], *manifest["clients"].values()}
        present = {"previous", *(path.name for path in (self.folder / "checkpoint").iterdir())}
        return self.lines() > self.round() or present != named

    def log(self) -> str:
        return self._log.read_text()

    @property
    def _log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"


MakeRunner: TypeAlias = Callable[..., Runner]
Undisturbed: TypeAlias = Callable[..., Path]


@pytest.fixture
def runner(tiny_overrides: tuple[str, ...], tmp_path: Path) -> MakeRunner:
    def make(name: str, *overrides: str, pause: float = 0.0) -> Runner:
        arguments = [part for override in (*tiny_overrides, *overrides) for part in ("-o", override)]
        return Runner(tmp_path / name, arguments, pause)

    return make


@pytest.fixture
def undisturbed(tiny_config: MakeConfig, tmp_path: Path) -> Undisturbed:
    """Return a function that runs a configuration without interruption and returns its folder."""

    def run(*overrides: str) -> Path:
        folder = tmp_path / "undisturbed"
        folder.mkdir()
        run_rounds(open_run(tiny_config(*overrides), folder))
        return folder

    return run


def reproducible_files(folder: Path) -> dict[str, bytes]:
    paths = [folder / "records.jsonl", *folder.glob("*.safetensors"), *folder.glob("checkpoint/*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_equal_runs(disturbed: Runner, undisturbed: Path) -> None:
    files, expected = reproducible_files(disturbed.folder), reproducible_files(undisturbed)
    assert files["records.jsonl"] == expected["records.jsonl"]
    assert set(files) == set(expected)
    assert [name for name in files if files[name] != expected[name]] == []
    assert disturbed.leftovers() == []
    seconds = (disturbed.folder / "timings.jsonl").read_bytes().count(b"\n")
    assert seconds == disturbed.lines()


def after(seconds: float) -> Moment:
    """Return the moment this many seconds from now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def after_progress(runner: Runner, seconds: float) -> Moment:
    """Return the moment this many seconds after the next round is done."""
    before = runner.round()
    due: list[Moment] = []

    def moment() -> bool:
        if not due and runner.round() > before:
            due.append(after(seconds))
        return bool(due) and due[0]()

    return moment


def kill_repeatedly(runner: Runner, kills: int, chance: random.Random, reach: float) -> list[int]:
    """Kill a run a number of times, every fifth time during setup; return the rounds it had reached."""
    reached = []
    for kill in range(kills):
        early = kill % 5 == 4
        moment = after(chance.uniform(0.1, 1)) if early else after_progress(runner, chance.uniform(0, reach))
        assert runner.kill_at(moment), f"kill {kill} came too late: give the run more rounds\n{runner.log()}"
        reached.append(runner.round())
    return reached


@pytest.mark.long
def test_a_run_killed_three_times_ends_with_the_same_bytes(runner: MakeRunner, undisturbed: Undisturbed) -> None:
    settings = "rounds=40", "callbacks={best_model={monitor='loss', mode='min'}}"
    killed = runner("killed", *settings)
    reached = kill_repeatedly(killed, 3, random.Random(0), reach=0.2)
    assert reached[0] >= 1
    killed.finish()
    assert_equal_runs(killed, undisturbed(*settings))
    assert (killed.folder / "best.safetensors").exists()


def half_written(runner: Runner, write: str) -> tuple[Moment, HalfWritten]:
    """Return the moment at which a temporary file is not yet renamed, or a state is not yet in the manifest."""
    name = Path(write).name
    manifest = runner.folder / "checkpoint" / "checkpoint.json"
    if not write.startswith("checkpoint/") or write.endswith(manifest.name):
        temporary = tuple(str(Path(write).with_name(file)) for file in (f".{name}.tmp", f"{name}.tmp"))
        files = HalfWritten(runner.folder, temporary)
        return lambda: bool(files.paths()), files
    files = HalfWritten(runner.folder, (write,))

    def now() -> bool:
        named = manifest.read_text() if manifest.exists() else ""
        return any(path.name not in named for path in files.paths())

    return now, files


def recorded_but_not_checkpointed(runner: Runner) -> Moment:
    """Return the moment at which a round's record is written and its checkpoint is not."""
    return lambda: runner.lines() == runner.round() + 1


def test_a_run_killed_at_every_kind_of_write_ends_with_the_same_bytes(
    runner: MakeRunner, undisturbed: Undisturbed
) -> None:
    killed = runner("killed", "rounds=2")
    for write in (
        "config.json",
        "partition.json",
        "checkpoint/server-*",
        "checkpoint/checkpoint.json",
        "model.safetensors",
        "summary.json",
    ):
        moment, files = half_written(killed, write)
        assert killed.kill_at(moment, partial(stop_at, files)), f"{write} was never seen half written\n{killed.log()}"
        assert moment()
        if write == "checkpoint/server-*":
            between = recorded_but_not_checkpointed(killed)
            assert between()  # the record of this round is written already, and must be removed
    killed.finish()
    assert_equal_runs(killed, undisturbed("rounds=2"))


@pytest.mark.long
def test_a_run_killed_while_a_client_state_is_written_ends_with_the_same_bytes(
    runner: MakeRunner, undisturbed: Undisturbed
) -> None:
    killed = runner("killed", "method.name=standalone")
    # Observable only in the second round, when the states of the first one are in a checkpoint.
    moment, files = half_written(killed, "checkpoint/client-*-round-000002.safetensors")
    assert killed.kill_at(moment, partial(stop_at, files)), killed.log()
    assert moment()
    assert killed.round() == 1
    killed.finish()
    assert_equal_runs(killed, undisturbed("method.name=standalone"))


@pytest.mark.long
def test_a_run_killed_within_the_third_task_ends_with_the_same_bytes(
    runner: MakeRunner, undisturbed: Undisturbed
) -> None:
    settings = (
        "method.name=fedvit",
        "train.epochs=3",
        "data.tasks.count=3",
        "data.tasks.classes=2",
        "data.tasks.per_client=[2, 2]",
        "data.tasks.share=[0.3, 0.5]",
        "data.tasks.rounds_per_task=3",
        "rounds=9",
    )
    killed = runner("killed", *settings, pause=0.03)
    assert killed.kill_at(lambda: killed.round() == 7), killed.log()
    assert killed.round() < 9, "the third task is over"
    killed.finish()
    assert_equal_runs(killed, undisturbed(*settings))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["fedavg", "standalone"])
def test_a_run_killed_twenty_times_ends_with_the_same_bytes(
    method: str, runner: MakeRunner, undisturbed: Undisturbed
) -> None:
    settings = "rounds=300", f"method.name={method}", "machine.checkpoint_every=2"
    killed = runner("killed", *settings)
    reached = kill_repeatedly(killed, 20, random.Random(1), reach=0.4)
    assert reached == sorted(reached)
    assert len(set(reached)) > 10
    killed.finish()
    assert_equal_runs(killed, undisturbed(*settings))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_killed_twenty_times_during_writes_ends_with_the_same_bytes(
    runner: MakeRunner, undisturbed: Undisturbed
) -> None:
    settings = "rounds=60", "method.name=standalone"
    killed = runner("killed", *settings, pause=0.03)
    chance = random.Random(2)
    mid_write = 0
    for kill in range(20):
        moment = after_progress(killed, chance.uniform(0, 1))
        assert killed.kill_at(moment), f"kill {kill} came too late\n{killed.log()}"
        mid_write += killed.mid_write()
    assert mid_write >= 5  # with writes this slow, nearly all of them
    killed.finish()
    assert_equal_runs(killed, undisturbed(*settings))


TASKS = "data.tasks={count = 3, classes = 3, rounds_per_task = 4, per_client = [2, 3], share = [0.3, 0.5]}"
ROUNDS = 12
METHOD_KEYS = {
    "closed-form": [*DIGITS_BODY],
    "analytic": [*DIGITS_BODY],
    "transfl": ["method.k=1"],
    "fedbfpt": ["method.local_layers=2", "model.depth=4"],
    "eftvit": ["method.local_layers=1"],
}


def after_round(runner: Runner, round: int, seconds: float) -> Moment:
    """Return the moment this many seconds after the checkpoint of a round."""
    due: list[Moment] = []

    def moment() -> bool:
        if not due and runner.round() >= round:
            due.append(after(seconds))
        return bool(due) and due[0]()

    return moment


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", [entry.name for entry in METHODS if entry.origin.built_in])
def test_every_method_killed_twice_ends_with_the_same_bytes(
    method: str, runner: MakeRunner, undisturbed: Undisturbed, record_property: RecordProperty
) -> None:
    keys = [f"method.name={method}", f"rounds={ROUNDS}", "train.epochs=2", *METHOD_KEYS.get(method, [])]
    keys += [TASKS] if METHODS[method].target.needs_tasks else []
    killed, chance = runner("killed", *keys, pause=0.02), random.Random(method)
    reached = []
    for earliest, latest in ((0, 3), (5, 8)):  # before the last task, and inside of it
        moment = after_round(killed, chance.randint(earliest, latest), chance.uniform(0, 0.5))
        assert killed.kill_at(moment), f"killed too late\n{killed.log()}"
        reached.append(killed.round())
    killed.finish()
    assert_equal_runs(killed, undisturbed(*keys))
    record_property(f"{method}, killed after the checkpoints of rounds", reached)
