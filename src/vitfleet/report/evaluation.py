"""Evaluations of models as tables and figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.inference.evaluate import Evaluation
from vitfleet.inference.task_matrix import TaskMatrix
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.types import AxisView, BarChart, Curve, Figure, HeatMap, LineChart

CLASSES_SHOWN = 20  # rows of the table of classes; files have all


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Return one row per model, and their mean if there are several."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("model", style="bold", no_wrap=True)
    for heading in ("images", "accuracy", "loss", "calibration error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for evaluation in evaluations:
        loss = "–" if evaluation.loss is None else f"{evaluation.loss:.3f}"
        error = f"{evaluation.calibration_error:.4f}"
        table.add_row(evaluation.model, f"{evaluation.images:,}", f"{evaluation.accuracy:.2%}", loss, error)
    if len(evaluations) > 1:
        accuracies = [evaluation.accuracy for evaluation in evaluations]
        spread = f"{statistics.mean(accuracies):.2%} ± {statistics.stdev(accuracies):.2%}"
        mean_error = statistics.mean(evaluation.calibration_error for evaluation in evaluations)
        table.add_row("mean", "", spread, "", f"{mean_error:.4f}")
    return table


def class_table(evaluation: Evaluation) -> Table:
    """Return the accuracy of each class with its images, the lowest first, and what it is mistaken for most often."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("class", style="bold", no_wrap=True)
    for heading in ("images", "accuracy", "most often mistaken for"):
        table.add_column(heading, justify="right" if heading != "most often mistaken for" else "left", no_wrap=True)
    names = list(evaluation.class_accuracy)
    measured = [(accuracy, index) for index, accuracy in enumerate(evaluation.class_accuracy.values())
                if accuracy is not None]  # fmt: skip
    for accuracy, index in sorted(measured)[:CLASSES_SHOWN]:
        row = evaluation.confusion[index]
        mistakes = {names[other]: count for other, count in enumerate(row) if other != index and count}
        worst = max(mistakes, key=lambda name: mistakes[name], default=None)
        text = "" if worst is None else f"{worst} ({mistakes[worst]})"
        table.add_row(names[index], f"{sum(row):,}", f"{accuracy:.2%}", text)
    if len(measured) > CLASSES_SHOWN:
        table.caption, table.caption_justify = f"the {CLASSES_SHOWN} lowest of {len(measured)} classes", "left"
    return table


def task_matrix_table(matrix: TaskMatrix) -> Table:
    """Return the accuracies after each task, means over clients, and the metrics that follow from them."""
    rows = matrix.means()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("after task", style="bold", no_wrap=True)
    for task in range(1, len(rows) + 1):
        table.add_column(f"on task {task}", justify="right", no_wrap=True)
    for task, row in enumerate(rows, start=1):
        table.add_row(str(task), *("–" if value is None else f"{value:.2%}" for value in row))
    known = {name: value for name, value in matrix.metrics._asdict().items() if value is not None}
    table.caption = " · ".join(f"{name.replace('_', ' ')} {value:.2%}" for name, value in known.items())
    table.caption_justify = "left"
    return table


def evaluation_figures(evaluation: Evaluation) -> list[Figure]:
    """Return the confusion matrix, the accuracy per class and the reliability diagram."""
    names = list(evaluation.class_accuracy)
    shares = [[count / max(1, sum(row)) for count in row] for row in evaluation.confusion]
    bins = [bin for bin in evaluation.calibration if bin.images]
    confidence = [bin.confidence for bin in bins]
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
            views=[
                AxisView(
                    "confidence",
                    "mean probability of the predicted class",
                    [
                        Curve("measured", 0, confidence, [bin.accuracy for bin in bins]),
                        Curve("perfectly calibrated", 1, [0.0, 1.0], [0.0, 1.0]),
                    ],
                )
            ],
            percent=True,
        ),
    ]


def write_evaluations(evaluations: Sequence[Evaluation], folder: Path) -> list[Path]:
    """Write ``evaluation.json`` and the figures of each model, and return the files' paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be created ({error.strerror})") from None
    written = [folder / "evaluation.json"]
    tree = [evaluation.as_json() for evaluation in evaluations]
    write_atomically(written[0], json.dumps(tree, indent=1).encode())
    for evaluation in evaluations:
        inner = folder if len(evaluations) == 1 else folder / evaluation.model.replace(" ", "-")
        inner.mkdir(exist_ok=True)
        for figure in evaluation_figures(evaluation):
            written += draw_files(figure, inner)
    return written
