"""Flower's ServerApp: the round loop of a run, on Flower's grid."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from vitfleet.config import load_config
from vitfleet.config.registry import method_label
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import CONFIG_FILE, write_atomically
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.flower.server.progress_file import ERROR_FILE, ProgressFile
from vitfleet.run.callbacks import Callback
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import RunFolder, create_run_folder, open_run_folder
from vitfleet.run.records import RoundRecord
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.system import die_with_parent, return_freed_memory

LOCK_SECONDS = 30.0  # within which the process of a server that was killed ends and releases the run's folder
app = ServerApp()


class RoundPrinter(Callback):
    """Prints one line per round, which goes to Flower's log."""

    def __init__(self, config: Config) -> None:
        self.rounds, self.name_of = config.rounds, config.fleet.name_of
        self.round_started = time.perf_counter()

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Start the clock of the first round."""
        self.round_started = time.perf_counter()

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        """Print the outcome of a round, and the failure of each client that was skipped."""
        now = time.perf_counter()
        seconds, self.round_started = now - self.round_started, now
        failures = [
            f"client {self.name_of(client.client)}: {client.failure}" for client in record.clients if client.failure
        ]
        accuracy = record.accuracy.global_ if record.accuracy else None
        shown = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        used = len(record.clients) - len(failures)
        print(f"round {record.round}/{self.rounds}: {used} of {len(record.clients)} replies{shown}, {seconds:.1f} s")
        for failure in failures:
            print(f"  skipped {failure}")


def open_folder(folder: str, preset: str, overrides: str) -> RunFolder:
    """Return the folder of a run to resume, or of a new one."""
    path = Path(folder) if folder else None
    if path is not None and (path / CONFIG_FILE).exists():
        return open_run_folder(path, LOCK_SECONDS)
    keys = [override.strip() for override in overrides.split(";") if override.strip()]
    config = load_config(preset, ["fleet.kind=flower", *keys])
    return create_run_folder(config, path, Path(preset).stem, ["flwr", "run", preset, *keys])


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the remaining rounds of a run."""
    die_with_parent()
    return_freed_memory()
    settings = context.run_config
    folder = open_folder(str(settings["folder"]), str(settings["preset"]), str(settings["overrides"]))
    try:
        run_on_grid(folder, grid)
    except UserError as error:
        write_atomically(folder.path / ERROR_FILE, str(error).encode())
        raise


def run_on_grid(folder: RunFolder, grid: Grid) -> None:
    """Run the remaining rounds on Flower's grid, and print one line per round."""
    config = folder.config()
    context = open_run(config, folder.path, make_fleet=fleet_factory(grid))
    state = load_state(context)
    print(f"{method_label(config.method.name)} in {folder.path}: {config.rounds - state.round} rounds left")
    started = time.perf_counter()
    run_rounds(context, state, [RoundPrinter(config)], ProgressFile(folder.path))
    print(f"finished in {time.perf_counter() - started:.0f} s")
