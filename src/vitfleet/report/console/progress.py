"""Progress in the terminal: a live display, or plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitfleet.progress import Advance
from vitfleet.report.columns import metric_text, metric_title
from vitfleet.report.units import UNKNOWN, format_bytes, format_fraction, format_seconds
from vitfleet.run.records import UNAVAILABLE, RoundRecord
from vitfleet.run.round_plan import TOO_LATE

LIVE_ROUNDS = 8  # rounds in the live table
PLAIN_LINES = 20  # about this many lines for a whole run, where the output is not a terminal
_HEADINGS = ("round", "accuracy", "local", "loss", "upload", "download", "time")


class TerminalProgress:
    """Shows a long operation as a bar; prints nothing where the output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Show one task until it ends."""
        if not self.console.is_terminal:
            yield lambda units: None
            return
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        left = TextColumn("left"), TimeRemainingColumn(compact=True)
        with Progress(*columns, *left, console=self.console, transient=True, speed_estimate_period=3600) as bar:
            task = bar.add_task(label, total=total)
            yield lambda units: bar.advance(task, units)


@dataclass
class ComparisonClock:
    """How long several runs, one after the other, will still take."""

    expected: Sequence[float]  # of each run; only their proportions count once a part is done
    seeds: Sequence[int]  # of each run
    in_seconds: bool = True  # False if the work is expected in another measure, such as rounds
    current: int = -1  # the run that is going on; −1 before the first
    started: float = field(default_factory=time.perf_counter)

    def start_next(self) -> str:
        """Go on to the next run, and return which it is: ``run 3 of 8, seed 1``."""
        self.current += 1
        return f"run {self.current + 1} of {len(self.expected)}, seed {self.seeds[self.current]}"

    def seconds_left(self, share: float, now: float | None = None) -> float | None:
        """Return the seconds that all runs will still take when a share of the current one is done, if known."""
        elapsed = (time.perf_counter() if now is None else now) - self.started
        done = sum(self.expected[: self.current]) + share * self.expected[self.current]
        total = sum(self.expected)
        if not done:
            return total if self.in_seconds else None
        return elapsed * (total - done) / done


class RoundDisplay:
    """Shows the last rounds of a run, its progress and the remaining time.

    ``done`` of all ``rounds`` were finished before this process started. ``clock`` has the time of all runs if this is
    one of several.
    """

    def __init__(self, console: Console, rounds: int, done: int, clock: ComparisonClock | None = None) -> None:
        self.console, self.clock = console, clock
        self.rounds, self.done = rounds, done
        self.warned: set[str] = set()  # metrics that cannot be measured
        self.recent: list[tuple[RoundRecord, float]] = []
        self.started = time.perf_counter()
        left = TextColumn("left"), TimeRemainingColumn(compact=True)
        columns = TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=40), *left
        # Rounds can be long: the speed is estimated from all of them.
        self.rounds_bar = Progress(*columns, console=console, speed_estimate_period=24 * 3600)
        self.rounds_task = self.rounds_bar.add_task("rounds", total=rounds, completed=done)
        task = TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=20)
        self.round_bar = Progress(*task, console=console)
        self.live: Live | None = None

    def __enter__(self) -> RoundDisplay:
        if self.console.is_terminal:
            self.live = Live(self._live_table(), console=self.console, refresh_per_second=4)
            self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*exception)

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Show the progress within a round."""
        task = self.round_bar.add_task(label, total=total)
        try:
            yield lambda units: self.round_bar.advance(task, units)
        finally:
            self.round_bar.remove_task(task)

    def show_round(self, record: RoundRecord, seconds: float) -> None:
        """Show a finished round."""
        self.recent = [*self.recent, (record, seconds)][-LIVE_ROUNDS:]
        self.rounds_bar.update(self.rounds_task, completed=record.round)
        for client in record.clients:
            # Clients that miss a simulated deadline are expected; they are in the records only.
            if client.failure is not None and not client.failure.startswith(TOO_LATE):
                self._print(f"round {record.round}: client {client.client} left out, {client.failure}")
        for metric in sorted({name for name, values in record.metrics.items() if UNAVAILABLE in values} - self.warned):
            self.warned.add(metric)
            self._print(f"{metric_title(metric)}: {metric_text(metric, record.metrics[metric])}")
        if record.task is not None:
            accuracy = format_fraction(record.task.average_accuracy)
            forgetting = format_fraction(record.task.forgetting)
            self._print(f"task {record.task.task} learned: average accuracy {accuracy}, forgetting {forgetting}")
        if self.live is not None:
            self.live.update(self._live_table())
        elif record.round == self.rounds or record.round % max(1, self.rounds // PLAIN_LINES) == 0:
            self._print(self._line(record))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _line(self, record: RoundRecord) -> str:
        rounds_here = record.round - self.done
        left = (time.perf_counter() - self.started) / max(1, rounds_here) * (self.rounds - record.round)
        in_all = f", {self._seconds_left(record.round)} in all" if self.clock else ""
        _, accuracy, local, loss, upload, download = _cells(record)
        return (
            f"round {record.round}/{self.rounds}  accuracy {accuracy} (local {local})  loss {loss}  "
            f"upload {upload}  download {download}  {left:.0f} s left{in_all}"
        )

    def _seconds_left(self, round: int) -> str:
        assert self.clock is not None
        left = self.clock.seconds_left((round - self.done) / max(1, self.rounds - self.done))
        return "? s" if left is None else format_seconds(left)

    def _live_table(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in _HEADINGS:
            table.add_column(heading, justify="right", style="bold" if heading == "accuracy" else "")
        for record, seconds in self.recent:
            table.add_row(*_cells(record), f"{seconds:.1f} s")
        if self.clock is None:
            return Group(table, self.rounds_bar, self.round_bar)
        left = self._seconds_left(self.recent[-1][0].round if self.recent else self.done)
        count = len(self.clock.expected)
        overall = Text(f"run {self.clock.current + 1} of {count}, all runs: {left} left")
        return Group(table, self.rounds_bar, overall, self.round_bar)


def _cells(record: RoundRecord) -> list[str]:
    """Return a round's cells under the headings, without the time."""
    accuracy = record.accuracy
    return [
        str(record.round),
        format_fraction(record.task.average_accuracy if record.task else accuracy.global_ if accuracy else None),
        format_fraction(accuracy.local if accuracy else None),
        UNKNOWN if record.loss is None else f"{record.loss:.3f}",
        format_bytes(sum(client.up_bytes for client in record.clients)),
        format_bytes(sum(client.down_bytes for client in record.clients)),
    ]
