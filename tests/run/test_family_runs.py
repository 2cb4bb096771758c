"""Whole runs of a family with batch norm: interrupted and resumed bit for bit, and its model for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vitfleet
from conftest import InterruptAfter

LEVIT: dict[str, Any] = {
    "model.name": "levit",
    "model.params": {"dims": [16, 24], "depths": [1, 1], "heads": [2, 2], "key_dim": 8, "stem_stride": 8},
    "model.image_size": 32,
    "model.depth": None,
    "model.patch_size": None,
    "data.limit": 60,
    "fleet.clients": 3,
    "fleet.per_round": 2,
    "rounds": 2,
}


def test_run_with_batch_norm_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = vitfleet.train("digits", overrides=LEVIT, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        vitfleet.train("digits", overrides=LEVIT, out=tmp_path / "parts", callbacks=[InterruptAfter(1)])
    resumed = vitfleet.load_run(tmp_path / "parts").resume()
    assert (tmp_path / "whole" / "records.jsonl").read_bytes() == (tmp_path / "parts" / "records.jsonl").read_bytes()
    images = torch.rand(3, 1, 8, 8)
    logits = whole.model()(images)
    assert torch.equal(resumed.model()(images), logits)
    alone = torch.cat([whole.model()(image[None]) for image in images])
    torch.testing.assert_close(alone, logits)  # no image depends on the others of its batch
