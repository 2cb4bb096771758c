"""Real processes in trouble: the small form of benchmarks/chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import METHODS, TINY, Plan, check, play

LIAR, KILLED = 1, 2


@pytest.mark.timeout(900)  # a busy machine takes minutes to start so many processes
def test_a_fleet_in_trouble_ends_where_the_honest_replies_lead(tmp_path: Path) -> None:
    """A device lies, another is killed, then the server: the run is that of the replies that were used, bit for bit."""
    plan = Plan(
        names=("garden", "kitchen", "porch"),
        rounds=3,
        overrides=(*TINY, *METHODS["transfl"]),
        lies={(1, LIAR): "nan", (3, LIAR): "scale"},
        stopped={},
        killed={2: KILLED},
        server_killed=3,  # a new SuperLink takes the device that was killed back at once
        deadline=30.0,
    )
    play(plan, tmp_path)
    left_out = check(plan, tmp_path)
    assert len(left_out) < plan.rounds * len(plan.names)  # somebody was heard
