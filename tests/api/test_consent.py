"""The API estimates what it starts: logged, never printed; what is too much is refused unless it is forced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import vitfleet
from vitfleet.costs.estimate import Available
from vitfleet.errors import UserError

SMALL: dict[str, Any] = {"rounds": 1, "fleet.clients": 2, "fleet.per_round": 1, "data.limit": 60, "train.epochs": 1}
LITTLE_MEMORY = Available(1000, None)


def test_estimate_is_logged_and_nothing_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "vitfleet")
    vitfleet.train("digits", overrides=SMALL, out=tmp_path / "run")
    assert any(message.startswith("estimated: about") for message in caplog.messages)
    assert "".join(capsys.readouterr()) == ""


def test_run_that_does_not_fit_is_refused_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vitfleet.api.run.available", lambda device, folder: LITTLE_MEMORY)
    refusal = r"not started: it needs about .* of memory, and 1000 B are free; .* force=True"
    with pytest.raises(UserError, match=refusal):
        vitfleet.train("digits", overrides=SMALL, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert vitfleet.train("digits", overrides=SMALL, out=tmp_path / "run", force=True).finished
    assert any("force=True: it needs about" in message for message in caplog.messages)


def test_comparison_is_estimated_as_a_whole(tmp_path: Path) -> None:
    """Each run would take less than two days, both together more; the images come from Python."""
    images, labels = torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.arange(40) % 2
    days = 1.2 * 86_400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitfleet.api.comparison.estimate_run", lambda config, size: estimate_of(size.samples, days))
        with pytest.raises(UserError, match=r"would take about 2\.4 days"):
            vitfleet.compare("digits", seeds=[0, 1], data=(images, labels), overrides=SMALL, out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


def estimate_of(samples: int, seconds: float) -> Any:
    from vitfleet.costs.estimate import RunEstimate

    assert samples == 32  # four fifths of the images that were passed
    return RunEstimate(seconds, 1, 1)
