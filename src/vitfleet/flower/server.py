"""A server and its run, from the first device to the last round."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from vitfleet.errors import UserError
from vitfleet.flower.processes import ERROR_FILE, Endpoint, open_endpoint, start_run, state_of
from vitfleet.flower.progress_file import PROGRESS_FILE, Mirror, read_progress
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.records import RoundRecord, read_records, read_seconds

LOOK_EVERY = 0.5  # seconds between looks into the run's folder
ASK_EVERY = 30.0  # seconds between questions to Flower, which are slow

#: Shows a finished round, given its record and its duration in seconds.
ShowRound: TypeAlias = Callable[[RoundRecord, float], None]


def serve(
    endpoint: Endpoint,
    folder: Path,
    names: list[str],
    show_round: ShowRound,
    ready: Callable[[], None],
    progress: Progress = NO_PROGRESS,
) -> None:
    """Open the door, conduct a run to its end behind it, and close the door.

    Parameters
    ----------
    names
        The devices that may come in.
    ready
        Called when devices can connect.
    """
    for stale in (folder / ERROR_FILE, folder / "summary.json", folder / PROGRESS_FILE):
        stale.unlink(missing_ok=True)
    with open_endpoint(endpoint, names):
        ready()
        follow(endpoint, folder, start_run(endpoint, folder), show_round, progress)


def follow(
    endpoint: Endpoint,
    folder: Path,
    run: int,
    show_round: ShowRound = lambda record, seconds: None,
    progress: Progress = NO_PROGRESS,
) -> None:
    """Show every round until the run has ended, and the progress of the current one."""
    mirror = Mirror(progress)
    shown = max((record.round for record in read_records(folder)), default=0)
    seconds, asked = read_seconds(folder), time.monotonic()
    while not (folder / "summary.json").exists():
        shown, seconds = _show_new_rounds(folder, show_round, shown, seconds)
        mirror.show(read_progress(folder))
        if (folder / ERROR_FILE).exists():
            raise UserError((folder / ERROR_FILE).read_text())
        if time.monotonic() - asked > ASK_EVERY:
            asked = time.monotonic()
            state = state_of(endpoint, run)
            if state.startswith("finished") and not (folder / "summary.json").exists():
                raise UserError(f"the run ended before its time ({state}); {endpoint.home / 'superlink.log'} says why")
        time.sleep(LOOK_EVERY)
    mirror.show(None)
    _show_new_rounds(folder, show_round, shown, seconds)


def _show_new_rounds(folder: Path, show_round: ShowRound, shown: int, seconds: float) -> tuple[int, float]:
    """Show the rounds after the last one shown; return the last round, and the seconds of all rounds."""
    until_now = read_seconds(folder)
    if until_now == seconds:
        return shown, seconds
    for record in read_records(folder):
        if record.round > shown:
            show_round(record, until_now - seconds)
            shown = record.round
    return shown, until_now
