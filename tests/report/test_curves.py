"""Learning curves: averaging over seeds, horizontal axes, units."""

from __future__ import annotations

import math

import pytest

from made_runs import MakeRun
from vitfleet.report.figures.curves import comparison_figures
from vitfleet.report.figures.types import LineChart, to_json
from vitfleet.report.runs import RunGroup, all_finished, read_groups


def chart(groups: list[RunGroup], id: str) -> LineChart:
    (figure,) = [figure for figure in comparison_figures(groups) if figure.id == id]
    return figure


def test_curve_is_mean_over_seeds_with_standard_deviation_as_band(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", seed=0), make_run("b", seed=1)])
    assert [group.label for group in groups] == ["FedAvg"]
    (curve,) = chart(groups, "accuracy").views[0].curves
    assert curve.y[1] == pytest.approx(0.205)
    deviation = 0.01 / math.sqrt(2)  # two values 0.01 apart
    assert curve.high[1] == pytest.approx(0.205 + deviation)
    assert curve.low[1] == pytest.approx(0.205 - deviation)


def test_axes_are_rounds_traffic_and_virtual_time_if_known(make_run: MakeRun) -> None:
    with_devices = chart(read_groups([make_run("a")]), "accuracy")
    assert [view.name for view in with_devices.views] == ["rounds", "traffic", "virtual time"]
    assert with_devices.views[1].curves[0].x == pytest.approx([9000 * round / 2**20 for round in range(1, 6)])
    assert with_devices.views[2].curves[0].x == pytest.approx([1, 2, 3, 4, 5])
    assert with_devices.views[2].label == "virtual hours"
    without = chart(read_groups([make_run("b", devices=False)]), "accuracy")
    assert [view.name for view in without.views] == ["rounds", "traffic"]


def test_curve_of_unfinished_runs_ends_with_the_shortest(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", seed=0), make_run("b", seed=1, finished_rounds=2)])
    (curve,) = chart(groups, "accuracy").views[0].curves
    assert list(curve.x) == [1, 2]
    assert not all_finished(groups)


def test_traffic_per_round_is_the_sum_over_clients(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a")])
    assert chart(groups, "upload").label == chart(groups, "download").label == "MiB"
    assert chart(groups, "upload").views[0].curves[0].y == pytest.approx([3000 / 2**20] * 5)
    assert chart(groups, "download").views[0].curves[0].y == pytest.approx([6000 / 2**20] * 5)


def test_task_accuracy_is_a_curve_over_rounds(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", tasks=2)])
    assert chart(groups, "task-accuracy").views[0].curves[0].x == pytest.approx([2, 4])


def test_to_json_rounds_to_five_digits(make_run: MakeRun) -> None:
    tree = to_json(chart(read_groups([make_run("a", seed=1)]), "train-loss"))
    assert tree["views"][0]["curves"][0]["y"][2] == 0.33333
