"""Several runs at a time, each in a process of its own, so that they can share a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vitfleet.config import read_config
from vitfleet.files import CONFIG_FILE, OUTPUT_FILE, RECORDS_FILE
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.system import die_with_parent
from vitfleet.training.execution.memory_budget import GPU_SHARE_VARIABLE

POLL_SECONDS = 0.2
TERMINATE_SECONDS = 20.0  # after which a process that was asked to end is killed


@dataclass(frozen=True)
class JobResult:
    """A run whose process has ended; ``code`` is the exit code."""

    folder: Path
    code: int
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line of the process's output."""
        lines = (self.folder / OUTPUT_FILE).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


def run_jobs(folders: Sequence[Path], jobs: int, progress: Progress = NO_PROGRESS) -> Generator[JobResult, None, None]:
    """Resume the runs in these folders, a number of them at a time, and yield each when its process has ended.

    Closing the generator stops all processes. Their runs can be resumed.
    """
    jobs = max(1, min(jobs, len(folders)))  # shares of the machine are those of the runs that there are
    waiting = list(folders)
    running: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}  # each with the time of its start
    rounds_done = {folder: _rounds_done(folder) for folder in folders}
    total = sum(read_config(folder / CONFIG_FILE).rounds - rounds_done[folder] for folder in folders)
    with progress.task(f"rounds of {len(folders)} runs, {jobs} at a time", total) as advance, ExitStack() as at_exit:
        at_exit.callback(lambda: stop_jobs([process for process, _ in running.values()]))
        while waiting or running:
            while waiting and len(running) < jobs:
                folder = waiting.pop(0)
                running[folder] = start_job(folder, jobs), time.monotonic()
            time.sleep(POLL_SECONDS)
            for folder, (process, started) in list(running.items()):
                now = _rounds_done(folder)
                advance(now - rounds_done[folder])
                rounds_done[folder] = now
                if process.poll() is not None:
                    del running[folder]
                    yield JobResult(folder, process.returncode, time.monotonic() - started)


def stop_jobs(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, and kill those that do not; nothing happens to those that have ended."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_job(folder: Path, jobs: int) -> subprocess.Popen[bytes]:
    """Resume the run in a folder in a process of its own, with the share of the machine of one of ``jobs`` runs."""
    # Processes that each use all threads of the machine slow each other down. If each takes all that is free of a GPU's
    # memory, some of them find too little.
    shares = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)),
        GPU_SHARE_VARIABLE: f"{1 / jobs:.4f}",
    }
    with (folder / OUTPUT_FILE).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "vitfleet", "resume", str(folder)],
            env={**shares, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the parent process, which then stops this one
            preexec_fn=die_with_parent,  # a parent that was killed cannot stop it
        )


def _rounds_done(folder: Path) -> int:
    records = folder / RECORDS_FILE
    return records.read_bytes().count(b"\n") if records.exists() else 0
