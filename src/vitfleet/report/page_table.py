"""The summary table of the page: one row per configuration, means over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitfleet.report.metric_format import is_fraction, metric_title, shown_numbers
from vitfleet.report.runs import RunGroup, eval_splits
from vitfleet.report.units import format_bytes, format_seconds


@dataclass(frozen=True)
class SummaryColumn:
    """A column: one cell per configuration.

    Attributes
    ----------
    description
        The tooltip of the heading.
    best
        Index of the best configuration; ``None`` if all are equal.
    """

    heading: str
    description: str
    cells: list[str]
    best: int | None


@dataclass(frozen=True)
class _SummaryMetric:
    """A number of ``summary.json``: ``path`` has the names of its tables and its key."""

    heading: str
    description: str
    path: tuple[str, ...]
    format: Callable[[float], str]
    larger_is_better: bool | None


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _accuracy_metrics(split: str) -> tuple[_SummaryMetric, ...]:
    """Return the accuracies; ``split``: what they were measured on."""
    common = f"on the common {split} set, after the last round"
    own = f"clients' own models on their own {split} images, mean over clients"
    return (
        _SummaryMetric(f"{split} accuracy, %", common, ("accuracy", "global"), _percent, True),
        _SummaryMetric(f"local {split} accuracy, %", own, ("accuracy", "local"), _percent, True),
    )


_METRICS = (
    _SummaryMetric(
        "average accuracy, %",
        "mean over all tasks after the last one",
        ("continual", "average_accuracy"),
        "{:.1f}".format,
        True,
    ),
    _SummaryMetric(
        "forgetting, %", "mean loss of accuracy on earlier tasks", ("continual", "forgetting"), "{:.1f}".format, False
    ),
    _SummaryMetric("upload", "per client and round", ("message", "up_bytes"), format_bytes, False),
    _SummaryMetric("download", "per client and round", ("message", "down_bytes"), format_bytes, False),
    _SummaryMetric(
        "trained parameters", "of a client's model", ("client", "trainable_params"), "{:,.0f}".format, False
    ),
    _SummaryMetric(
        "GFLOPs", "per training sample, forward and backward", ("client", "train_gflops"), "{:.3g}".format, False
    ),
    _SummaryMetric("memory", "peak of a client's training", ("client", "peak_memory_bytes"), format_bytes, False),
    _SummaryMetric(
        "virtual time", "of the whole run on the simulated devices", ("total", "virtual_seconds"), format_seconds, False
    ),
    _SummaryMetric("time", "of the whole run on this machine", ("total", "seconds"), format_seconds, False),
)


def summary_columns(groups: Sequence[RunGroup]) -> list[SummaryColumn]:
    """Return the columns for which at least one configuration has a value."""
    columns = []
    for metric in (*_accuracy_metrics(eval_splits(groups)), *_METRICS, *_configured_metrics(groups)):
        values_by_group = [_values(group, metric.path) for group in groups]
        if not any(values_by_group):
            continue
        means = {index: statistics.mean(values) for index, values in enumerate(values_by_group) if values}
        best: int | None = None
        if metric.larger_is_better is not None and len(set(means.values())) > 1:
            best = (max if metric.larger_is_better else min)(means, key=means.__getitem__)
        cells = [_cell(values, metric) for values in values_by_group]
        columns.append(SummaryColumn(metric.heading, metric.description, cells, best))
    return columns


def _configured_metrics(groups: Sequence[RunGroup]) -> list[_SummaryMetric]:
    """Return the numbers of the metrics that the runs were configured with."""
    shown: dict[tuple[str, str], None] = {}
    for summary in (run.summary for group in groups for run in group.runs if run.summary is not None):
        for metric, values in summary.get("metrics", {}).items():
            shown |= dict.fromkeys((metric, key) for key in shown_numbers(metric, values))
    return [_configured_metric(metric, key) for metric, key in shown]


def _configured_metric(metric: str, key: str) -> _SummaryMetric:
    percent = is_fraction(metric, key)
    heading = metric_title(metric, key) + (", %" if percent else "")
    format = _percent if percent else "{:.4g}".format
    return _SummaryMetric(heading, "after the last round", ("metrics", metric, key), format, None)


def _values(group: RunGroup, path: tuple[str, ...]) -> list[float]:
    """Return a number of each finished run; an empty list unless every finished run has it."""
    *tables, key = path
    summaries: list[dict[str, Any]] = [run.summary for run in group.runs if run.summary is not None]
    for table in tables:
        summaries = [summary.get(table) or {} for summary in summaries]
    values = [summary.get(key) for summary in summaries]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _cell(values: list[float], metric: _SummaryMetric) -> str:
    if not values:
        return "–"
    mean = metric.format(statistics.mean(values))
    if len(values) < 2 or metric.path[0] not in {"accuracy", "continual", "metrics"}:
        return mean
    return f"{mean} ± {metric.format(statistics.stdev(values))}"
