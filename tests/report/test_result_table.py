"""Tables for papers: means and deviations over seeds, the best in bold, a paired test, three formats."""

from __future__ import annotations

import csv
import io
import statistics

import pytest

from made_runs import MakeRun
from vitfleet.errors import UserError
from vitfleet.report.columns import COLUMNS
from vitfleet.report.console.results import comparison_tables
from vitfleet.report.html.page import cost_columns, result_columns
from vitfleet.report.result_table import Cell, ResultTable, paired_t_test, result_table
from vitfleet.report.runs import read_groups
from vitfleet.run.comparison.results import ComparisonResult, ComparisonRow
from vitfleet.run.output.summary import read_summary


def three_seeds(make_run: MakeRun, method: str) -> list[str]:
    return [str(make_run(f"{method}-{seed}", method=method, seed=seed)) for seed in range(3)]


def test_rows_are_means_over_seeds(make_run: MakeRun) -> None:
    table = result_table(three_seeds(make_run, "fedavg"), ["accuracy", "local"])
    accuracies = [100 * (0.5 + 0.01 * seed) for seed in range(3)]  # of the last of five made rounds
    cell = table.cells["FedAvg"][0]
    assert cell.mean == pytest.approx(statistics.fmean(accuracies))
    assert cell.deviation == pytest.approx(statistics.stdev(accuracies))
    assert "n = 3 seeds" in table.note
    assert "n − 1" in table.note
    header, line = csv.reader(io.StringIO(table.to_csv()))
    assert header[1:4] == ["accuracy, %: mean", "accuracy, %: standard deviation", "accuracy, %: n"]
    assert float(line[1]) == pytest.approx(51.0)
    assert line[3] == "3"


def test_a_run_that_repeats_another_is_a_row_of_its_own(make_run: MakeRun) -> None:
    runs = [*three_seeds(make_run, "fedavg"), str(make_run("again", method="fedavg", seed=1))]
    table = result_table(runs, ["accuracy"])
    assert list(table.cells) == ["FedAvg", "again"]
    assert table.cells["FedAvg"][0].mean == pytest.approx(51)
    assert list(table.cells["again"][0].values) == [1]


def test_a_target_is_shown_with_its_digits(make_run: MakeRun) -> None:
    assert "Target: 45.5% accuracy" in result_table(three_seeds(make_run, "fedavg"), target=0.455).note


def test_latex_and_markdown_mark_the_best(make_run: MakeRun) -> None:
    weak = make_run("weak", method="fedavg", seed=0)
    strong = make_run("strong", method="fed-head", seed=4)
    table = result_table([weak, strong], ["accuracy", "upload"])
    latex = table.to_latex()
    assert r"Fed-Head & \textbf{54.0}" in latex
    assert r"accuracy, \%" in latex
    assert latex.count(r"\\") == 3
    # Both send the same: none is the best.
    assert table.to_markdown().count("**") == 2


def test_best_is_among_comparable_rows(make_run: MakeRun) -> None:
    """Runs on tasks and runs on other data have a best of their own, or none where nothing is comparable with them."""
    runs = [
        make_run("weak", method="fedavg", seed=0),
        make_run("strong", method="fed-head", seed=4),
        make_run("photos", method="fedprox", seed=9, data={"name": "photos", "path": "photos"}),
        make_run("tasks", method="apfl", seed=8, tasks=2),
        make_run("tasks-too", method="fedper", seed=7, tasks=2, data={"augment": {"flip": True}}),
        make_run("validated", method="fedbfpt", seed=6, data={"validation": 0.1}),
    ]
    table = result_table(runs, ["accuracy"], versus="fed-head")
    bold = {line.split(" | ")[0].removeprefix("| ") for line in table.to_markdown().splitlines() if "**" in line}
    assert bold == {"Fed-Head", "APFL"}
    assert "Bold: the best of the rows that have the same data" in table.note
    assert "Bold" not in result_table(runs[:2], ["accuracy"]).note


def test_rows_on_other_data_are_not_tested_against_each_other(make_run: MakeRun) -> None:
    photos = [str(make_run(f"p{seed}", method="fedprox", seed=seed, data={"name": "photos"})) for seed in range(3)]
    runs = [*three_seeds(make_run, "fedavg"), *three_seeds(make_run, "fed-head"), *photos]
    table = result_table(runs, ["accuracy"], versus="fedavg")
    assert table.tests["Fed-Head"] is not None
    assert table.tests["FedProx"] is None


def test_small_costs_keep_two_digits_and_large_ones_their_own() -> None:
    cells = {"A": [Cell({0: 96.04}), Cell({0: 0.0055})], "B": [Cell({0: 0.004}), Cell({0: 0.0021})]}
    table = ResultTable([COLUMNS["accuracy"], COLUMNS["gflops"]], cells, {}, [0, 0], "")
    assert "| A | **96.0** | 0.0055 |" in table.to_markdown()
    assert "| B | 0.0 | **0.0021** |" in table.to_markdown()
    large = ResultTable([COLUMNS["gflops"]], {"A": [Cell({0: 7.5})], "B": [Cell({0: 0.57})]}, {}, [0, 0], "")
    assert "| A | 7.50 |" in large.to_markdown()


def test_target_columns(make_run: MakeRun) -> None:
    runs = [make_run("a", method="fedavg"), make_run("b", method="fed-head", seed=7)]
    table = result_table(runs, ["rounds", "traffic"], target=0.45)
    # Accuracy is 0.1 per round, and 0.07 more with seed 7.
    assert table.cells["FedAvg"][0].mean == 5
    assert table.cells["Fed-Head"][0].mean == 4
    unreached = result_table(runs, ["rounds"], target=0.55)
    assert unreached.cells["FedAvg"][0].mean is None
    assert "| FedAvg | – |" in unreached.to_markdown()


def test_paired_test_against_a_row(make_run: MakeRun) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    first, second = {0: 1.0, 1: 2.5, 2: 3.0, 5: 9.0}, {0: 0.5, 1: 2.0, 2: 1.0, 7: 3.0}
    test = paired_t_test(first, second)
    assert test is not None
    expected = scipy_stats.ttest_rel([1.0, 2.5, 3.0], [0.5, 2.0, 1.0])
    assert test.pairs == 3
    assert test.t == pytest.approx(expected.statistic)
    assert test.p == pytest.approx(expected.pvalue)
    assert paired_t_test({0: 1.0}, {0: 2.0}) is None
    runs = [*three_seeds(make_run, "fedavg"), *three_seeds(make_run, "fed-head")]
    table = result_table(runs, ["accuracy"], versus="fedavg")
    assert table.tests["FedAvg"] is None
    # The made runs differ by seed only: no difference at all.
    assert table.tests["Fed-Head"] is not None
    assert table.tests["Fed-Head"].p == 1.0
    assert "paired t-test" in table.note


def test_default_columns(make_run: MakeRun) -> None:
    usual = result_table([make_run("a")])
    assert [column.title for column in usual.columns] == [
        COLUMNS[name].title for name in ("accuracy", "local", "upload", "gflops")
    ]
    continual = result_table([make_run("tasks", tasks=2)])
    assert continual.columns[0] == COLUMNS["average"]
    assert continual.cells["FedAvg"][1].mean == 20.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["speed"]}, "columns speed: there is no such column; there are accuracy"),
        ({"columns": ["rounds"]}, "columns rounds: needs a target accuracy"),
        ({"versus": "gem"}, "versus gem: is no row of the table; its rows are FedAvg"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str, make_run: MakeRun) -> None:
    run = make_run("a")
    with pytest.raises(UserError, match=message):
        result_table([run], **options)  # type: ignore[arg-type]


def test_unfinished_run_is_named(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="the run is not finished"):
        result_table([make_run("a", finished_rounds=2)])


def test_terminal_page_and_paper_print_the_same_numbers(make_run: MakeRun) -> None:
    """Fractions in the summary, percent and MiB wherever they are shown."""
    run = make_run("tasks", tasks=2)
    summary = read_summary(run)
    assert summary["continual"]["forgetting"] == 0.2
    assert summary["message"]["up_bytes"] == 1000
    (terminal,) = comparison_tables(ComparisonResult([ComparisonRow("fedavg", [summary])], None))
    assert [next(iter(column.cells)) for column in terminal.columns][1:3] == ["75.0 %", "20.0 %"]
    groups = read_groups([run])
    page = {column.heading: column.cells for column in (*result_columns(groups), *cost_columns(groups))}
    assert (page["average accuracy, %"], page["forgetting, %"], page["upload"]) == (["75.0"], ["20.0"], ["1000 B"])
    header, _, row = result_table([run], ["average", "forgetting", "upload"]).to_markdown().splitlines()[:3]
    assert header == "|  | average accuracy, % | forgetting, % | upload, MiB |"
    assert row == "| FedAvg | 75.0 | 20.0 | 0.00095 |"
