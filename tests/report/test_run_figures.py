"""Figures of single runs, from run folders made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from made_runs import MakeRun
from vitfleet.errors import UserError
from vitfleet.report.figures.curves import comparison_figures
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.runs import configuration_figures, partition_figures
from vitfleet.report.figures.types import HeatMap, LineChart, Timeline
from vitfleet.report.runs import find_runs, read_groups


def test_one_figure_per_different_partition(make_run: MakeRun) -> None:
    runs = [make_run("a", seed=0), make_run("b", method="transfl", seed=0), make_run("c", seed=1)]
    figures = partition_figures(read_groups(runs))
    assert [figure.id for figure in figures] == ["partition-1", "partition-2"]
    assert [figure.note for figure in figures] == ["Configurations: FedAvg, TransFL.", "Configurations: FedAvg."]


def test_figure_ids_start_with_the_prefix(make_run: MakeRun) -> None:
    figures = configuration_figures(read_groups([make_run("a", method="transfl")])[0], "x")
    assert [figure.id for figure in figures] == ["x-sent-layers", "x-head-gradients", "x-timeline"]


def test_task_figures_show_matrix_accuracy_and_forgetting(make_run: MakeRun) -> None:
    figures = configuration_figures(read_groups([make_run("a", tasks=2)])[0], "x")
    (matrix,) = [figure for figure in figures if isinstance(figure, HeatMap)]
    assert matrix.values == [[0.9, 0.1], [0.7, 0.8]]
    (curves,) = [figure for figure in figures if isinstance(figure, LineChart)]
    average, forgetting = curves.views[0].curves
    assert list(average.y) == [0.9, 0.75]
    assert list(forgetting.y) == [None, pytest.approx(0.2)]


def test_timeline_marks_unused_updates(make_run: MakeRun) -> None:
    figures = configuration_figures(read_groups([make_run("a")])[0], "x")
    (timeline,) = [figure for figure in figures if isinstance(figure, Timeline)]
    assert timeline.rows == ["0 nano", "1 agx", "2 nano"]
    assert [interval for interval in timeline.intervals if not interval[3]] == [(2, 1.0, 2.0, False)]


def test_draw_files_writes_every_figure_as_svg_pdf_and_png(make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups = read_groups([make_run("a", method="transfl"), make_run("b", method="eftvit")])
    details = [figure for group in groups for figure in configuration_figures(group, group.label)]
    for figure in [*comparison_figures(groups)[:2], *partition_figures(groups), *details]:
        files = draw_files(figure, tmp_path)
        assert {file.suffix for file in files} == {".svg", ".pdf", ".png"}
        assert all(file.stat().st_size > 1000 for file in files)
    assert (tmp_path / "accuracy-by-virtual-time.svg").read_text().count("virtual hours") == 1


def test_find_runs_rejects_other_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains neither a run nor a comparison"):
        find_runs([tmp_path])


def test_partition_of_large_fleet_averages_neighbours(make_run: MakeRun) -> None:
    run = make_run("a")
    partition = json.loads((run / "partition.json").read_text())
    partition["counts"] = [[client % 7, 1, 0, 2] for client in range(1000)]
    (run / "partition.json").write_text(json.dumps(partition))
    (heat_map,) = partition_figures(read_groups([run]))
    assert isinstance(heat_map, HeatMap)
    assert len(heat_map.values) == 200
    total = sum(sum(value or 0 for value in row) for row in heat_map.values) * 5  # five clients per row
    assert total == pytest.approx(sum(sum(row) for row in partition["counts"]))
    assert heat_map.note.startswith("1,000 clients, sorted by dominant class; each row is the mean")


def test_partition_of_task_streams_is_read_from_their_files(make_run: MakeRun) -> None:
    run = make_run("a", tasks=2)
    (run / "partition.json").unlink()
    assert partition_figures(read_groups([run])) == []
    counts = np.arange(12).reshape(3, 4)
    save_file({"counts": counts}, run / "tasks.safetensors")
    (run / "tasks.json").write_text(json.dumps({"sha256": "x"}))
    (heat_map,) = partition_figures(read_groups([run]))
    assert isinstance(heat_map, HeatMap)
    assert heat_map.values == counts.tolist()
    assert heat_map.columns == ["0", "1", "2", "3"]
