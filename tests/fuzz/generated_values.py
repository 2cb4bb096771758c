"""Values that a careless or hostile hand writes into a configuration, drawn over the built schema."""

from __future__ import annotations

import math
import re
from typing import Any

from hypothesis import strategies as st

from vitfleet.config.base import MAX_FLOAT, MAX_INTEGER, MIN_FLOAT
from vitfleet.config.keys import Key, every_key

EDGES: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 3, 7, 10**6, 10**9, 10**9 + 1, 2**31, 2**63, 10**26, -(10**26)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 5e-324, 1e-300, 1e-30, 9e-31, 1e-12, 0.999999999999, 1e12, 1e30, 1.1e30, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf),
)
WORDS = ("", "x", "all", "nan", "../../etc/passwd", "é\n", "-1", "true", "a" * 300)

numbers = st.one_of(st.sampled_from(EDGES), st.integers(), st.floats(), st.integers(0, 20), st.floats(0, 1))
scalars = st.one_of(numbers, numbers, numbers, st.sampled_from(WORDS), st.booleans(), st.none())
values: st.SearchStrategy[Any] = st.one_of(
    scalars,
    scalars,
    scalars,
    st.lists(numbers, max_size=3),
    st.dictionaries(st.sampled_from(WORDS), scalars, max_size=2),
)


def keys_by_variant() -> list[tuple[Key, str]]:
    """Return every key of the schema and the override that selects its variant, empty where it needs none."""
    tags = {
        "method.": "method.name",
        "data.partition.": "data.partition.kind",
        "fleet.schedule.": "fleet.schedule.kind",
    }
    tags |= {"aggregate.": "aggregate.rule", "server.": "server.optimizer"}
    found = []
    for key in every_key():
        tag = next((tag for prefix, tag in tags.items() if key.name.startswith(prefix)), "")
        found.append((key, f"{tag}={key.variant}" if key.variant else ""))
    return found


def as_text(value: Any) -> str:
    """Return a value as it is written after ``-o KEY=``."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r} = {as_text(item)}" for name, item in value.items()) + "}"
    return str(value)


def accepted_values(key: Key) -> list[Any]:
    """Return values that a key may have, as far as its row of the table tells; numbers at its limits and between."""
    if "number" not in key.allowed or "by" in key.allowed or "list" in key.allowed:
        default: Any = {"true": True, "false": False, "null": None, "{}": {}}.get(key.default, key.default)
        return [default, *(word.strip() for word in key.allowed.split(",") if "," in key.allowed)]
    bounds = {sign: float(bound) for sign, bound in re.findall(r"([≥>≤<]) (\S+)", key.allowed)}
    whole = "whole" in key.allowed
    most: float = MAX_INTEGER if whole else MAX_FLOAT
    low, high = bounds.get("≥", bounds.get(">", -most)), bounds.get("≤", bounds.get("<", most))
    candidates = [low, low + 1, low + 2, 3, high - 1, high] if whole else [low, MIN_FLOAT, 0.1, 0.5, 1 - 1e-12, high]
    inside = [n for n in candidates if low <= n <= high and n not in (bounds.get(">"), bounds.get("<"))]
    return [int(number) for number in inside] if whole else inside
