"""Parallel runs of a comparison: none of their processes outlives the one that started it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import MakeConfig
from vitfleet.run.output.folder import create_run_folder

TIMEOUT = 30.0
SCRIPT = """
import sys
from pathlib import Path
from vitfleet.run.comparison.jobs import run_jobs

for result in run_jobs([Path(folder) for folder in sys.argv[1:]], 2):
    print(result)
"""


def wait_for_runs(parent: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Wait until a process has started a number of runs, and return their processes."""
    end = time.monotonic() + TIMEOUT
    while True:
        runs = [child for child in psutil.Process(parent.pid).children() if "resume" in child.cmdline()]
        if len(runs) == count:
            return runs
        assert parent.poll() is None, parent.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_run_jobs_processes_end_with_a_killed_parent(tiny_config: MakeConfig, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        create_run_folder(tiny_config("rounds=100000"), folder, folder.name, ["test"]).release()
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, folders)], stdout=subprocess.PIPE, text=True)
    try:
        runs = wait_for_runs(parent, len(folders))
    finally:
        parent.kill()
        parent.communicate()
    _, left = psutil.wait_procs(runs, TIMEOUT)
    for run in left:
        run.kill()
    assert not left
