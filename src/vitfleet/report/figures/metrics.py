"""Figures of metrics. The form of a value decides: numbers over rounds, lists as bars, matrices as heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from vitfleet.report.columns import metric_params, metric_title, metric_unit, shown_numbers
from vitfleet.report.figures.types import AxisView, BarChart, Curve, Figure, HeatMap, LineChart, Numbers
from vitfleet.report.runs import RunData, RunGroup
from vitfleet.report.units import PERCENT
from vitfleet.run.records import MetricValues

MEDIAN, LOW, HIGH = "p50", "p10", "p90"  # values of a metric that is a distribution


def metric_figures(run: RunData) -> Iterator[Figure]:
    """Yield the figures of a run's metrics: distributions over rounds, and the last lists and matrices."""
    for metric, rounds in _values_by_metric(run).items():
        measured = {round: values for round, values in rounds.items() if values.get(MEDIAN) is not None}
        if len(measured) > 1:
            yield _distribution(metric, measured)
        for key, value in rounds[max(rounds)].items():
            if _is_matrix(value):
                yield _heat_map(run, metric, key, value)
            elif _is_list(value):
                yield _bars(run, metric, key, value)


def metric_curves(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Return the metrics and values that are curves over rounds: numbers that were measured in several rounds."""
    rounds: dict[tuple[str, str], set[int]] = {}
    for run in (run for group in groups for run in group.runs):
        for record in run.records:
            for metric, values in record.metrics.items():
                for key in shown_numbers(metric, values):
                    rounds.setdefault((metric, key), set()).add(record.round)
    return [name for name, measured in rounds.items() if len(measured) > 1]


def _values_by_metric(run: RunData) -> dict[str, dict[int, MetricValues]]:
    """Return the values of each metric, by round."""
    by_metric: dict[str, dict[int, MetricValues]] = {}
    for record in run.records:
        for metric, values in record.metrics.items():
            by_metric.setdefault(metric, {})[record.round] = values
    return by_metric


def _distribution(metric: str, measured: dict[int, MetricValues]) -> LineChart:
    """Return the median over rounds, with a band from the 10th to the 90th percentile, and the mean."""
    x = list(measured)

    def values(key: str) -> list[Any]:
        return [values.get(key) for values in measured.values()]

    curves = [Curve("median", 0, x, values(MEDIAN), values(LOW), values(HIGH)), Curve("mean", 1, x, values("mean"))]
    return LineChart(
        id=f"metric-{metric}",
        title=f"Distribution: {metric_title(metric)}",
        label=metric_title(metric),
        views=[AxisView("rounds", "round", curves)],
        percent=metric_unit(metric, MEDIAN) is PERCENT,
        note="Band: from the 10th to the 90th percentile.",
    )


def _heat_map(run: RunData, metric: str, key: str, matrix: Sequence[Numbers]) -> HeatMap:
    row_axis, column_axis = metric_params(metric).axes.get(key, ("row", "column"))
    return HeatMap(
        id=f"metric-{metric}-{key}",
        title=metric_title(metric, key).capitalize(),
        values=matrix,
        row_label=row_axis,
        column_label=column_axis,
        rows=_labels(run, row_axis, len(matrix)),
        columns=_labels(run, column_axis, len(matrix[0])),
        percent=metric_unit(metric, key) is PERCENT,
    )


def _bars(run: RunData, metric: str, key: str, values: Numbers) -> BarChart:
    (axis,) = metric_params(metric).axes.get(key, ("index",))
    unit = metric_unit(metric, key)
    scaled = [None if value is None else unit.scale * value for value in values]
    label = unit.heading(key.replace("_", " "))
    return BarChart(
        id=f"metric-{metric}-{key}",
        title=metric_title(metric, key).capitalize(),
        label=label,
        category_label=axis,
        categories=_labels(run, axis, len(values)),
        series=[(label, scaled)],
    )


def _labels(run: RunData, axis: str, count: int) -> list[str]:
    """Return the labels along an axis: names of classes where it is one of classes, else numbers."""
    is_class_axis = axis.endswith("class") and len(run.class_names) == count
    return [str(name) for name in run.class_names] if is_class_axis else [str(index) for index in range(count)]


def _is_list(value: Any) -> TypeGuard[list[float | None]]:
    """Return whether a value is a list of numbers, some of them perhaps missing."""
    return isinstance(value, list) and any(isinstance(item, int | float) for item in value) and not _has_text(value)


def _is_matrix(value: Any) -> TypeGuard[list[list[float | None]]]:
    """Return whether a value is a list of lists of numbers, all of the same length."""
    return isinstance(value, list) and bool(value) and all(map(_is_list, value)) and len({*map(len, value)}) == 1


def _has_text(value: list[Any]) -> bool:
    return any(isinstance(item, str | list) for item in value)
