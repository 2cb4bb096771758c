"""The summary table of a report: one row a configuration, figures over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitfleet.report.runs import Group
from vitfleet.report.terminal import human_bytes, human_seconds


@dataclass(frozen=True)
class Column:
    """A column: its cells, one a configuration, and which of them is the best."""

    name: str
    meaning: str
    cells: list[str]
    best: int | None


@dataclass(frozen=True)
class _Quantity:
    name: str
    meaning: str
    path: tuple[str, str]
    write: Callable[[float], str]
    larger_is_better: bool


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


_QUANTITIES = (
    _Quantity("accuracy, %", "on the common test set, after the last round", ("accuracy", "global"), _percent, True),
    _Quantity("at home, %", "clients' own models on their own test images", ("accuracy", "local"), _percent, True),
    _Quantity("tasks, %", "mean accuracy over learned tasks", ("continual", "average_accuracy"), "{:.1f}".format, True),
    _Quantity("forgetting, %", "lost of tasks learned before", ("continual", "forgetting"), "{:.1f}".format, False),
    _Quantity("up", "a client's message to the server", ("message", "up_bytes"), human_bytes, False),
    _Quantity("down", "the server's message to a client", ("message", "down_bytes"), human_bytes, False),
    _Quantity("trained", "parameters that a client trains", ("client", "trainable_params"), "{:,.0f}".format, False),
    _Quantity("GFLOP", "a sample, forward and backward", ("client", "train_gflops"), "{:.3g}".format, False),
    _Quantity("memory", "a client's peak while it trains", ("client", "peak_memory_bytes"), human_bytes, False),
    _Quantity(
        "virtual time", "of the whole run, on the fleet's devices", ("total", "virtual_seconds"), human_seconds, False
    ),
    _Quantity("time", "of the whole run, here", ("total", "seconds"), human_seconds, False),
)


def columns_of(groups: Sequence[Group]) -> list[Column]:
    """Return the columns that at least one configuration has something for."""
    columns = []
    for quantity in _QUANTITIES:
        found = [_values(group, quantity.path) for group in groups]
        if not any(found):
            continue
        means = {place: statistics.mean(values) for place, values in enumerate(found) if values}
        choose = max if quantity.larger_is_better else min
        best = choose(means, key=means.__getitem__) if len(set(means.values())) > 1 else None
        columns.append(Column(quantity.name, quantity.meaning, [_cell(values, quantity) for values in found], best))
    return columns


def _values(group: Group, path: tuple[str, str]) -> list[float]:
    """Return a figure of each finished run; none unless every finished run has it."""
    table, key = path
    summaries = [run.summary for run in group.runs if run.summary is not None]
    values = [(summary.get(table) or {}).get(key) for summary in summaries]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _cell(values: list[float], quantity: _Quantity) -> str:
    if not values:
        return "–"
    mean = quantity.write(statistics.mean(values))
    if len(values) < 2 or quantity.path[0] not in {"accuracy", "continual"}:
        return mean
    return f"{mean} ± {quantity.write(statistics.stdev(values))}"
