"""Run a server from its start to the last round, and show each round."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from vitfleet.errors import UserError
from vitfleet.files import SUMMARY_FILE
from vitfleet.flower.activity import FLEET_FILE, ActivityReader
from vitfleet.flower.processes import cut_log
from vitfleet.flower.server.processes import (
    PROXY_LOG,
    SUPERLINK_LOG,
    ServerSettings,
    check_running,
    run_status,
    running_server,
    start_run,
)
from vitfleet.flower.server.progress_file import ERROR_FILE, PROGRESS_FILE, ProgressMirror, read_progress
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.records import RoundRecord, read_records, read_seconds

POLL_INTERVAL_S = 0.5  # between two reads of the run's folder
STATUS_INTERVAL_S = 30.0  # between two queries of Flower's status, which take seconds

#: Shows a finished round, given its record and its duration in seconds.
ShowRound: TypeAlias = Callable[[RoundRecord, float], None]


def serve(
    settings: ServerSettings,
    folder: Path,
    names: list[str],
    show_round: ShowRound,
    on_ready: Callable[[], None],
    progress: Progress = NO_PROGRESS,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Start the server for the clients of these names, run all remaining rounds, and stop the server.

    ``on_ready`` is called as soon as clients can connect, ``report`` with each line about the fleet.
    """
    for stale in (folder / ERROR_FILE, folder / SUMMARY_FILE, folder / PROGRESS_FILE):
        stale.unlink(missing_ok=True)
    with running_server(settings, names) as processes:
        on_ready()
        check = partial(check_running, settings, processes)
        follow(settings, folder, start_run(settings, folder), show_round, progress, report, check)


def follow(
    settings: ServerSettings,
    folder: Path,
    flower_run_id: int,
    show_round: ShowRound = lambda record, seconds: None,
    progress: Progress = NO_PROGRESS,
    report: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Show every round, and the progress of the current round, until the run has ended."""
    mirror, news = ProgressMirror(progress), ActivityReader(folder / FLEET_FILE)
    shown = max((record.round for record in read_records(folder)), default=-1)
    seconds, last_query = read_seconds(folder), time.monotonic()
    while not (folder / SUMMARY_FILE).exists():
        shown, seconds = _show_new_rounds(folder, show_round, shown, seconds)
        mirror.show(read_progress(folder))
        for line in news.new_lines():
            report(line)
        check()
        for log in (SUPERLINK_LOG, PROXY_LOG):
            cut_log(settings.home / log)
        if (folder / ERROR_FILE).exists():
            raise UserError((folder / ERROR_FILE).read_text())
        if time.monotonic() - last_query > STATUS_INTERVAL_S:
            last_query = time.monotonic()
            status = run_status(settings, flower_run_id)
            if status.startswith("finished") and not (folder / SUMMARY_FILE).exists():
                raise UserError(f"the run ended too early ({status}); see {settings.home / SUPERLINK_LOG}")
        time.sleep(POLL_INTERVAL_S)
    mirror.show(None)
    _show_new_rounds(folder, show_round, shown, seconds)


def _show_new_rounds(folder: Path, show_round: ShowRound, shown: int, seconds: float) -> tuple[int, float]:
    """Show the rounds after the last one shown; return the last round, and the seconds of all rounds so far."""
    total_seconds = read_seconds(folder)
    if total_seconds == seconds:
        return shown, seconds
    for record in read_records(folder):
        if record.round > shown:
            show_round(record, total_seconds - seconds)
            shown = record.round
    return shown, total_seconds
