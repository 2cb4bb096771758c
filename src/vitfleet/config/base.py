"""Base classes of configuration tables.

A component's parameter table derives from the base class of its kind. The first field of a tagged table is its tag: the
registry fixes it to the component's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from vitfleet.config.schema import Config


# Limits of every number whose key states none of its own. Products and quotients of a few such numbers are still finite
# floats, and a whole number is exact as a float.
MAX_INTEGER = 10**9
MAX_FLOAT = 1e30
MIN_FLOAT = 1e-30


class Table(BaseModel):
    """A table of the configuration: frozen; an unknown key is an error; every number has finite limits."""

    # Strict: `rounds = true` is a mistake, not one round.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @field_validator("*")
    @classmethod
    def _check_limits(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject numbers at the edge of what floats represent, also those of a plug-in's table."""
        rules = cls.model_fields[info.field_name or ""].metadata
        upper = any(isinstance(rule, Le | Lt) for rule in rules)
        lower = any(isinstance(rule, Ge | Gt) and _bound(rule) > 0 for rule in rules)
        for number in _numbers_in(value):
            _check_number(number, upper, lower)
        return value


def _bound(rule: Ge | Gt) -> float:
    return float(rule.ge if isinstance(rule, Ge) else rule.gt)  # type: ignore[arg-type]


def _numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers of a value: of a table's own, in lists and in tables of values."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(item)


def _check_number(number: int | float, has_upper: bool, has_lower: bool) -> None:
    """Check a number against the general limits, except those that its key replaces by its own."""
    most = MAX_INTEGER if isinstance(number, int) else MAX_FLOAT
    if (not has_upper and number > most) or number < -most:
        sign = "-" if number < 0 else ""
        raise PydanticCustomError("number_limit", f"Input should be {'at least' if sign else 'at most'} {sign}{most:g}")
    if isinstance(number, float) and not has_lower and 0 < abs(number) < MIN_FLOAT:
        raise PydanticCustomError("number_limit", f"Input should be 0 or at least {MIN_FLOAT:g} in absolute value")


class MethodParams(Table):
    """Parameters of a method: the table ``[method]``."""

    name: str = ""


class PartitionParams(Table):
    """Parameters of a partition: the table ``[data.partition]``."""

    kind: str = ""


class AggregationParams(Table):
    """Parameters of an aggregation rule: the table ``[aggregate]``, with the limits that every rule has."""

    rule: str = ""
    defence: Literal["auto", "clip", "off"] = Field(
        "auto",
        description="against devices that lie. clip: samples count up to the round's median, and weights "
        "are clipped around the round's median; auto: clip for a fleet of real devices, off in a simulation",
    )
    equal_weights: bool = Field(False, description="give every device the same weight, whatever samples it reports")
    clip_update: float | None = Field(
        None, gt=0, description="longest update: a longer one is scaled down (Euclidean norm)"
    )
    norm_factor: float | None = Field(
        None, gt=1, description="updates or features larger than this many times the round's median are rejected"
    )
    max_change: float | None = Field(
        100.0,
        gt=0,
        description="updates with a weight that changes by more than this many times its size are rejected; "
        "null: no limit",
    )
    max_ratio: float | None = Field(
        100.0,
        gt=1,
        description="updates larger than the model and than this many times the median of those accepted before, in "
        "this round and the last, are rejected; null: no limit",
    )
    max_samples: int | None = Field(
        10**8, ge=1, description="updates that report more samples are rejected; null: no limit"
    )

    @property
    def least_replies(self) -> int:
        """The fewest replies with which the rule can do its work; a round with fewer changes nothing."""
        return 1


class ServerOptimizerParams(Table):
    """Parameters of a server optimiser: the table ``[server]``."""

    optimizer: str = ""
    lr: float = Field(1.0, gt=0, description="learning rate of the server")

    @property
    def takes_aggregate(self) -> bool:
        """Whether the server's new weights are the aggregate itself, as without an optimiser."""
        return False


def _check_every(value: object) -> object:
    if value == "end" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("every", "Input should be a number of rounds, at least 1, or end")


class MetricParams(Table):
    """Parameters of a metric: a table ``[metrics.NAME]``."""

    #: Values that terminal tables and the table of a report show; empty: every number.
    shown: ClassVar[tuple[str, ...]] = ()
    #: Values that are fractions, 0…1, shown in percent.
    fractions: ClassVar[tuple[str, ...]] = ()
    #: Names of the axes of values that are lists (one axis) or matrices (rows, columns), for figures.
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    every: Annotated[int | Literal["end"], BeforeValidator(_check_every)] = Field(
        "end", description="rounds between two measurements, or `end`: after the last round only"
    )

    def is_due(self, round: int, is_last: bool) -> bool:
        """Return whether the metric is measured after a round. It always is after the last one."""
        return is_last or (self.every != "end" and round % self.every == 0)

    def check_config(self, config: Config) -> None:
        """Check the parameters against the rest of the configuration. By default nothing is checked.

        Raises
        ------
        ConfigError
            Names the key, its value and the remedy.
        """


class TrackerParams(Table):
    """Parameters of an experiment tracker: a table ``[trackers.NAME]``."""


class CallbackParams(Table):
    """Parameters of a callback: a table ``[callbacks.NAME]``."""
