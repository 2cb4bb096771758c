"""Work without an end is seen before it starts: the estimate is shown, and what is too much needs consent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from conftest import TINY
from vitfleet.cli.base import app, confirm_run
from vitfleet.config import load_config
from vitfleet.costs.estimate import Available, RunEstimate
from vitfleet.errors import UserError
from vitfleet.report.console.costs import too_much

GIB = 2**30
DAY = 86_400


@pytest.mark.parametrize(
    ("seconds", "memory", "disk", "problem"),
    [
        (2 * DAY, 8 * GIB, 8 * GIB, None),
        (3 * DAY, 1, 1, "it would take about 3 days"),
        (1, 9 * GIB, 1, "it needs about 9.0 GiB of memory, and 8.0 GiB are free"),
        (1, 1, 9 * GIB, "it needs about 9.0 GiB of disk, and 8.0 GiB are free"),
    ],
)
def test_what_is_too_much(seconds: float, memory: int, disk: int, problem: str | None) -> None:
    assert too_much(RunEstimate(seconds, memory, disk), Available(8 * GIB, 8 * GIB)) == problem


def test_what_is_not_known_is_not_too_much() -> None:
    assert not too_much(RunEstimate(1, 9 * GIB, 9 * GIB), Available(None, None))


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def tiny(*overrides: str) -> list[str]:
    return [part for override in (*TINY, *overrides) for part in ("-o", override)]


WORK_WITHOUT_END = {
    "a million epochs of the server": [
        "method.name=eftvit",
        "method.local_layers=1",
        "method.server_epochs=1000000",
        "rounds=1000",
    ],
    "a million epochs": ["train.epochs=1000000", "rounds=1000"],
    "a thousand prompts, many rounds": ["method.name=fed-prompt", "method.prompts=1000", "rounds=1000000"],
}


@pytest.mark.parametrize("overrides", WORK_WITHOUT_END.values(), ids=WORK_WITHOUT_END.keys())
def test_work_without_an_end_is_refused_with_the_figure_where_nobody_can_answer(
    overrides: list[str], tmp_path: Path
) -> None:
    result = command("run", "digits", *tiny(*overrides), "--out", tmp_path / "run")
    assert isinstance(result.exception, UserError)
    assert "would take about" in str(result.exception)
    assert "days" in str(result.exception)
    assert "--yes" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_giant_on_digits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.costs.estimate.available", lambda device, folder: Available(16 * GIB, None))
    result = command("run", "digits", "-o", "model.name=vit_giant_patch14_clip_224", "--out", tmp_path / "run")
    assert isinstance(result.exception, UserError)
    assert "GiB of memory, and 16.0 GiB are free" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_is_refused_with_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.costs.estimate.available", lambda device, folder: Available(1000, None))
    result = command("run", "digits", *tiny(), "--out", tmp_path / "run")
    assert "MiB of memory, and 1000 B are free" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_comparison_is_estimated_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = RunEstimate(1.2 * DAY, 1, 1)
    monkeypatch.setattr("vitfleet.api.comparison.estimate_run", lambda config, size=None: half)
    result = command("compare", "digits", *tiny(), "--seeds", "0,1", "--out", tmp_path / "both")
    assert "about 2.4 days" in str(result.exception)
    assert not (tmp_path / "both").exists()


class Asked:
    """Answers the question, and counts it."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.times = answer, 0

    def __call__(self, *arguments: Any, **keywords: Any) -> bool:
        self.times += 1
        return self.answer


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_it_asks(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(answer)
    monkeypatch.setattr("vitfleet.costs.estimate.estimate_run", lambda config: RunEstimate(3 * DAY, 1, 1))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", asked)
    config = load_config("digits", TINY)
    if answer:
        confirm_run(config, Path("."), yes=False)
    else:
        with pytest.raises(UserError, match="not started"):
            confirm_run(config, Path("."), yes=False)
    assert asked.times == 1
    confirm_run(config, Path("."), yes=True)
    assert asked.times == 1


def test_the_estimate_is_shown_and_yes_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.costs.estimate.available", lambda device, folder: Available(1000, None))
    result = command("run", "digits", *tiny("rounds=1"), "--yes", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "estimated: about" in result.output
    assert (tmp_path / "run" / "summary.json").exists()
