"""Values of a round's record that callbacks watch, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitfleet.errors import UserError
from vitfleet.run.records import RoundRecord

EXAMPLES = "accuracy.global, accuracy.local, accuracy.loss, loss, task.average_accuracy, metrics.local_accuracy.mean"


def monitored_value(record: RoundRecord, name: str) -> float | None:
    """Return a number of a round's record by its dotted name; ``None`` if it was not measured in this round.

    Raises
    ------
    UserError
        No record has a number of this name.
    """
    value: Any = record
    for part in name.split("."):
        value = _child(value, part, name)
        if value is None:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"monitor = {name!r}: is not a number of a round's record; such are {EXAMPLES}")
    return float(value)


def _child(parent: Any, part: str, name: str) -> Any:
    if isinstance(parent, Mapping):
        return parent.get(part)
    for attribute in (part, f"{part}_"):  # `global` is a keyword: its field is `global_`
        if attribute in getattr(parent, "__dataclass_fields__", {}):
            return getattr(parent, attribute)
    raise UserError(f"monitor = {name!r}: a round's record has no {part!r}; it has {EXAMPLES}, for example")


@dataclass
class Best:
    """The best value so far and its round; both ``None`` before the first."""

    mode: Literal["max", "min"]
    min_delta: float = 0.0
    value: float | None = None
    round: int | None = None

    def update(self, value: float, round: int) -> bool:
        """Take in a round's value; return whether it is an improvement."""
        sign = 1 if self.mode == "max" else -1
        if self.value is not None and sign * (value - self.value) <= self.min_delta:
            return False
        self.value, self.round = value, round
        return True
