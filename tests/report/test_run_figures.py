from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from made_runs import MakeRun
from vitfleet.errors import UserError
from vitfleet.report.figure_types import Bars, Heat, Lines, Spans, plain
from vitfleet.report.plotting import draw_files
from vitfleet.report.run_figures import common_figures, detail_figures, partitions
from vitfleet.report.runs import Group, find_runs, read_groups


def lines(groups: list[Group], id: str) -> Lines:
    (found,) = [figure for figure in common_figures(groups) if figure.id == id]
    assert isinstance(found, Lines)
    return found


def test_seeds_are_averaged_with_their_standard_deviation_as_a_band(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", seed=0), make_run("b", seed=1)])
    assert [group.label for group in groups] == ["fedavg"]
    (series,) = lines(groups, "accuracy").views[0].series
    assert series.y[1] == pytest.approx(0.205)
    half = 0.01 / math.sqrt(2)  # two values 0.01 apart
    assert series.high[1] == pytest.approx(0.205 + half)
    assert series.low[1] == pytest.approx(0.205 - half)


def test_axes_are_rounds_megabytes_and_virtual_hours_where_they_are_known(make_run: MakeRun) -> None:
    with_devices = lines(read_groups([make_run("a")]), "accuracy")
    assert [view.name for view in with_devices.views] == ["rounds", "megabytes", "virtual time"]
    assert with_devices.views[1].series[0].x == pytest.approx([0.009 * round for round in range(1, 6)])
    assert with_devices.views[2].series[0].x == pytest.approx([1, 2, 3, 4, 5])
    assert with_devices.views[2].label == "virtual hours"
    without = lines(read_groups([make_run("b", devices=False)]), "accuracy")
    assert [view.name for view in without.views] == ["rounds", "megabytes"]


def test_while_runs_go_on_a_mean_ends_where_the_first_seed_ends(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", seed=0), make_run("b", seed=1, played=2)])
    (series,) = lines(groups, "accuracy").views[0].series
    assert list(series.x) == [1, 2]
    assert not groups[0].finished


def test_bytes_a_round_are_those_of_all_its_clients(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a")])
    assert lines(groups, "bytes-up").views[0].series[0].y == pytest.approx([0.003] * 5)
    assert lines(groups, "bytes-down").views[0].series[0].y == pytest.approx([0.006] * 5)


def test_one_partition_a_deal(make_run: MakeRun) -> None:
    runs = [make_run("a", seed=0), make_run("b", method="transfl", seed=0), make_run("c", seed=1)]
    found = partitions(read_groups(runs))
    assert [figure.id for figure in found] == ["partition-1", "partition-2"]


def test_layers_and_heads_of_transfl(make_run: MakeRun) -> None:
    figures = detail_figures(read_groups([make_run("a", method="transfl")])[0], "x")
    layers, heads = (figure for figure in figures if isinstance(figure, Heat))
    assert [list(row) for row in layers.values] == [[1.0] * 5, [0.0] * 5, [1.0] * 5]
    assert heads.values[2][1] == 1.0


def test_labels_before_and_after_sampling(make_run: MakeRun) -> None:
    run = make_run("a", method="eftvit")
    (bars,) = [one for one in detail_figures(read_groups([run])[0], "x") if isinstance(one, Bars)]
    (_, before), (_, after) = bars.series
    counts = json.loads((run / "partition.json").read_text())["counts"]
    assert list(before) == max(counts, key=sum)
    present = sorted(value for value in before if value)
    median = present[len(present) // 2] if len(present) % 2 else sum(present[len(present) // 2 - 1 :][:2]) // 2
    assert list(after) == [median if value else 0 for value in before]


def test_tasks_and_forgetting(make_run: MakeRun) -> None:
    run = make_run("a", tasks=2)
    groups = read_groups([run])
    figures = detail_figures(groups[0], "x")
    (heat,) = [one for one in figures if isinstance(one, Heat)]
    assert heat.values == [[0.9, 0.1], [0.7, 0.8]]
    (curves,) = [one for one in figures if isinstance(one, Lines)]
    average, forgetting = curves.views[0].series
    assert list(average.y) == [0.9, 0.75]
    assert list(forgetting.y) == [None, pytest.approx(0.2)]
    assert lines(groups, "learned").views[0].series[0].x == pytest.approx([2, 4])


def test_the_timeline_tells_what_was_not_used(make_run: MakeRun) -> None:
    (spans,) = [one for one in detail_figures(read_groups([make_run("a")])[0], "x") if isinstance(one, Spans)]
    assert spans.rows == ["0 nano", "1 agx", "2 nano"]
    assert [span for span in spans.spans if not span[3]] == [(2, 1.0, 2.0, False)]


def test_every_figure_is_drawn_to_files(make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups = read_groups([make_run("a", method="transfl"), make_run("b", method="eftvit")])
    figures = [*common_figures(groups), *partitions(groups), *(f for g in groups for f in detail_figures(g, g.label))]
    for figure in figures:
        files = draw_files(figure, tmp_path)
        assert {file.suffix for file in files} == {".svg", ".png"}
        assert all(file.stat().st_size > 1000 for file in files)
    assert (tmp_path / "accuracy-by-virtual-time.svg").read_text().count("virtual hours") == 1


def test_numbers_are_as_long_as_can_be_seen(make_run: MakeRun) -> None:
    tree = plain(lines(read_groups([make_run("a", seed=1)]), "train-loss"))
    assert tree["views"][0]["series"][0]["y"][2] == 0.33333


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds neither a run nor a comparison"):
        find_runs([tmp_path])


def test_a_large_fleet_is_condensed(make_run: MakeRun) -> None:
    run = make_run("a")
    partition_io = json.loads((run / "partition.json").read_text())
    partition_io["counts"] = [[client % 7, 1, 0, 2] for client in range(1000)]
    (run / "partition.json").write_text(json.dumps(partition_io))
    (heat,) = partitions(read_groups([run]))
    assert isinstance(heat, Heat)
    assert len(heat.values) == 200
    total = sum(sum(value or 0 for value in row) for row in heat.values) * 5  # five neighbours a row
    assert total == pytest.approx(sum(sum(row) for row in partition_io["counts"]))
    assert heat.note.startswith("1,000 clients, sorted by their dominant class; a row is the mean")


def test_what_clients_of_tasks_hold_is_shown_too(make_run: MakeRun) -> None:
    run = make_run("a", tasks=2)
    (run / "partition.json").unlink()
    assert partitions(read_groups([run])) == []
    counts = np.arange(12).reshape(3, 4)
    save_file({"counts": counts}, run / "tasks.safetensors")
    (run / "tasks.json").write_text(json.dumps({"sha256": "x"}))
    (heat,) = partitions(read_groups([run]))
    assert isinstance(heat, Heat)
    assert heat.values == counts.tolist()
    assert heat.columns == ["0", "1", "2", "3"]
