"""A server and its run, from the first device to the last round."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from vitfleet.deploy.processes import COMPLAINT, Door, open_door, start_run, state_of
from vitfleet.errors import UserError
from vitfleet.run.conduct import Listener
from vitfleet.run.records import read_records, read_seconds

LOOK_EVERY = 0.5  # seconds between looks into the run's folder
ASK_EVERY = 30.0  # seconds between questions to Flower, which are slow


def serve(door: Door, folder: Path, names: list[str], listener: Listener, ready: Callable[[], None]) -> None:
    """Open the door, conduct a run to its end behind it, and close the door.

    Parameters
    ----------
    names
        The devices that may come in.
    ready
        Called when devices can connect.
    """
    for stale in (folder / COMPLAINT, folder / "summary.json"):
        stale.unlink(missing_ok=True)
    with open_door(door, names):
        ready()
        follow(door, folder, start_run(door, folder), listener)


def follow(door: Door, folder: Path, run: int, listener: Listener) -> None:
    """Tell a listener of every round until the run has ended."""
    told, seconds = sum(1 for _ in read_records(folder)), read_seconds(folder)
    asked = time.monotonic()
    while True:
        ended = (folder / "summary.json").exists()
        for record in list(read_records(folder))[told:]:
            until_now = read_seconds(folder)
            listener.round_done(record, until_now - seconds)
            told, seconds = told + 1, until_now
        if ended:
            return
        if (folder / COMPLAINT).exists():
            raise UserError((folder / COMPLAINT).read_text())
        if time.monotonic() - asked > ASK_EVERY:
            asked = time.monotonic()
            state = state_of(door, run)
            if state.startswith("finished") and not (folder / "summary.json").exists():
                raise UserError(f"the run ended before its time ({state}); {door.home / 'superlink.log'} says why")
        time.sleep(LOOK_EVERY)
