"""Results stay what they were, bit for bit: see benchmarks/digests.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from digests import EXPORT, cases, compute, environment

KNOWN = json.loads((Path(__file__).parent / "digests" / "digests.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*cases(), "flower"])
def test_final_states_and_records_are_unchanged(name: str) -> None:
    if KNOWN["environment"] != environment():
        pytest.skip(f"digests were written on {KNOWN['environment']}, this is {environment()}")
    assert compute([name], EXPORT)[name] == KNOWN["digests"][name]


def test_every_method_has_a_digest() -> None:
    from vitfleet.config.registry import METHODS

    assert set(METHODS.names()) <= set(KNOWN["digests"])
    assert {*cases(), "flower"} == set(KNOWN["digests"])
