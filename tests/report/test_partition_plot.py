"""The picture of a partition is drawn for fleets of every size, and shows what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitfleet.report.partition_plot import by_dominant_class, draw

pytest.importorskip("matplotlib")


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 1), (2, 3), (10, 10), (60, 30), (61, 31), (100, 100), (10_000, 10)]
)
def test_every_size_of_fleet_is_drawn(clients: int, classes: int, tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(3, (clients, classes)).astype(np.int64)
    draw(counts, [f"class {c}" for c in range(classes)], tmp_path / "new" / "partition.png")
    image = pixels(tmp_path / "new" / "partition.png")
    assert min(image.shape[:2]) > 300
    assert image.std() > 5


@pytest.mark.parametrize("clients", [10, 100])
def test_different_partitions_look_different(clients: int, tmp_path: Path) -> None:
    even = np.full((clients, 10), 10, np.int64)
    skewed = 100 * (np.arange(clients)[:, None] % 10 == np.arange(10)).astype(np.int64)
    for name, counts in (("even", even), ("skewed", skewed)):
        draw(counts, list("abcdefghij"), tmp_path / f"{name}.png")
    differing = np.any(pixels(tmp_path / "even.png") != pixels(tmp_path / "skewed.png"), axis=2)
    assert differing.mean() > 0.3


def test_clients_without_images_are_drawn(tmp_path: Path) -> None:
    draw(np.array([[0, 0], [0, 5]]), ["a", "b"], tmp_path / "partition.png")
    assert (tmp_path / "partition.png").stat().st_size > 1000


def test_clients_are_sorted_by_dominant_class_and_empty_ones_last() -> None:
    counts = np.array([[0, 0, 0], [1, 0, 9], [4, 3, 0], [0, 2, 0], [8, 0, 0]])
    assert by_dominant_class(counts).tolist() == [4, 2, 3, 1, 0]


def test_ties_are_spread_over_the_classes() -> None:
    counts = np.ones((30, 3), np.int64)
    order = by_dominant_class(counts)
    # Clients lean to the three classes in turn: ten each, instead of all thirty to the first.
    blocks = [{int(client) % 3 for client in order[start : start + 10]} for start in (0, 10, 20)]
    assert blocks == [{2}, {1}, {0}]


def test_matplotlib_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, vitfleet.report.partition_plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
