"""What a client says of itself is checked against what its method declares."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import MakeContext
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.base import Method
from vitfleet.methods.continual.gradients.fedvit import FedVit, FedVitParams
from vitfleet.methods.reported import MAX_NUMBER, RejectedUpdateError, parse_numbers

HONEST: dict[str, Any] = {"samples": 3, "loss": 0.5}


@pytest.fixture
def fedvit(make_context: MakeContext) -> Method[Any]:
    return FedVit(FedVitParams(), make_context())


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        ({"loss": 1}, "its loss is 1"),
        ({"loss": float("nan")}, "its loss is nan"),
        ({"samples": True}, "its number of samples is True"),
        ({"samples": -1}, "its number of samples is -1"),
        ({"samples": 10**5000}, "too many digits"),
        ({"other": MAX_NUMBER + 1}, "its 'other' has a value"),
        ({"other": [1, float("inf")]}, "its 'other' has a value"),
        ({"x" * 101: 1}, "names of 100 characters"),
        ({f"x{i}": 1 for i in range(101)}, "at most 100 are allowed"),
        ({"other": [0] * 70_000}, "its list 'other' has 70000 numbers"),
        ({"stored": 3}, "its 'stored' is 3; expected: a list of whole numbers"),
        ({"stored": [1.5]}, "its 'stored' is"),
        ({"stored": [-1]}, "its 'stored' is"),
        ({"stored": [1, 2]}, "its 'stored' has 2 tasks"),
        ({"stored": [2**40]}, "the most samples are 2147483648"),
        ({"rotated": [1]}, "its 'rotated' is"),
        ({"rotated": 0.5}, "expected: a whole number ≥ 0"),
        ({"gradients": 0.5}, "expected: a list of numbers"),
    ],
)
def test_what_no_correct_client_reports_is_refused(fedvit: Method[Any], reported: dict[str, Any], reason: str) -> None:
    with pytest.raises(RejectedUpdateError) as refused:
        parse_numbers({**HONEST, **reported}, fedvit)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


def test_what_a_correct_client_reports_is_taken(fedvit: Method[Any], make_context: MakeContext) -> None:
    reported = {**HONEST, "stored": [7], "memory_bytes": 70, "rotated": 0, "gradients": [0.1, 0.2], "layers": [1]}
    assert parse_numbers(reported, fedvit) == reported
    own = {**HONEST, "undeclared": [0.5, 2]}  # a plug-in's number without a declaration
    assert parse_numbers(own, FedAvg(FedAvgParams(), make_context())) == own
