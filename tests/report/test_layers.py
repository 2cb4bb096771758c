"""TransFL's pictures: counted from records by hand, and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitfleet.report.layers import draw_layers, layer_maps
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


def test_shares_and_heads() -> None:
    maps = layer_maps([record(1, [[0, 1], [0, 2]]), record(2, [[1, 2], [1, 2]])])
    assert maps is not None
    assert maps.rounds == [1, 2]
    np.testing.assert_array_equal(maps.chosen, [[1, 0], [0.5, 1], [0.5, 1]])
    assert maps.heads is not None
    # mean of 10, 11, 20, 21 plus 0 … 5, two heads a layer
    np.testing.assert_allclose(maps.heads, 15.5 + np.arange(6).reshape(3, 2))


def test_a_method_that_chooses_no_layers_has_no_maps() -> None:
    assert layer_maps([RoundRecord(1, 0.1, 1.0, None, [ClientRecord(0, 1, 1, {"samples": 3})], 1, 1)]) is None


@pytest.mark.parametrize("rounds", [1, 70])
def test_the_picture_is_drawn(rounds: int, tmp_path: Path) -> None:
    maps = layer_maps(record(round, [[0, 1], [round % 3, 2]]) for round in range(1, rounds + 1))
    assert maps is not None
    draw_layers(maps, tmp_path / "layers.png")
    with Image.open(tmp_path / "layers.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(maxcolors=10**6) or []) > 20
