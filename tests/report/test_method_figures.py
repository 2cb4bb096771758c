"""Figures that methods declare: values computed by hand from records, and the registry."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from made_runs import MakeRun
from vitfleet.config.registry import METHODS
from vitfleet.report.figures.folder import draw_results
from vitfleet.report.figures.methods import BUILDERS, head_gradients, method_figures, sent_layers
from vitfleet.report.figures.types import BarChart, HeatMap
from vitfleet.report.runs import RunData, read_run
from vitfleet.run.records import ClientRecord, RoundRecord


def record(round: int, sent: list[list[int]]) -> RoundRecord:
    clients = [
        ClientRecord(
            client,
            1,
            1,
            {
                "layers": layers,
                "gradients": [0.1, 0.2, 0.3],
                "head_gradients": [float(round * 10 + client + head) for head in range(6)],
            },
        )
        for client, layers in enumerate(sent)
    ]
    return RoundRecord(round, 0.1, 1.0, None, clients, 1, 1)


def run_of(*records: RoundRecord) -> RunData:
    return RunData(Path("run"), "run", {}, {}, list(records), None, None, None, None)


def test_every_declared_figure_has_a_builder() -> None:
    declared = {figure for entry in METHODS for figure in entry.target.figures}
    assert declared == set(BUILDERS)


def test_sent_layers_is_fraction_of_clients_per_round() -> None:
    figure = sent_layers(run_of(record(1, [[0, 1], [0, 2]]), record(2, [[1, 2], [1, 2]])))
    assert figure is not None
    assert figure.columns == ["1", "2"]
    np.testing.assert_array_equal(figure.values, [[1, 0], [0.5, 1], [0.5, 1]])


def test_head_gradients_are_averaged_over_rounds_and_clients() -> None:
    figure = head_gradients(run_of(record(1, [[0, 1], [0, 2]]), record(2, [[1, 2], [1, 2]])))
    assert figure is not None
    mean = 15.5 + np.arange(6).reshape(3, 2)  # mean of 10, 11, 20, 21 plus 0 … 5, two heads per layer
    np.testing.assert_allclose(np.array(figure.values, dtype=float), mean / mean.max())


def test_layer_figures_are_omitted_without_data() -> None:
    run = run_of(RoundRecord(1, 0.1, 1.0, None, [ClientRecord(0, 1, 1, {"samples": 3})], 1, 1))
    assert sent_layers(run) is None
    assert head_gradients(run) is None


def test_method_without_declared_figures_has_none(make_run: MakeRun) -> None:
    assert method_figures(read_run(make_run("a", method="fedavg"))) == []


def test_layer_selecting_method_has_both_layer_figures(make_run: MakeRun) -> None:
    layers, heads = method_figures(read_run(make_run("a", method="transfl")))
    assert isinstance(layers, HeatMap)
    assert isinstance(heads, HeatMap)
    assert [list(row) for row in layers.values] == [[1.0] * 5, [0.0] * 5, [1.0] * 5]
    assert heads.values[2][1] == 1.0


def test_balanced_labels_shows_median_of_class_counts(make_run: MakeRun) -> None:
    run = make_run("a", method="eftvit")
    (bars,) = method_figures(read_run(run))
    assert isinstance(bars, BarChart)
    (_, before), (_, after) = bars.series
    counts = json.loads((run / "partition.json").read_text())["counts"]
    assert list(before) == max(counts, key=sum)
    present = sorted(value for value in before if value)
    median = present[len(present) // 2] if len(present) % 2 else sum(present[len(present) // 2 - 1 :][:2]) // 2
    assert list(after) == [median if value else 0 for value in before]


@pytest.mark.parametrize("rounds", [1, 70])
def test_figures_are_drawn_into_the_run_folder(make_run: MakeRun, rounds: int) -> None:
    pytest.importorskip("matplotlib")
    folder = make_run("a", method="transfl", finished_rounds=rounds, rounds=rounds)
    draw_results(folder)
    for name in ("sent-layers", "head-gradients"):
        with Image.open(folder / f"{name}.png") as image:
            assert image.width > 800
            assert len(image.convert("RGB").getcolors(maxcolors=10**6) or []) > 20
