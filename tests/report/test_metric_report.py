"""Metrics in figures, tables and the page of a report."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console, RenderableType

from made_runs import CLASSES, MakeRun
from vitfleet.report.console.progress import RoundDisplay
from vitfleet.report.console.results import comparison_metrics_tables, summary_table
from vitfleet.report.figures.curves import comparison_figures
from vitfleet.report.figures.runs import metric_figures
from vitfleet.report.figures.types import BarChart, Figure, HeatMap, LineChart
from vitfleet.report.html.page import render, report_figures, summary_columns
from vitfleet.report.runs import read_groups, read_run
from vitfleet.run.comparison.results import ComparisonRow
from vitfleet.run.records import MetricValues, RoundRecord

MATRIX = [[5, 1, 0, 0], [0, 6, 0, 0], [2, 0, 4, 0], [0, 0, 0, 6]]


def metrics_of(round: int) -> dict[str, MetricValues]:
    """Local accuracy in every round; lists, matrices and a user's own metric in round 5."""
    mean = 0.1 * round
    local = {"mean": mean, "std": 0.05, "worst_10_percent": mean / 2, "clients": 6}
    percentiles = {f"p{level}": mean + (level - 50) / 1000 for level in (0, 10, 25, 50, 75, 90, 100)}
    metrics: dict[str, MetricValues] = {"local_accuracy": {**local, **percentiles}}
    if round == 5:
        metrics["per_class"] = {"mean": 0.85, "worst": 0.6, "accuracy": [0.8, 1.0, None, 1.0]}
        metrics["confusion"] = {"matrix": MATRIX, "most_confused": ["class 2 → class 0: 2 of 6"]}
        metrics["of_a_plugin"] = {
            "value": 1234.5,
            "list": [1, 2, 3],
            "text": "x",
            "words": ["a"],
            "ragged": [[1], [1, 2]],
        }
    return metrics


def by_id(figures: list[Figure]) -> Mapping[str, Figure]:
    return {figure.id: figure for figure in figures}


def text_of(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_follow_from_the_form_of_the_values(make_run: MakeRun) -> None:
    figures = by_id(list(metric_figures(read_run(make_run("a", metrics=metrics_of)))))
    assert set(figures) == {
        "metric-local_accuracy", "metric-per_class-accuracy", "metric-confusion-matrix", "metric-of_a_plugin-list",
    }  # fmt: skip


def test_distribution_is_a_median_with_a_band_of_percentiles(make_run: MakeRun) -> None:
    chart = by_id(list(metric_figures(read_run(make_run("a", metrics=metrics_of)))))["metric-local_accuracy"]
    assert isinstance(chart, LineChart)
    assert chart.percent
    median, mean = chart.views[0].curves
    assert list(median.x) == [1, 2, 3, 4, 5]
    assert median.y == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert median.low == pytest.approx([0.06, 0.16, 0.26, 0.36, 0.46])
    assert median.high == pytest.approx([0.14, 0.24, 0.34, 0.44, 0.54])
    assert mean.y == median.y


def test_matrix_is_a_heat_map_with_class_names(make_run: MakeRun) -> None:
    figure = by_id(list(metric_figures(read_run(make_run("a", metrics=metrics_of)))))["metric-confusion-matrix"]
    assert isinstance(figure, HeatMap)
    assert figure.values == MATRIX
    assert (figure.row_label, figure.column_label) == ("true class", "predicted class")
    assert figure.rows == figure.columns == [f"class {index}" for index in range(CLASSES)]


def test_list_is_a_bar_chart(make_run: MakeRun) -> None:
    figures = by_id(list(metric_figures(read_run(make_run("a", metrics=metrics_of)))))
    per_class, own = figures["metric-per_class-accuracy"], figures["metric-of_a_plugin-list"]
    assert isinstance(per_class, BarChart)
    assert per_class.series == [("accuracy, %", [80.0, 100.0, None, 100.0])]
    assert per_class.categories[0] == "class 0"
    assert isinstance(own, BarChart)
    assert own.series == [("list", [1, 2, 3])]
    assert own.categories == ["0", "1", "2"]


def test_class_names_come_from_the_description_of_the_data(make_run: MakeRun) -> None:
    folder = make_run("a", metrics=metrics_of)
    (folder / "data.json").write_text(json.dumps({"classes": ["cat", "dog", "eel", "fox"]}))
    figure = by_id(list(metric_figures(read_run(folder))))["metric-confusion-matrix"]
    assert isinstance(figure, HeatMap)
    assert figure.rows == ["cat", "dog", "eel", "fox"]


def test_numbers_of_several_rounds_are_curves_that_compare_configurations(make_run: MakeRun) -> None:
    folders = [make_run("a", metrics=metrics_of), make_run("b", "fedprox", metrics=metrics_of)]
    charts = {chart.id: chart for chart in comparison_figures(read_groups(folders)) if chart.id.startswith("metric-")}
    assert set(charts) == {f"metric-local_accuracy-{key}" for key in ("mean", "std", "worst_10_percent")}
    worst = charts["metric-local_accuracy-worst_10_percent"]
    assert worst.title == "Local accuracy worst 10 percent"
    assert [curve.name for curve in worst.views[0].curves] == ["FedAvg", "FedProx"]
    assert worst.views[0].curves[0].y == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25])


def test_page_has_columns_and_figures_of_metrics(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", seed=0, metrics=metrics_of), make_run("b", seed=1, metrics=metrics_of)])
    columns = {column.heading: column.cells for column in summary_columns(groups)}
    assert columns["local accuracy mean, %"] == ["50.0 ± 0.0"]
    assert columns["per class worst, %"] == ["60.0 ± 0.0"]
    assert columns["of a plugin value"] == ["1234 ± 0"]
    page = render(groups, report_figures(groups))
    assert "metric-confusion-matrix" in page


def test_summary_table_shows_one_row_per_metric(make_run: MakeRun) -> None:
    summary = json.loads((make_run("a", metrics=metrics_of) / "summary.json").read_text())
    summary["metrics"]["kept_away"] = {"unavailable": "the models stay there"}
    lines = text_of(summary_table(summary, "")).splitlines()

    def row(metric: str) -> str:
        (line,) = [line for line in lines if f"metric: {metric} " in line]
        return line

    assert "mean 50.0 %, std 5.0 %, worst 10 percent 25.0 %" in row("local accuracy")
    assert "class 2 → class 0: 2 of 6" in row("confusion")
    assert "value 1234" in row("of a plugin")
    assert "not measured: the models stay there" in row("kept away")


def test_comparison_has_a_table_for_each_metric(make_run: MakeRun) -> None:
    def read(name: str, **changes: Any) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((make_run(name, metrics=metrics_of) / "summary.json").read_text())
        summary["metrics"]["local_accuracy"] |= changes
        return summary

    rows = [ComparisonRow("mine", [read("a", mean=0.4), read("b", mean=0.6)]), ComparisonRow("other", [read("c")])]
    del rows[1].summaries[0]["metrics"]["per_class"]
    local, per_class, own = map(text_of, comparison_metrics_tables(rows))
    assert "local accuracy" in local
    assert "50.0 ± 14.1 %" in local
    assert "worst 10 percent" in local
    assert "60.0 ± 0.0 %" in per_class
    assert "–" in per_class
    assert "1234" in own
    assert comparison_metrics_tables([ComparisonRow("old", [{"accuracy": {}}])]) == []


def test_round_display_announces_an_unavailable_metric_once() -> None:
    console = Console(file=io.StringIO(), width=160)
    display = RoundDisplay(console, rounds=100, done=0)
    for round in (1, 2):
        record = RoundRecord(round, 0.1, 1.0, None, [], 0, 0, metrics={"sizes": {"unavailable": "the models stay"}})
        display.show_round(record, 1.0)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("sizes: not measured: the models stay") == 1
