"""The figure of a data partition, for fleets of different sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.runs import by_dominant_class, partition_heat_map

pytest.importorskip("matplotlib")


def draw(counts: NDArray[np.int64], folder: Path) -> NDArray[np.uint8]:
    class_names = [f"class {index}" for index in range(counts.shape[1])]
    (path,) = draw_files(partition_heat_map("partition", counts, class_names), folder, endings=("png",))
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("clients", "num_classes"), [(1, 1), (2, 3), (10, 10), (60, 30), (61, 31), (100, 100), (10_000, 10)]
)
def test_partition_is_drawn_for_every_fleet_size(clients: int, num_classes: int, tmp_path: Path) -> None:
    image = draw(np.random.default_rng(0).poisson(3, (clients, num_classes)).astype(np.int64), tmp_path)
    assert min(image.shape[:2]) > 300
    assert image.std() > 5


@pytest.mark.parametrize("clients", [10, 100])
def test_drawn_partition_distinguishes_even_from_skewed(clients: int, tmp_path: Path) -> None:
    even = np.full((clients, 10), 10, np.int64)
    skewed = 100 * (np.arange(clients)[:, None] % 10 == np.arange(10)).astype(np.int64)
    first, second = draw(even, tmp_path), draw(skewed, tmp_path)
    assert np.any(first != second, axis=2).mean() > 0.3


def test_partition_with_clients_without_images_says_so(tmp_path: Path) -> None:
    counts = np.array([[0, 0], [0, 1200]])
    assert partition_heat_map("partition", counts, ["a", "b"]).title == (
        "1,200 training images on 2 clients, 1 without images"
    )
    assert draw(counts, tmp_path).std() > 5


def test_by_dominant_class_puts_clients_without_images_last() -> None:
    counts = np.array([[0, 0, 0], [1, 0, 9], [4, 3, 0], [0, 2, 0], [8, 0, 0]])
    assert by_dominant_class(counts).tolist() == [4, 2, 3, 1, 0]


def test_by_dominant_class_spreads_ties_over_classes() -> None:
    counts = np.ones((30, 3), np.int64)
    order = by_dominant_class(counts)
    # Ten clients per class, instead of all thirty for the first.
    blocks = [{int(client) % 3 for client in order[start : start + 10]} for start in (0, 10, 20)]
    assert blocks == [{2}, {1}, {0}]


def test_import_does_not_load_matplotlib() -> None:
    code = "import sys, vitfleet.report.figures.folder; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
