"""What a run looks like in a terminal: a live display for people, plain lines for pipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from vitfleet.config.registry import METHODS
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES
from vitfleet.costs.report import CostReport
from vitfleet.progress import Advance
from vitfleet.run.callbacks import Callback
from vitfleet.run.compare import Comparison, Row
from vitfleet.run.context import RunContext
from vitfleet.run.records import RoundRecord
from vitfleet.run.round_plan import TOO_LATE
from vitfleet.run.state import RunState
from vitfleet.train.execution import ExecutionSummary

SHOWN_ROUNDS = 8
PLAIN_LINES = 20  # a long run says about this many lines into a pipe


class TerminalProgress:
    """Shows long work as a bar; in a pipe, says nothing."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Show one task until it ends."""
        if not self.console.is_terminal:
            yield lambda units: None
            return
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda units: bar.advance(task, units)


class RoundDisplay(Callback):
    """Follows a run: its last rounds, how far it is, and the time left."""

    def __init__(self, console: Console, rounds: int, done: int) -> None:
        self.console = console
        self.rounds = rounds
        self.done = done
        self.recent: list[tuple[RoundRecord, float]] = []
        self.started = self.round_started = time.perf_counter()
        self.bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=40),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            speed_estimate_period=24 * 3600,  # a round may take long: never forget the ones before
        )
        self.rounds_task = self.bar.add_task("rounds", total=rounds, completed=done)
        self.within = Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=20), console=console
        )
        self.live: Live | None = None

    def __enter__(self) -> RoundDisplay:
        if self.console.is_terminal:
            self.live = Live(self._picture(), console=self.console, refresh_per_second=4)
            self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*exception)

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        """Show how far a round is, below the rounds."""
        task = self.within.add_task(label, total=total)
        try:
            yield lambda units: self.within.advance(task, units)
        finally:
            self.within.remove_task(task)

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Start the clock of the first round."""
        self.round_started = time.perf_counter()

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        """Show a finished round, and the time since the one before."""
        now = time.perf_counter()
        self.show_round(record, now - self.round_started)
        self.round_started = now

    def show_round(self, record: RoundRecord, seconds: float) -> None:
        """Show a finished round."""
        self.recent = [*self.recent, (record, seconds)][-SHOWN_ROUNDS:]
        self.bar.update(self.rounds_task, completed=record.round)
        for entry in record.clients:
            # Who is late by schedule is in the records; only what is amiss is said aloud.
            if entry.failure is not None and not entry.failure.startswith(TOO_LATE):
                text = f"round {record.round}: client {entry.client} left out, {entry.failure}"
                self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        if record.task is not None:
            accuracy, lost = _share(record.task.average_accuracy), _share(record.task.forgetting)
            text = f"task {record.task.task} learned: average accuracy {accuracy}, forgetting {lost}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        if self.live is not None:
            self.live.update(self._picture())
        elif record.round == self.rounds or record.round % max(1, self.rounds // PLAIN_LINES) == 0:
            self.console.print(self._line(record), highlight=False, soft_wrap=True)

    def _line(self, record: RoundRecord) -> str:
        played = record.round - self.done
        left = (time.perf_counter() - self.started) / max(1, played) * (self.rounds - record.round)
        cells = _cells(record)
        return (
            f"round {record.round}/{self.rounds}  accuracy {cells[1]} (local {cells[2]})  loss {cells[3]}  "
            f"up {cells[4]}  down {cells[5]}  {left:.0f} s left"
        )

    def _picture(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("round", "accuracy", "local", "loss", "up", "down", "time"):
            table.add_column(heading, justify="right", style="bold" if heading == "accuracy" else "")
        for record, seconds in self.recent:
            table.add_row(*_cells(record), f"{seconds:.1f} s")
        return Group(table, self.bar, self.within)


def _cells(record: RoundRecord) -> list[str]:
    accuracy = record.accuracy
    return [
        str(record.round),
        _share(record.task.average_accuracy if record.task else accuracy.global_ if accuracy else None),
        _share(accuracy.local if accuracy else None),
        "–" if record.loss is None else f"{record.loss:.3f}",
        human_bytes(sum(entry.up_bytes for entry in record.clients)),
        human_bytes(sum(entry.down_bytes for entry in record.clients)),
    ]


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def human_bytes(count: float) -> str:
    """Say a number of bytes for people: ``18.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def human_count(count: float) -> str:
    """Say a large number for people: ``85.9 M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def human_seconds(seconds: float) -> str:
    """Say a duration for people: ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def cost_table(sheets: Sequence[CostReport]) -> Table:
    """Return what methods cost a client, a row a method."""
    caption = (
        "a sample: GMAC forward, GFLOP forward and backward, ratio to full training · up, down: a round's messages"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("", no_wrap=True, style="bold")
    for heading in ("GMAC", "GFLOP", "ratio", "trained", "memory", "up", "down", "once"):
        table.add_column(heading, justify="right", no_wrap=True)
    for sheet in sheets:
        table.add_row(
            sheet.method,
            f"{sheet.forward_gmac:#.3g}",
            f"{sheet.train_gflops:#.3g}",
            f"{sheet.train_ratio_to_full:.2f}",
            human_count(sheet.trainable_params),
            human_bytes(sheet.peak_memory_bytes),
            human_bytes(sheet.up_bytes),
            human_bytes(sheet.down_bytes),
            human_bytes(sheet.first_bytes),
        )
    return table


def device_table(sheet: CostReport) -> Table:
    """Return what a method's round takes on each kind of device."""
    title = f"{sheet.method}: a round of {sheet.samples:,} images, {sheet.round_gflops:,.3g} GFLOP"
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_column("", no_wrap=True, style="bold")
    for heading in ("a round takes", "memory", "MB a day"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in sheet.devices.items():
        fits = "fits" if found["fits_memory"] else "too small"
        day = f"{found['megabytes_a_day']:,.0f}" if found["fits_memory"] else "–"
        table.add_row(HARDWARE_PROFILES[name].title, human_seconds(found["round_seconds"]), fits, day)
    return table


def compare_table(comparison: Comparison) -> Table:
    """Return what a comparison's configurations reached, a row each."""
    rows, target = comparison.rows, comparison.target
    if all("continual" in summary for row in rows for summary in row.summaries):
        return continual_table(rows)
    virtual = any(row.mean("total", "virtual_seconds") is not None for row in rows)
    caption = "accuracy: common test set · at home: clients' own models and test images"
    headings = ["accuracy", "at home"]
    if target is not None:
        caption += (
            f" · until {target:.0%} was reached: rounds, bytes of all clients{', virtual time' if virtual else ''}"
        )
        headings += [f"→ {target:.0%}", "bytes", *(["virtual"] if virtual else [])]
    table = _table(caption, headings)
    for row in rows:
        cells = [_percent(row, "global"), _percent(row, "local")]
        if target is not None:
            cells += [_say(row, "to_target", "rounds", "{:.3g}".format), _say(row, "to_target", "bytes", human_bytes)]
            cells += [_say(row, "to_target", "virtual_seconds", human_seconds)] if virtual else []
        table.add_row(row.name, *cells)
    return table


def costs_table(rows: Sequence[Row]) -> Table:
    """Return what a comparison's configurations cost, a row each."""
    virtual = any(row.mean("total", "virtual_seconds") is not None for row in rows)
    caption = "a client's message up and down, its parameters that train, operations a sample, memory of a step"
    if virtual:
        caption += " · virtual: the whole run on the fleet's devices"
    table = _table(caption, ["up", "down", "trained", "GFLOP", "memory", *(["virtual"] if virtual else []), "time"])
    for row in rows:
        table.add_row(
            row.name,
            _say(row, "message", "up_bytes", human_bytes),
            _say(row, "message", "down_bytes", human_bytes),
            _say(row, "client", "trainable_params", human_count),
            _say(row, "client", "train_gflops", "{:.2g}".format),
            _say(row, "client", "peak_memory_bytes", human_bytes),
            *([_say(row, "total", "virtual_seconds", human_seconds)] if virtual else []),
            _say(row, "total", "seconds", "{:.0f} s".format),
        )
    return table


def _table(caption: str, headings: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("", no_wrap=True, style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _say(row: Row, table: str, key: str, write: Callable[[float], str]) -> str:
    mean = row.mean(table, key)
    return "–" if mean is None else write(mean)


def continual_table(rows: Sequence[Row]) -> Table:
    """Return a comparison of runs of tasks as a table: what was learned, what forgotten."""
    caption = (
        "accuracy: mean over all tasks after the last, clients' own models and test images · "
        "backward, forward: transfer · up, down: a client's message"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), caption=caption, caption_justify="left")
    table.add_column("", no_wrap=True, style="bold")
    for heading in ("accuracy", "forgetting", "backward", "forward", "up", "down", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        figures = ("average_accuracy", "forgetting", "backward_transfer", "forward_transfer")
        table.add_row(
            row.name,
            *(_percent(row, figure, "continual", 1) for figure in figures),
            human_bytes(row.mean("message", "up_bytes") or 0),
            human_bytes(row.mean("message", "down_bytes") or 0),
            f"{row.mean('total', 'seconds'):.0f} s",
        )
    return table


def _percent(row: Row, key: str, table: str = "accuracy", scale: float = 100) -> str:
    mean, spread = row.mean(table, key), row.spread(table, key)
    if mean is None:
        return "–"
    return f"{scale * mean:.1f}{'' if spread is None else f' ± {scale * spread:.1f}'} %"


def _common(accuracy: dict[str, Any]) -> str:
    if accuracy["global"] is None:
        return "–"
    return f"{accuracy['global']:.2%} (best {accuracy['best']:.2%})"


def _local(accuracy: dict[str, Any]) -> str:
    if accuracy["local"] is None:
        return "–"
    return f"{accuracy['local']:.2%}, mean of {accuracy['local_clients']} clients"


def _accuracies(summary: dict[str, Any]) -> dict[str, str]:
    """Return the rows on accuracy: of a run of tasks, what was learned and what forgotten, in percent already."""
    accuracy, continual = summary["accuracy"], summary.get("continual")
    if continual is None:
        return {
            "accuracy, common test set": _common(accuracy),
            "accuracy, clients at home": _local(accuracy),
        }
    names = {
        "average_accuracy": "average accuracy, all tasks",
        "forgetting": "forgetting",
        "backward_transfer": "transfer, backward",
        "forward_transfer": "transfer, forward",
    }
    return {title: f"{continual[name]:.2f} %" for name, title in names.items() if continual[name] is not None}


def _client_metrics(summary: dict[str, Any]) -> dict[str, str]:
    """Return the rows on the numbers that the method's clients report; a warning only where there is one."""
    values = summary.get("client_metrics", {})
    declared = METHODS[summary["method"]].target.client_metrics if values else ()
    return {
        metric.description: f"{values[metric.name]:,}{' (warning)' if metric.warning else ''}"
        for metric in declared
        if metric.name in values and (values[metric.name] or not metric.warning)
    }


def _warm_up(total: dict[str, Any]) -> str:
    seconds = total.get("warm_up_seconds")
    return f", {seconds:.1f} s of it warm-up" if seconds else ""


def summary_table(summary: dict[str, Any], title: str) -> Table:
    """Return a run's summary as a table."""
    table = Table(title=title or None, title_justify="left", show_header=False)
    message, total, client = (summary[key] for key in ("message", "total", "client"))
    rows = {
        "method": summary["method"],
        "rounds": f"{summary['rounds']}, in {total['seconds']:.1f} s{_warm_up(total)}",
        **_accuracies(summary),
        **_client_metrics(summary),
        "a client's message up": human_bytes(message["up_bytes"]),
        "a client's message down": human_bytes(message["down_bytes"]),
        "all messages up / down": f"{human_bytes(total['up_bytes'])} / {human_bytes(total['down_bytes'])}",
        "parameters, trained on a client": f"{client['params']:,}, {client['trainable_params']:,}",
        "training on a client, a sample": f"{client['train_gflops']:.3g} GFLOPs",
    }
    if client.get("peak_memory_bytes"):
        rows["memory of training on a client"] = human_bytes(client["peak_memory_bytes"])
    if total.get("virtual_seconds") is not None:
        rows["virtual time on the fleet's devices"] = human_seconds(total["virtual_seconds"])
    if total["failures"]:
        rows["replies left out"] = f"{total['failures']} of {total['participations']}"
    if (execution := summary.get("execution")) and execution["runner"] != "none":
        rows["execution of training steps"] = str(ExecutionSummary(**execution))
    if stopped := summary.get("stopped"):
        rows["stopped early"] = f"after round {stopped['round']}: {stopped['reason']}"
    if best := summary.get("best_model"):
        rows["best model"] = f"{best['monitor']} {best['value']:.4g} in round {best['round']}"
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
