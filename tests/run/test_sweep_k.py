"""Runs that share their first rounds with another one are the same as runs of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vitfleet

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sweep_k.py"
OVERRIDES = ("method.stored_share=0.4", "data.limit=500", "data.tasks.rounds_per_task=1", "train.epochs=2")


@pytest.mark.long
def test_runs_that_continue_from_another_one_are_those_trained_alone(tmp_path: Path) -> None:
    options = [word for override in OVERRIDES for word in ("-o", override)]
    command = [sys.executable, str(SCRIPT), "fedvit-digits", "--k", "4", "2", "1", "--jobs", "3", "--out"]
    subprocess.run([*command, str(tmp_path / "k"), *options], check=True, capture_output=True)
    for k, ranking in ((1, "wasserstein"), (1, "angle"), (2, "angle")):
        keys = (*OVERRIDES, f"method.k={k}", f"method.task_ranking={ranking}")
        alone = vitfleet.train("fedvit-digits", overrides=keys, out=tmp_path / f"{k}-{ranking}")
        continued = tmp_path / "k" / f"fedvit k={k} task_ranking={ranking}-s0"
        assert (continued / "records.jsonl").read_bytes() == (alone.path / "records.jsonl").read_bytes()
