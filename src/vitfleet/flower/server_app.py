"""Flower's ServerApp: the round loop of a run, on Flower's grid."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.flower.processes import ERROR_FILE
from vitfleet.flower.progress_file import ProgressFile
from vitfleet.run.context import open_run
from vitfleet.run.folder import RunFolder, create, reopen
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord
from vitfleet.system import die_with_parent, return_freed_memory

PATIENCE = 30.0  # seconds in which the process of a server that was killed ends too
app = ServerApp()


class Lines:
    """Says a line of every round: it goes into Flower's log."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Say how a round went."""
        failures = [f"client {entry.client}: {entry.failure}" for entry in record.clients if entry.failure]
        accuracy = record.accuracy.global_ if record.accuracy else None
        shown = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        used = len(record.clients) - len(failures)
        print(f"round {record.round}/{self.rounds}: {used} of {len(record.clients)} replies{shown}, {seconds:.1f} s")
        for failure in failures:
            print(f"  left out, {failure}")


def open_folder(folder: str, preset: str, overrides: str) -> RunFolder:
    """Return the folder of a run to go on with, or of a new one."""
    path = Path(folder) if folder else None
    if path is not None and (path / "config.json").exists():
        return reopen(path, PATIENCE)
    given = [one.strip() for one in overrides.split(";") if one.strip()]
    config = load_config(preset, ["fleet.kind=flower", *given])
    return create(config, path, Path(preset).stem, ["flwr", "run", preset, *given])


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Conduct a run's remaining rounds."""
    die_with_parent()
    return_freed_memory()
    words = context.run_config
    held = open_folder(str(words["folder"]), str(words["preset"]), str(words["overrides"]))
    try:
        play(held, grid)
    except UserError as error:
        write_atomically(held.path / ERROR_FILE, str(error).encode())
        raise


def play(held: RunFolder, grid: Grid) -> None:
    """Play a run to its end, saying a line a round."""
    config = held.config()
    context = open_run(config, held.path, grid=grid)
    print(f"{config.method.name} in {held.path}: {config.rounds - context.round} rounds to go")
    started = time.perf_counter()
    run_rounds(context, Lines(config.rounds), ProgressFile(held.path))
    print(f"finished in {time.perf_counter() - started:.0f} s")
