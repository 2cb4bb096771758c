"""Evaluations of models as tables and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from rich.table import Table

from vitfleet.files import make_folder, write_atomically
from vitfleet.inference.evaluate import Evaluation
from vitfleet.inference.task_matrix import TaskMatrix
from vitfleet.report.console.results import plain_table
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.types import AxisView, BarChart, Curve, Figure, HeatMap, LineChart
from vitfleet.report.units import UNKNOWN
from vitfleet.run.output.summary import mean_std

CLASSES_SHOWN = 20  # rows of the table of classes; files have all


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Return one row per model, and their mean if there are several."""
    table = plain_table(["images", "accuracy", "loss", "calibration error"], names="model", padding=2)
    for evaluation in evaluations:
        loss = UNKNOWN if evaluation.loss is None else f"{evaluation.loss:.3f}"
        error = f"{evaluation.calibration_error:.4f}"
        table.add_row(evaluation.model, f"{evaluation.images:,}", f"{evaluation.accuracy:.2%}", loss, error)
    accuracy = mean_std(evaluation.accuracy for evaluation in evaluations)
    error_mean = mean_std(evaluation.calibration_error for evaluation in evaluations)
    if accuracy is not None and accuracy.std is not None and error_mean is not None:
        table.add_row("mean", "", f"{accuracy.mean:.2%} ± {accuracy.std:.2%}", "", f"{error_mean.mean:.4f}")
    return table


def class_table(evaluation: Evaluation) -> Table:
    """Return the accuracy of each class with its images, the lowest first, and what it is mistaken for most often."""
    names = list(evaluation.class_accuracy)
    accuracies = enumerate(evaluation.class_accuracy.values())
    measured = sorted((accuracy, index) for index, accuracy in accuracies if accuracy is not None)
    lowest = f"the {CLASSES_SHOWN} lowest of {len(measured)} classes" if len(measured) > CLASSES_SHOWN else None
    table = plain_table(["images", "accuracy", "most often mistaken for"], names="class", padding=2, caption=lowest)
    table.columns[-1].justify = "left"
    for accuracy, index in measured[:CLASSES_SHOWN]:
        row = evaluation.confusion[index]
        mistakes = {names[other]: count for other, count in enumerate(row) if other != index and count}
        worst = max(mistakes.items(), key=itemgetter(1), default=None)
        mistaken = "" if worst is None else f"{worst[0]} ({worst[1]})"
        table.add_row(names[index], f"{sum(row):,}", f"{accuracy:.2%}", mistaken)
    return table


def task_matrix_table(matrix: TaskMatrix) -> Table:
    """Return the accuracies after each task, means over clients, and the metrics that follow from them."""
    known = {name: value for name, value in matrix.metrics._asdict().items() if value is not None}
    caption = " · ".join(f"{name.replace('_', ' ')} {value:.2%}" for name, value in known.items())
    rows = matrix.means()
    headings = [f"on task {task}" for task in range(1, len(rows) + 1)]
    table = plain_table(headings, names="after task", padding=2, caption=caption)
    for task, row in enumerate(rows, start=1):
        table.add_row(str(task), *(UNKNOWN if value is None else f"{value:.2%}" for value in row))
    return table


def evaluation_figures(evaluation: Evaluation) -> list[Figure]:
    """Return the confusion matrix, the accuracy per class and the reliability diagram."""
    names = list(evaluation.class_accuracy)
    shares = [[count / max(1, sum(row)) for count in row] for row in evaluation.confusion]
    bins = [bin for bin in evaluation.calibration if bin.images]
    curves = [
        Curve("measured", 0, [bin.confidence for bin in bins], [bin.accuracy for bin in bins]),
        Curve("perfectly calibrated", 1, [0.0, 1.0], [0.0, 1.0]),
    ]
    accuracies = [None if value is None else 100 * value for value in evaluation.class_accuracy.values()]
    return [
        HeatMap(
            id="confusion",
            title=f"Confusion matrix, {evaluation.model}: share of each true class",
            values=shares,
            row_label="true class",
            column_label="predicted class",
            rows=names,
            columns=names,
            percent=True,
        ),
        BarChart(
            id="class-accuracy",
            title=f"Accuracy per class, {evaluation.model}",
            label="accuracy, %",
            category_label="class",
            categories=names,
            series=[("accuracy, %", accuracies)],
        ),
        LineChart(
            id="calibration",
            title=f"Calibration, {evaluation.model}: expected calibration error {evaluation.calibration_error:.4f}",
            label="accuracy",
            views=[AxisView("confidence", "mean probability of the predicted class", curves)],
            percent=True,
        ),
    ]


def write_evaluations(evaluations: Sequence[Evaluation], folder: Path) -> list[Path]:
    """Write ``evaluation.json`` and the figures of each model, and return the files' paths."""
    make_folder(folder)
    written = [folder / "evaluation.json"]
    tree = [evaluation.as_json() for evaluation in evaluations]
    write_atomically(written[0], json.dumps(tree, indent=1).encode())
    for evaluation in evaluations:
        inner = folder if len(evaluations) == 1 else folder / evaluation.model.replace(" ", "-")
        inner.mkdir(exist_ok=True)
        for figure in evaluation_figures(evaluation):
            written += draw_files(figure, inner)
    return written
