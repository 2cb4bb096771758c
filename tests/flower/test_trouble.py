"""Real processes in trouble: small forms of benchmarks/chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import METHODS, TINY, Plan, check, play

KILLED, LIAR = 0, 1


@pytest.mark.timeout(900)  # a busy machine takes minutes to start so many processes
@pytest.mark.parametrize(
    ("names", "last_lie", "deadline"),
    [
        # A killed device's round lasts until its deadline. The first round, which starts everything, must be shorter.
        (("garden", "kitchen"), "shape", 20.0),
        # Who is too large stands out of no fewer than three.
        pytest.param(("garden", "kitchen", "porch"), "scale", 30.0, marks=pytest.mark.long),
    ],
)
def test_a_fleet_in_trouble_ends_where_the_honest_replies_lead(
    names: tuple[str, ...], last_lie: str, deadline: float, tmp_path: Path
) -> None:
    """A device lies, another is killed, then the server: the run is that of the replies that were used, bit for bit."""
    plan = Plan(
        names=names,
        rounds=3,
        overrides=(*TINY, *METHODS["transfl"]),
        lies={(1, LIAR): "nan", (3, LIAR): last_lie},
        stopped={},
        killed={2: KILLED},
        server_killed=3,  # a new SuperLink takes the device that was killed back at once
        deadline=deadline,
    )
    play(plan, tmp_path)
    left_out = check(plan, tmp_path)
    assert len(left_out) < plan.rounds * len(plan.names)  # somebody was heard
