"""Fault injection on real processes: small forms of benchmarks/chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import METHODS, TINY, FaultPlan, check, run_plan

KILLED, FALSE = 0, 1


@pytest.mark.timeout(900)  # a busy machine takes minutes to start so many processes
@pytest.mark.parametrize(
    ("names", "last_fault", "deadline"),
    [
        # The round of a killed client lasts until the deadline. The first round, with all starts, must be shorter.
        pytest.param(("garden", "kitchen"), "shape", 20.0, marks=pytest.mark.long),
        # An update that is too large is an outlier only among three or more.
        pytest.param(("garden", "kitchen", "porch"), "scale", 30.0, marks=pytest.mark.long),
    ],
)
def test_run_with_false_updates_and_killed_processes_equals_run_without_those_replies(
    names: tuple[str, ...], last_fault: str, deadline: float, tmp_path: Path
) -> None:
    """One client sends false updates, another is killed, then the server is killed."""
    plan = FaultPlan(
        names=names,
        rounds=3,
        overrides=(*TINY, *METHODS["transfl"]),
        false_updates={(1, FALSE): "nan", (3, FALSE): last_fault},
        stopped={},
        killed={2: KILLED},
        server_killed=3,  # a new SuperLink accepts the killed client again at once
        deadline=deadline,
    )
    run_plan(plan, tmp_path)
    failures = check(plan, tmp_path)
    assert len(failures) < plan.rounds * len(plan.names), "at least one reply was used"
