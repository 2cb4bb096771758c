"""Several runs at a time, each a process of its own: what one leaves of a GPU, another uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitfleet.config import read_config
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.system import die_with_parent

OUTPUT = "output.txt"  # in a run's folder: what its process said
LOOK_EVERY = 0.2  # seconds
STOP_PATIENCE = 20.0


@dataclass(frozen=True)
class JobResult:
    """A run whose process has ended; ``code`` is 0 if all went well."""

    folder: Path
    code: int
    seconds: float

    @property
    def complaint(self) -> str:
        """The last line that it said."""
        lines = (self.folder / OUTPUT).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


def play(folders: Sequence[Path], jobs: int, progress: Progress = NO_PROGRESS) -> Generator[JobResult, None, None]:
    """Play the runs in these folders, each from where it stands, so many at a time; yield each that has ended.

    Whoever stops listening stops them all: they can be gone on with.
    """
    waiting = list(folders)
    playing: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
    rounds = {folder: _rounds(folder) for folder in folders}
    total = sum(_wanted(folder) - rounds[folder] for folder in folders)
    with progress.task(f"rounds of {len(folders)} runs, {jobs} at a time", total) as advance, _stopping(playing):
        while waiting or playing:
            while waiting and len(playing) < jobs:
                folder = waiting.pop(0)
                playing[folder] = _start(folder, jobs), time.monotonic()
            time.sleep(LOOK_EVERY)
            for folder, (process, started) in list(playing.items()):
                now = _rounds(folder)
                advance(now - rounds[folder])
                rounds[folder] = now
                if process.poll() is not None:
                    del playing[folder]
                    yield JobResult(folder, process.returncode, time.monotonic() - started)


@contextmanager
def _stopping(playing: dict[Path, tuple[subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Stop what is still playing at the end, however it comes."""
    try:
        yield
    finally:
        for process, _ in playing.values():
            process.terminate()
        for process, _ in playing.values():
            try:
                process.wait(STOP_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(folder: Path, jobs: int) -> subprocess.Popen[bytes]:
    # Processes with all of a machine's threads each get in each other's way.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    with (folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "vitfleet", "resume", str(folder)],
            env={**threads, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is for whoever started them
            preexec_fn=die_with_parent,  # who is killed outright cannot stop them
        )


def _rounds(folder: Path) -> int:
    records = folder / "records.jsonl"
    return records.read_bytes().count(b"\n") if records.exists() else 0


def _wanted(folder: Path) -> int:
    return read_config(folder / "config.json").rounds
