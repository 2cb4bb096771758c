"""Runs of a comparison, each a real process: none outlives the one that started it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import MakeConfig
from vitfleet.run.folder import create_run_folder

PATIENCE = 30.0
PLAYER = """
import sys
from pathlib import Path
from vitfleet.run.jobs import run_jobs

for ended in run_jobs([Path(folder) for folder in sys.argv[1:]], 2):
    print(ended)
"""


def runs_of(player: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Wait until a player has started so many runs, and return their processes."""
    end = time.monotonic() + PATIENCE
    while True:
        runs = [one for one in psutil.Process(player.pid).children() if "resume" in one.cmdline()]
        if len(runs) == count:
            return runs
        assert player.poll() is None, player.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_runs_end_with_a_player_that_is_killed_outright(tiny_config: MakeConfig, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        create_run_folder(tiny_config("rounds=100000"), folder, folder.name, ["test"]).release()
    player = subprocess.Popen([sys.executable, "-c", PLAYER, *map(str, folders)], stdout=subprocess.PIPE, text=True)
    try:
        runs = runs_of(player, len(folders))
    finally:
        player.kill()
        player.communicate()
    _, left = psutil.wait_procs(runs, PATIENCE)
    for run in left:
        run.kill()
    assert not left
