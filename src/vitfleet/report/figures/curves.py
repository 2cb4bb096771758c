"""The learning curves of a report: one curve per configuration, averaged over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from vitfleet.report.columns import metric_title, metric_unit, shown_numbers
from vitfleet.report.figures.types import AxisView, Curve, LineChart
from vitfleet.report.runs import RunData, RunGroup, eval_splits
from vitfleet.report.units import MEBIBYTE, PERCENT
from vitfleet.run.output.summary import mean_std
from vitfleet.run.records import RoundRecord

_TIME_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

Reader = Callable[[RoundRecord], float | None]
SeriesReader = Callable[[Sequence[RoundRecord]], list[float | None]]


@dataclass(frozen=True)
class _Chart:
    """A line chart of one quantity of the records; ``all_axes``: over every axis, or over rounds only."""

    id: str
    title: str
    label: str
    read: SeriesReader
    percent: bool = False
    all_axes: bool = True
    note: str = ""


def _each(read: Reader) -> SeriesReader:
    return lambda records: [read(record) for record in records]


def _of(part: str, name: str) -> SeriesReader:
    """Return a reader of a number in a part of a record that not every round has."""
    number = attrgetter(f"{part}.{name}")
    return _each(lambda record: number(record) if getattr(record, part) else None)


def _local_accuracy(records: Sequence[RoundRecord]) -> list[float | None]:
    """Return the mean over the clients' last local accuracies, after each round: at the end, that of the summary."""
    last: dict[int, float] = {}
    series: list[float | None] = []
    for record in records:
        last |= record.local_accuracies
        series.append(statistics.mean(last.values()) if record.local_accuracies else None)
    return series


def _metric_chart(metric: str, key: str) -> _Chart:
    def read(record: RoundRecord) -> float | None:
        value = record.metrics.get(metric, {}).get(key)
        return value if isinstance(value, int | float) else None

    title, is_percent = metric_title(metric, key).capitalize(), metric_unit(metric, key) is PERCENT
    return _Chart(f"metric-{metric}-{key}", title, key.replace("_", " "), _each(read), is_percent, all_axes=False)


def _sent(field: str) -> SeriesReader:
    """Return a reader of the MiB that a round's clients sent or received."""
    return _each(lambda record: sum(getattr(client, field) for client in record.clients) / MEBIBYTE)


def _charts(split: str) -> list[_Chart]:
    """Return the charts of the records, in the order of the page; ``split``: what accuracies were measured on."""
    title = split.capitalize()
    common = f"On the common {split} set."
    own = f"Each client's last own model on its own {split} images; mean over all clients that have trained so far."
    learned = "Average accuracy over the learned tasks"
    total = "Sum over the round's clients."
    first = f"{total} A client's first download includes the initial model."
    return [
        _Chart("accuracy", f"{title} accuracy", "accuracy", _of("accuracy", "global_"), True, note=common),
        _Chart("task-accuracy", learned, "accuracy", _of("task", "average_accuracy"), True),
        _Chart("forgetting", "Forgetting", "forgetting", _of("task", "forgetting"), True),
        _Chart("local-accuracy", f"Local {split} accuracy", "accuracy", _local_accuracy, True, note=own),
        _Chart("test-loss", f"{title} loss", "cross-entropy", _of("accuracy", "loss"), note=common),
        _Chart("train-loss", "Training loss", "loss", _each(lambda record: record.loss)),
        _Chart("upload", "Upload per round", "MiB", _sent("up_bytes"), all_axes=False, note=total),
        _Chart("download", "Download per round", "MiB", _sent("down_bytes"), all_axes=False, note=first),
    ]


def comparison_figures(groups: Sequence[RunGroup]) -> list[LineChart]:
    """Return the line charts that compare the configurations."""
    figures = []
    metrics = (_metric_chart(metric, key) for metric, key in _metric_curves(groups))
    for chart in (*_charts(eval_splits(groups)), *metrics):
        if views := list(_views(groups, chart)):
            figures.append(LineChart(chart.id, chart.title, chart.label, views, chart.percent, note=chart.note))
    return figures


def _metric_curves(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Return the metrics and values that are curves over rounds: numbers that were measured in several rounds."""
    rounds: dict[tuple[str, str], set[int]] = {}
    for run in (run for group in groups for run in group.runs):
        for record in run.records:
            for metric, values in record.metrics.items():
                for key in shown_numbers(metric, values):
                    rounds.setdefault((metric, key), set()).add(record.round)
    return [name for name, measured in rounds.items() if len(measured) > 1]


def time_unit(runs: Sequence[RunData]) -> tuple[float, str]:
    """Return the unit of virtual time for these runs: its seconds and its name."""
    longest = max((record.virtual_seconds or 0.0 for run in runs for record in run.records), default=0.0)
    return next((seconds, name) for seconds, name in _TIME_UNITS if longest >= 3 * seconds or seconds == 1)


def _views(groups: Sequence[RunGroup], chart: _Chart) -> Iterator[AxisView]:
    """Yield every configuration's curve over each horizontal axis for which a run has values."""
    seconds, unit = time_unit([run for group in groups for run in group.runs])

    def traffic(record: RoundRecord) -> float:
        return (record.total_up_bytes + record.total_down_bytes) / MEBIBYTE

    def virtual_time(record: RoundRecord) -> float | None:
        return None if record.virtual_seconds is None else record.virtual_seconds / seconds

    axes: list[tuple[str, str, Reader]] = [
        ("rounds", "round", lambda record: record.round),
        ("traffic", "MiB, upload and download of all clients", traffic),
        ("virtual time", f"virtual {unit}", virtual_time),
    ]
    for name, label, read_x in axes if chart.all_axes else axes[:1]:
        curves = [_curve(group, style, read_x, chart.read) for style, group in enumerate(groups)]
        if known := [curve for curve in curves if curve is not None]:
            yield AxisView(name, label, known)


def _curve(group: RunGroup, style: int, read_x: Reader, read_y: SeriesReader) -> Curve | None:
    """Average a configuration's seeds round by round; the band is one standard deviation to each side."""
    by_round: dict[int, list[tuple[float, float]]] = {}
    for run in group.runs:
        for record, y in zip(run.records, read_y(run.records), strict=True):
            x = read_x(record)
            if x is not None and y is not None:
                by_round.setdefault(record.round, []).append((x, y))
    if not by_round:
        return None
    # Unfinished runs differ in length: a mean over fewer seeds would jump where one of them ends.
    seeds = max(len(points) for points in by_round.values())
    complete = [points for _, points in sorted(by_round.items()) if len(points) == seeds]
    xs = [statistics.fmean(x for x, _ in points) for points in complete]
    spreads = [found for points in complete if (found := mean_std(y for _, y in points)) is not None]
    ys = [found.mean for found in spreads]
    low = [found.mean - found.std for found in spreads if found.std is not None]  # empty with a single seed
    high = [found.mean + found.std for found in spreads if found.std is not None]
    return Curve(group.label, style, xs, ys, low, high)
