"""The learning curves of a report: one curve per configuration, averaged over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitfleet.report.columns import is_fraction, metric_title
from vitfleet.report.figures.metrics import metric_curves
from vitfleet.report.figures.types import AxisView, Curve, LineChart
from vitfleet.report.runs import RunData, RunGroup, eval_splits
from vitfleet.run.records import RoundRecord

MEGABYTE = 1e6
_TIME_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

Reader = Callable[[RoundRecord], float | None]
SeriesReader = Callable[[Sequence[RoundRecord]], list[float | None]]


@dataclass(frozen=True)
class _Axis:
    """A horizontal axis."""

    name: str
    label: str
    read: Reader


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


def _of_accuracy(name: str) -> SeriesReader:
    return _each(lambda record: getattr(record.accuracy, name) if record.accuracy else None)


def _local_accuracy(records: Sequence[RoundRecord]) -> list[float | None]:
    """Return the mean over the clients' last local accuracies, after each round: at the end, that of the summary."""
    last: dict[int, float] = {}
    series: list[float | None] = []
    for record in records:
        measured = {client.client: client.accuracy for client in record.clients if client.accuracy is not None}
        last |= measured
        series.append(statistics.mean(last.values()) if measured else None)
    return series


def _of_task(name: str) -> SeriesReader:
    return _each(lambda record: getattr(record.task, name) if record.task else None)


def _of_metric(metric: str, key: str) -> SeriesReader:
    def read(record: RoundRecord) -> float | None:
        value = record.metrics.get(metric, {}).get(key)
        return value if isinstance(value, int | float) else None

    return _each(read)


def _metric_chart(metric: str, key: str) -> _Chart:
    label, percent = key.replace("_", " "), is_fraction(metric, key)
    title = metric_title(metric, key).capitalize()
    return _Chart(f"metric-{metric}-{key}", title, label, _of_metric(metric, key), percent, all_axes=False)


def _upload(record: RoundRecord) -> float:
    return sum(client.up_bytes for client in record.clients) / MEGABYTE


def _download(record: RoundRecord) -> float:
    return sum(client.down_bytes for client in record.clients) / MEGABYTE


def _traffic(record: RoundRecord) -> float:
    return (record.total_up_bytes + record.total_down_bytes) / MEGABYTE


_ROUNDS = _Axis("rounds", "round", lambda record: record.round)
_TASK_CHARTS = (
    _Chart("task-accuracy", "Average accuracy over the learned tasks", "accuracy", _of_task("average_accuracy"), True),
    _Chart("forgetting", "Forgetting", "forgetting", _of_task("forgetting"), True),
)
_TRAINING_CHARTS = (
    _Chart("train-loss", "Training loss", "loss", _each(lambda record: record.loss)),
    _Chart("upload", "Upload per round", "MB", _each(_upload), all_axes=False, note="Sum over the round's clients."),
    _Chart(
        "download",
        "Download per round",
        "MB",
        _each(_download),
        all_axes=False,
        note="Sum over the round's clients. A client's first download includes the initial model.",
    ),
)


def _charts(split: str) -> list[_Chart]:
    """Return the charts of the records, in the order of the page; ``split``: what accuracies were measured on."""
    common = f"On the common {split} set."
    accuracy, title = _of_accuracy("global_"), f"{split.capitalize()} accuracy"
    own_images = (
        f"Each client's last own model on its own {split} images; mean over all clients that have trained so far."
    )
    local_title = f"Local {split} accuracy"
    loss_title = f"{split.capitalize()} loss"
    return [
        _Chart("accuracy", title, "accuracy", accuracy, True, note=common),
        *_TASK_CHARTS,
        _Chart("local-accuracy", local_title, "accuracy", _local_accuracy, True, note=own_images),
        _Chart("test-loss", loss_title, "cross-entropy", _of_accuracy("loss"), note=common),
        *_TRAINING_CHARTS,
    ]


def comparison_figures(groups: Sequence[RunGroup]) -> list[LineChart]:
    """Return the line charts that compare the configurations."""
    axes = _axes(groups)
    figures = []
    for chart in (
        *_charts(eval_splits(groups)),
        *(_metric_chart(metric, key) for metric, key in metric_curves(groups)),
    ):
        views = [_view(groups, axis, chart.read) for axis in (axes if chart.all_axes else axes[:1])]
        known = [view for view in views if view is not None]
        if known:
            figures.append(LineChart(chart.id, chart.title, chart.label, known, chart.percent, chart.note))
    return figures


def time_unit(runs: Sequence[RunData]) -> tuple[float, str]:
    """Return the unit of virtual time for these runs: its seconds and its name."""
    longest = max((record.virtual_seconds or 0.0 for run in runs for record in run.records), default=0.0)
    return next((seconds, name) for seconds, name in _TIME_UNITS if longest >= 3 * seconds or seconds == 1)


def _axes(groups: Sequence[RunGroup]) -> list[_Axis]:
    seconds, unit = time_unit([run for group in groups for run in group.runs])

    def virtual_time(record: RoundRecord) -> float | None:
        return None if record.virtual_seconds is None else record.virtual_seconds / seconds

    return [
        _ROUNDS,
        _Axis("traffic", "MB, upload and download of all clients", _traffic),
        _Axis("virtual time", f"virtual {unit}", virtual_time),
    ]


def _view(groups: Sequence[RunGroup], axis: _Axis, read: SeriesReader) -> AxisView | None:
    """Return every configuration's curve over an axis; ``None`` if no run has values for both."""
    curves = [_curve(group, style, axis.read, read) for style, group in enumerate(groups)]
    known = [curve for curve in curves if curve is not None]
    return AxisView(axis.name, axis.label, known) if known else None


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
    xs = [statistics.mean(x for x, _ in points) for points in complete]
    ys = [statistics.mean(y for _, y in points) for points in complete]
    if seeds < 2:
        return Curve(group.label, style, xs, ys)
    deviations = [statistics.stdev(y for _, y in points) for points in complete]
    low = [mean - deviation for mean, deviation in zip(ys, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(ys, deviations, strict=True)]
    return Curve(group.label, style, xs, ys, low, high)
