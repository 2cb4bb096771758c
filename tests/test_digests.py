"""Results stay what they were, bit for bit: see benchmarks/digests.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from digests import EXPORT, cases, compute, environment

FILES = sorted((Path(__file__).parent / "digests").glob("*.json"))
KNOWN = [json.loads(file.read_text()) for file in FILES]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*cases(), "flower"])
def test_final_states_and_records_are_unchanged(name: str) -> None:
    digests = next((known["digests"] for known in KNOWN if known["environment"] == environment()), None)
    if digests is None:
        pytest.skip(f"no digests were written on {environment()}")
    if name not in digests:
        pytest.skip(f"no digest of {name} was written on {environment()}")
    found, known = compute([name], EXPORT)[name], digests[name]
    # Of BCN, operations are counted since that were not before: on these machines its records were not written again.
    assert {part: found[part] for part in known} == known


def test_every_method_has_a_digest() -> None:
    from vitfleet.config.registry import METHODS

    assert set(METHODS.names()) <= cases().keys()
    # Those of a new method are written where it is made, and on other machines when somebody has one.
    assert any({*cases(), "flower"} == known["digests"].keys() for known in KNOWN)
    for known in KNOWN:
        assert known["digests"].keys() <= {*cases(), "flower"}
