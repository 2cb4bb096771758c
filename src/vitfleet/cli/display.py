"""A run in the terminal: a callback of the public API that shows its start, its rounds and its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vitfleet.cli.base import console, say, warn
from vitfleet.config.registry import method_label
from vitfleet.progress import Advance
from vitfleet.report.console.progress import ComparisonClock, RoundDisplay, TerminalProgress
from vitfleet.run.callbacks import Callback
from vitfleet.run.context import RunContext
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState


class TerminalRun(Callback):
    """Shows one run after the other. Outside a run, progress is shown as a bar of its own.

    ``clock`` has the time of all runs of a comparison.
    """

    def __init__(self, clock: ComparisonClock | None = None) -> None:
        self._clock = clock
        self._display: RoundDisplay | None = None

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Show the progress of long work: below the rounds of a run, or by itself."""
        with (self._display or TerminalProgress(console)).task(label, total) as advance:
            yield advance

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Show what is about to run."""
        _show_start(context, state, "" if self._clock is None else f"{self._clock.start_next()}: ")
        self._display = RoundDisplay(console, context.config.rounds, state.round, self._clock)
        self._display.__enter__()
        self._round_started = time.perf_counter()

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        """Show a finished round, and the time since the one before."""
        assert self._display is not None
        now = time.perf_counter()
        self._display.show_round(record, now - self._round_started)
        self._round_started = now

    def on_run_end(self, state: RunState, summary: Mapping[str, Any]) -> None:
        """Take the live display down."""
        self.close()

    def close(self) -> None:
        """Take the live display down, if there is one."""
        if self._display is not None:
            self._display.__exit__(None, None, None)
            self._display = None


def _show_start(context: RunContext, state: RunState, which: str) -> None:
    """Print what is about to run."""
    config, machine, processes = context.config, context.machine, context.processes
    for name in context.data.skipped:
        warn(f"skipped image that cannot be read: {name}")
    precision = "bf16" if machine.bf16 else "fp32"
    shared = f", {processes.size} processes" if processes.size > 1 else ""
    say(
        f"{which}{method_label(config.method.name)} on {context.data.name}: {config.fleet.clients} clients, "
        f"{config.fleet.per_round} per round, {context.params:,} parameters, {machine.device.type}, "
        f"{precision}{shared}",
    )
    if state.stop_reason is not None:
        say(f"this run is finished: it was stopped after round {state.round} ({state.stop_reason})")
    elif state.round == config.rounds:
        say("this run is finished")
    elif state.round:
        say(f"resuming after round {state.round}")
