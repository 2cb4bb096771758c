"""Terminal output of runs on task streams."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

from rich.console import Console, RenderableType

from vitfleet.costs.estimate import Available, RunEstimate
from vitfleet.report.console.costs import estimate_line, shortage
from vitfleet.report.console.progress import ComparisonClock, RoundDisplay
from vitfleet.report.console.results import comparison_tables, summary_table
from vitfleet.run.comparison.results import ComparisonResult, ComparisonRow
from vitfleet.run.records import Accuracy, RoundRecord, TaskRecord


def render(table: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def summary(accuracy: float, **client_metrics: int) -> dict[str, Any]:
    figures = {"forgetting": 0.0425, "backward_transfer": -0.035, "forward_transfer": None}
    return {
        "method": "fedvit",
        "rounds": 10,
        "accuracy": {"global": None, "local": 0.5, "local_clients": 3, "best": None},
        "message": {"up_bytes": 2048, "down_bytes": 1024},
        "total": {"up_bytes": 1, "down_bytes": 1, "seconds": 3.0, "participations": 4, "failures": 0},
        "client": {"params": 10, "trainable_params": 10, "forward_gflops": 0.1, "train_gflops": 0.3},
        "continual": {"average_accuracy": accuracy, **figures, "matrix": [], "by_task": {}},
        "client_metrics": client_metrics,
    }


def test_summary_table_shows_accuracy_and_forgetting_of_tasks() -> None:
    text = render(summary_table(summary(0.61239, integrated=40, rotated=30, degenerate=0, tuning_degenerate=0), ""))
    assert "61.24 %" in text
    assert "4.25 %" in text
    assert re.search(r"steps with reference gradients\W+40\W", text)
    assert re.search(r"steps with a rotated gradient\W+30\W", text)
    assert "forward" not in text, "unknown numbers are omitted"
    assert "warning" not in text


def test_summary_table_shows_the_warnings_among_the_client_metrics() -> None:
    warned = summary(0.6, integrated=40, rotated=30, degenerate=0, tuning_degenerate=1, unsolved=4)
    text = render(summary_table(warned, ""))
    assert "4 (warning)" in text
    assert "1 (warning)" in text
    assert text.count("(warning)") == 2


def test_comparison_table_of_tasks_shows_accuracy_and_forgetting() -> None:
    rows = [ComparisonRow("mine", [summary(0.6), summary(0.64)]), ComparisonRow("other", [summary(0.5)])]
    (table,) = comparison_tables(ComparisonResult(rows, None))
    text = render(table)
    assert "62.0 ± 2.8 %" in text
    assert "50.0 %" in text
    assert "forgetting" in text


def test_rows_with_tasks_have_a_table_of_their_own() -> None:
    plain = {key: value for key, value in summary(0.0).items() if key != "continual"}
    plain |= {"accuracy": {"global": 0.875, "local": 0.5}, "to_target": {"rounds": 3, "bytes": 10}}
    rows = [ComparisonRow("fedavg", [plain]), ComparisonRow("fedvit", [summary(0.6)])]
    first, second = (render(table) for table in comparison_tables(ComparisonResult(rows, 0.5)))
    assert "FedAvg" in first
    assert "87.5 %" in first
    assert "FedViT" not in first
    assert "FedViT" in second
    assert "FedAvg" not in second


def test_clock_of_a_comparison_scales_the_estimates_to_the_time_taken() -> None:
    clock = ComparisonClock([10.0, 30.0, 60.0], seeds=[0, 0, 1], started=100.0)
    assert clock.start_next() == "run 1 of 3, seed 0"
    assert clock.seconds_left(0.0, now=100.5) == 100
    assert clock.seconds_left(0.5, now=110.0) == 190  # it takes twice the estimate
    assert clock.start_next() == "run 2 of 3, seed 0"
    assert clock.seconds_left(0.0, now=120.0) == 180
    assert clock.start_next() == "run 3 of 3, seed 1"
    assert clock.seconds_left(1.0, now=300.0) == 0


def test_clock_without_estimates_knows_nothing_before_the_first_round() -> None:
    clock = ComparisonClock([50.0, 50.0], seeds=[0, 1], in_seconds=False, started=100.0)
    clock.start_next()
    assert clock.seconds_left(0.0, now=101.0) is None
    assert clock.seconds_left(0.1, now=110.0) == 190


def test_round_display_of_a_comparison_shows_the_time_of_all_runs() -> None:
    console = Console(file=io.StringIO(), width=160)
    clock = ComparisonClock([1.0, 1.0], seeds=[0, 1])
    clock.start_next()
    record = RoundRecord(4, 0.1, 1.0, Accuracy(0.5, None, 1, 0.7), [], 0, 0)
    RoundDisplay(console, rounds=4, done=0, clock=clock).show_round(record, 1.0)
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"0 s left, \S+ s in all", console.file.getvalue())


def test_estimate_names_what_is_missing() -> None:
    estimate = RunEstimate(150, 2 * 2**30, 3 * 2**20)
    assert estimate_line(estimate) == "about 2.5 min, 2.0 GiB of memory, 3.0 MiB on disk"
    assert shortage(estimate, Available(4 * 2**30, None)) is None
    missing = "needs about 2.0 GiB of memory, and 1.0 GiB are free; 3.0 MiB of disk, and 1.0 MiB are free"
    assert shortage(estimate, Available(2**30, 2**20)) == missing
    on_gpu = replace(estimate, device="cuda")
    assert shortage(on_gpu, Available(2**30, None)) == "needs about 2.0 GiB of GPU memory, and 1.0 GiB are free"


def test_round_display_announces_learned_task() -> None:
    console = Console(file=io.StringIO(), width=160)
    learned = TaskRecord(2, [[0.5]], None, average_accuracy=0.625, forgetting=0.04)
    record = RoundRecord(4, 0.1, 1.0, Accuracy(None, None, 0, 0.7), [], 0, 0, learned)
    RoundDisplay(console, rounds=10, done=0).show_round(record, 1.0)
    assert isinstance(console.file, io.StringIO)
    assert "task 2 learned: average accuracy 62.5%, forgetting 4.0%" in console.file.getvalue()
