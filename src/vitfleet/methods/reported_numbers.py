"""The numbers that a client reports with its update, parsed into what its method declares before anything uses them."""

from __future__ import annotations

import math
from typing import Any

from vitfleet.errors import shown
from vitfleet.message import Number, Numbers
from vitfleet.methods.base import Method, RejectedUpdateError
from vitfleet.methods.client_metrics import ClientMetric

MAX_NUMBER = 2**53  # the largest up to which a float represents every integer
MAX_LIST_LENGTH = 65536
MAX_NAMES = 100
MAX_NAME_LENGTH = 100  # characters
SHOWN = 80  # characters of a wrong value in a reason: it is written into the records


def parse_numbers(numbers: Numbers, method: Method[Any]) -> dict[str, Number]:
    """Return a client's numbers as the method declares them.

    Raises
    ------
    RejectedUpdateError
        Names the number, its value and what is allowed.
    """
    check_numbers(numbers)
    for metric in method.client_metrics:
        if metric.name in numbers:
            _check_form(metric, numbers[metric.name])
    method.check_reported(numbers)
    return dict(numbers)


def check_numbers(numbers: Numbers) -> None:
    """Reject numbers that no correct client of any method sends: they enter sums and the records.

    Raises
    ------
    RejectedUpdateError
        Names the number, its value and what is allowed.
    """
    if len(numbers) > MAX_NAMES or any(len(name) > MAX_NAME_LENGTH for name in numbers):
        raise RejectedUpdateError(
            f"it reports {len(numbers)} numbers; at most {MAX_NAMES} are allowed, with names of {MAX_NAME_LENGTH} "
            "characters"
        )
    loss = numbers.get("loss", 0.0)  # a client that trains nothing has none
    samples = numbers.get("samples")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise RejectedUpdateError(f"its loss is {shown(loss, SHOWN)}, not a finite number")
    if not _is_count(samples):
        raise RejectedUpdateError(f"its number of samples is {shown(samples, SHOWN)}, not an integer ≥ 0")
    for name, value in numbers.items():
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_LIST_LENGTH:
            raise RejectedUpdateError(
                f"its list {name!r} has {len(items)} numbers; at most {MAX_LIST_LENGTH} are allowed"
            )
        if not all(_is_number(item) for item in items):
            raise RejectedUpdateError(f"its {name!r} has a value that is no number between ±{MAX_NUMBER}")


def _check_form(metric: ClientMetric, value: Number) -> None:
    """Reject a value that does not have the form that its method declares."""
    form, is_list = metric.form, isinstance(value, list)
    if form == "any":
        return
    items = value if isinstance(value, list) else [value]
    if is_list == form.endswith("s") and (form.startswith("number") or all(map(_is_count, items))):
        return
    expected = {"count": "a whole number ≥ 0", "number": "a number", "counts": "a list of whole numbers ≥ 0"}
    raise RejectedUpdateError(
        f"its {metric.name!r} is {shown(value, SHOWN)}; expected: {expected.get(form, 'a list of numbers')}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_count(value: object) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0
