"""The figures of single runs: partition, masked images, tasks, timeline, metrics, and those that the method declares.

The form of a metric's value decides: numbers over rounds, lists as bars, matrices as heat maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from vitfleet.report.columns import metric_params, metric_title, metric_unit
from vitfleet.report.figures.curves import time_unit
from vitfleet.report.figures.methods import method_figures
from vitfleet.report.figures.types import (
    AxisView,
    BarChart,
    Curve,
    Figure,
    HeatMap,
    ImageFigure,
    LineChart,
    Numbers,
    Timeline,
)
from vitfleet.report.runs import RunData, RunGroup
from vitfleet.report.units import PERCENT
from vitfleet.run.records import MetricValues

LABELLED_CLIENTS = 60  # a larger fleet is sorted by dominant class, which shows its structure, and has no labels
MAX_CLIENT_ROWS = 200  # of a heat map: in a larger fleet, neighbouring clients are averaged
MEDIAN, LOW, HIGH = "p50", "p10", "p90"  # values of a metric that is a distribution


def configuration_figures(group: RunGroup, prefix: str) -> list[Figure]:
    """Return the figures of one configuration, from its first seed; their ids start with ``prefix``."""
    run = group.runs[0]
    candidates = [
        *method_figures(run),
        *metric_figures(run),
        _masked_images(run),
        _task_matrix(run),
        _task_curves(run),
        _timeline(run),
    ]
    return [replace(figure, id=f"{prefix}-{figure.id}") for figure in candidates if figure is not None]


def partition_figures(groups: Sequence[RunGroup]) -> list[Figure]:
    """Return one heat map for every different data partition of the runs."""
    partitions: dict[str, tuple[RunData, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            if run.partition is not None:
                _, labels = partitions.setdefault(run.partition["sha256"], (run, []))
                labels.append(group.label)
    figures: list[Figure] = []
    for number, (run, labels) in enumerate(partitions.values(), start=1):
        assert run.partition is not None
        users = f"Configurations: {', '.join(labels)}." if len(groups) > 1 else ""
        counts = np.asarray(run.partition["counts"], dtype=np.int64)
        figure = partition_heat_map(f"partition-{number}", counts, run.partition["classes"])
        note = f"{figure.note} {users}".strip()
        figures.append(replace(figure, title=f"{figure.title}, seed {run.seed}", note=note))
    return figures


def partition_heat_map(id: str, counts: NDArray[np.int64], class_names: Sequence[str]) -> HeatMap:
    """Return the figure of a partition, from its training images ``[clients, classes]``."""
    clients = len(counts)
    labelled = clients <= LABELLED_CLIENTS
    rows = counts if labelled else _average_neighbours(counts[by_dominant_class(counts)])
    averaged = "; each row is the mean of neighbouring clients" if len(rows) < clients else ""
    empty = int(np.count_nonzero(counts.sum(axis=1) == 0))
    without = f", {empty:,} without images" if empty else ""
    return HeatMap(
        id=id,
        title=f"{int(counts.sum()):,} training images on {clients:,} clients{without}",
        values=rows.tolist(),
        row_label="client" if labelled else "clients, by dominant class",
        column_label="class",
        rows=[str(client) for client in range(clients)] if labelled else [],
        columns=class_names,
        note="" if labelled else f"{clients:,} clients, sorted by dominant class{averaged}.",
        sums_label="images per client",
    )


def by_dominant_class(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the clients sorted by dominant class, then by their images of it; clients without images last.

    Ties between classes are resolved in favour of a class that changes from client to client. With a few images per
    client ties are common, and the first class would look larger than it is.
    """
    clients, classes = counts.shape
    tie_breaker = (np.arange(classes) + np.arange(clients)[:, None]) % classes / (2 * classes)
    sizes = counts.sum(axis=1)
    dominant = np.where(sizes > 0, (counts + tie_breaker).argmax(axis=1), classes)
    return np.lexsort((-sizes, -counts.max(axis=1), dominant)).astype(np.int64)


def _average_neighbours(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    clients = len(counts)
    starts = np.arange(0, clients, -(-clients // MAX_CLIENT_ROWS))
    lengths = np.diff(starts, append=clients)
    means: NDArray[np.float64] = np.add.reduceat(counts, starts, axis=0) / lengths[:, None]
    return means


def _masked_images(run: RunData) -> ImageFigure | None:
    if run.patches is None:
        return None
    kept = 1 - run.config["train"]["mask_ratio"]
    note = "Top: training images of one client. Bottom: the patches that remain. A new mask is drawn in every epoch."
    return ImageFigure("patches", f"Masked training images: {kept:.0%} of the patches", run.patches, note=note)


def _task_matrix(run: RunData) -> HeatMap | None:
    continual = (run.summary or {}).get("continual")
    if not continual:
        return None
    matrix = continual["matrix"]
    common = "incremental_accuracy" in continual
    whose = (
        "Mean over clients, tasks in each client's own order." if not common else "The server's model, of all classes."
    )
    return HeatMap(
        id="tasks",
        title=f"{'' if common else 'Local '}{run.eval_split} accuracy on each task after each task".capitalize(),
        values=matrix,
        row_label="after task",
        column_label="on task",
        rows=[str(task + 1) for task in range(len(matrix))],
        columns=[str(task + 1) for task in range(len(matrix[0]))],
        percent=True,
        note=f"{whose} Right of the diagonal: a task not yet learned.",
    )


def _task_curves(run: RunData) -> LineChart | None:
    tasks = [record.task for record in run.records if record.task]
    if not tasks:
        return None
    learned = [task.task for task in tasks]
    curves = [
        Curve("average accuracy", 0, learned, [task.average_accuracy for task in tasks]),
        Curve("forgetting", 1, learned, [task.forgetting for task in tasks]),
    ]
    if tasks[0].with_task is not None:
        told = [task.with_task.average_accuracy if task.with_task else None for task in tasks]
        curves.append(Curve("average accuracy, the task is told", 2, learned, told))
    view = AxisView("tasks", "number of learned tasks", curves)
    return LineChart("forgetting", "Average accuracy and forgetting", "fraction", [view], percent=True)


def _timeline(run: RunData) -> Timeline | None:
    """Return when each client was busy, by the virtual clock."""
    entries = [client for record in run.records for client in record.clients if client.ended is not None]
    clients = sorted({entry.client for entry in entries})
    if not clients:
        return None
    seconds, unit = time_unit([run])
    row_of = {client: row for row, client in enumerate(clients)}
    intervals = [
        (row_of[entry.client], entry.began / seconds, entry.ended / seconds, entry.failure is None)
        for entry in entries
        if entry.began is not None and entry.ended is not None
    ]
    names = [f"{client} {run.devices[client]}" if run.devices else str(client) for client in clients]
    note = "Download, training and upload of each client. Pale: the update was not used."
    return Timeline("timeline", "Client activity", f"virtual {unit}", names, intervals, note=note)


def metric_figures(run: RunData) -> Iterator[Figure]:
    """Yield the figures of a run's metrics: distributions over rounds, and the last lists and matrices."""
    by_metric: dict[str, dict[int, MetricValues]] = {}
    for record in run.records:
        for metric, values in record.metrics.items():
            by_metric.setdefault(metric, {})[record.round] = values
    for metric, rounds in by_metric.items():
        measured = {round: values for round, values in rounds.items() if values.get(MEDIAN) is not None}
        if len(measured) > 1:
            yield _distribution(metric, measured)
        for key, value in rounds[max(rounds)].items():
            if _is_matrix(value):
                yield _heat_map(run, metric, key, value)
            elif _is_list(value):
                yield _bars(run, metric, key, value)


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
    if not isinstance(value, list) or any(isinstance(item, str | list) for item in value):
        return False
    return any(isinstance(item, int | float) for item in value)


def _is_matrix(value: Any) -> TypeGuard[list[list[float | None]]]:
    """Return whether a value is a list of lists of numbers, all of the same length."""
    return isinstance(value, list) and bool(value) and all(map(_is_list, value)) and len({*map(len, value)}) == 1
