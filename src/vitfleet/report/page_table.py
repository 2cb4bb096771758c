"""The summary table of the page: one row per configuration, means over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitfleet.report.comparable import best_rows, comparable_rows
from vitfleet.report.metric_format import is_fraction, metric_title, shown_numbers
from vitfleet.report.runs import RunData, RunGroup, all_finished, eval_splits
from vitfleet.report.units import format_bytes, format_seconds, format_target
from vitfleet.run.compare import cost_to_target
from vitfleet.run.summary import summary_so_far


@dataclass(frozen=True)
class SummaryColumn:
    """A column: one cell per configuration.

    Attributes
    ----------
    description
        The tooltip of the heading.
    best
        Indices of the best configurations, among those comparable with them.
    """

    heading: str
    description: str
    cells: list[str]
    best: frozenset[int]


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


def summary_columns(groups: Sequence[RunGroup], target: float | None = None) -> list[SummaryColumn]:
    """Return the columns for which at least one configuration has a value.

    Unfinished runs are counted with the values of their rounds so far.

    Parameters
    ----------
    target
        An accuracy: adds the rounds and the traffic after which it was reached.
    """
    columns = [] if all_finished(groups) else [_rounds_column(groups)]
    accuracies, costs = _accuracy_metrics(eval_splits(groups)), _METRICS
    to_target = () if target is None else _target_metrics(target)
    comparable = comparable_rows(groups)
    summaries = [[_summary(run, target) for run in group.runs if run.summary or run.records] for group in groups]
    for metric in (*accuracies, *to_target, *costs, *_configured_metrics(groups)):
        values_by_group = [_values(group, metric.path) for group in summaries]
        if not any(values_by_group):
            continue
        best = frozenset[int]()
        if metric.larger_is_better is not None:
            best = best_rows(_printed_means(values_by_group, metric), comparable, metric.larger_is_better)
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


def _rounds_column(groups: Sequence[RunGroup]) -> SummaryColumn:
    done = [sum(len(run.records) for run in group.runs) for group in groups]
    planned = [sum(int(run.config["rounds"]) for run in group.runs) for group in groups]
    cells = [f"{count} of {total}" for count, total in zip(done, planned, strict=True)]
    return SummaryColumn("rounds", "finished so far, of all seeds", cells, frozenset())


def _target_metrics(target: float) -> tuple[_SummaryMetric, ...]:
    percent = format_target(target)
    reached = f"until {percent} accuracy on the common images; no value where a seed did not reach it"
    return (
        _SummaryMetric(f"rounds to {percent}", reached, ("to_target", "rounds"), "{:.1f}".format, False),
        _SummaryMetric(
            f"bytes to {percent}",
            f"of all clients, {reached}",
            ("to_target", "bytes"),
            format_bytes,
            False,
        ),
    )


def _summary(run: RunData, target: float | None) -> dict[str, Any]:
    """Return a run's summary, or that of its rounds so far, with what it took to reach a target."""
    summary = summary_so_far(run.records) if run.summary is None else run.summary
    return {**summary, "finished": run.summary is not None, "to_target": cost_to_target(run.path, target)}


def _values(summaries: Sequence[dict[str, Any]], path: tuple[str, ...]) -> list[float]:
    """Return a number of each run; an empty list unless every run, or at least every finished one, has it."""
    *tables, key = path
    found: list[float] = []
    for summary in summaries:
        table: dict[str, Any] = summary
        for name in tables:
            table = table.get(name) or {}
        value = table.get(key)
        if value is not None:
            found.append(value)
        elif summary["finished"] or path[0] == "to_target":
            return []
    return found


def _printed_means(values_by_group: Sequence[list[float]], metric: _SummaryMetric) -> list[float | None]:
    """Return the mean of each row; means that are printed alike are equal."""
    means = [statistics.mean(values) if values else None for values in values_by_group]
    first: dict[str, float] = {}
    return [None if mean is None else first.setdefault(metric.format(mean), mean) for mean in means]


def _cell(values: list[float], metric: _SummaryMetric) -> str:
    if not values:
        return "–"
    mean = metric.format(statistics.mean(values))
    if len(values) < 2 or metric.path[0] not in {"accuracy", "continual", "metrics", "to_target"}:
        return mean
    return f"{mean} ± {metric.format(statistics.stdev(values))}"
