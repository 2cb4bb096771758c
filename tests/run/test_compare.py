"""Comparisons: sweeps, method variants, targets and the table of results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from made_runs import MakeRun
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.run.comparison.manifest import ComparedRun, create_comparison, read_command, read_members
from vitfleet.run.comparison.results import default_target, read_comparison
from vitfleet.run.output.summary import cost_to_target
from vitfleet.run.records import read_records


def test_cost_to_target_is_that_of_the_first_round_that_reached_it(make_run: MakeRun) -> None:
    run = list(read_records(make_run("a")))  # per round 0.1 more accuracy, 9000 bytes and an hour
    assert cost_to_target(run, 0.25) == {"rounds": 3, "bytes": 27_000, "virtual_seconds": 3 * 3600.0}
    assert cost_to_target(run, 0.99) == {"rounds": None, "bytes": None, "virtual_seconds": None}
    assert cost_to_target(run, None)["rounds"] is None


@pytest.mark.parametrize(
    ("best", "chance", "target"),
    [
        ([0.946, 0.881, 0.9], 0.1, 0.88),  # all learned: what all reached
        ([0.9, 0.113], 0.1, 0.5),  # one did not: halfway from chance to the best
        ([0.446, 0.262, 0.257], 0.1, 0.27),
        ([0.1, 0.09], 0.1, None),
        ([0.9, None], 0.1, None),
        ([], 0.1, None),
    ],
)
def test_default_target_is_an_achievement(best: list[float | None], chance: float, target: float | None) -> None:
    assert default_target(best, chance) == target


def compared(make_run: MakeRun, tmp_path: Path, target: float | None) -> Path:
    members = [
        ComparedRun(name, load_config("digits", [f"method.name={method}", f"seed={seed}"]))
        for name, method in (("one", "fedavg"), ("two", "fedprox"))
        for seed in (0, 1)
    ]
    path = create_comparison(members, tmp_path / "both", "vitfleet compare one two", target)
    for member in members:
        rounds = 5 if member.name == "one" else 4  # the second ends 0.1 lower
        make_run(f"both/{member.folder(path).name}", member.config.method.name, member.config.seed, rounds, rounds)
    return path


def test_read_comparison_without_a_target_uses_the_accuracy_that_all_reached(make_run: MakeRun, tmp_path: Path) -> None:
    path = compared(make_run, tmp_path, None)
    comparison = read_comparison(path)
    assert comparison.target == 0.4
    one, two = comparison.rows
    assert (one.mean("to_target", "rounds"), two.mean("to_target", "rounds")) == (4, 4)
    assert one.mean_std("accuracy", "global") == pytest.approx((0.505, 0.00707), rel=0.01)
    assert read_command(path) == "vitfleet compare one two"
    assert [member.name for member in read_members(path)] == ["one", "one", "two", "two"]


def test_read_comparison_leaves_a_missed_target_empty(make_run: MakeRun, tmp_path: Path) -> None:
    path = compared(make_run, tmp_path, 0.5)
    one, two = read_comparison(path).rows
    assert one.mean("to_target", "rounds") == 5
    assert two.mean("to_target", "rounds") is None
    with (path / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["to_target.rounds"] for line in lines] == ["5", "5", "", ""]
    assert json.loads(lines[0]["total.virtual_seconds"]) == 5 * 3600


def test_create_comparison_rejects_duplicates(tmp_path: Path) -> None:
    member = ComparedRun("one", load_config("digits"))
    with pytest.raises(UserError, match="would be compared with itself"):
        create_comparison([member, member], tmp_path / "x", "")
