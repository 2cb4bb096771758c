"""Base classes of configuration tables.

A component's parameter table derives from the base class of its kind. The first field of a tagged table is its tag: the
registry fixes it to the component's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from vitfleet.config.schema import Config


class Table(BaseModel):
    """A table of the configuration: frozen; an unknown key is an error."""

    # Strict: `rounds = true` is a mistake, not one round.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class MethodParams(Table):
    """Parameters of a method: the table ``[method]``."""

    name: str = ""


class PartitionParams(Table):
    """Parameters of a partition: the table ``[data.partition]``."""

    kind: str = ""


class AggregationParams(Table):
    """Parameters of an aggregation rule: the table ``[aggregate]``, with the limits that every rule has."""

    rule: str = ""
    clip: float | None = Field(None, gt=0, description="longest update: a longer one is scaled down (Euclidean norm)")
    max_norm: float | None = Field(None, gt=0, description="longest update: a longer one is rejected (Euclidean norm)")
    norm_factor: float | None = Field(
        None, gt=1, description="updates or features larger than this many times the round's median are rejected"
    )
    max_samples: int | None = Field(None, ge=1, description="updates that report more samples are rejected")


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
        """Check the parameters against the rest of the configuration: nothing by default.

        Raises
        ------
        ConfigError
            Names the key, its value and the remedy.
        """


class TrackerParams(Table):
    """Parameters of an experiment tracker: a table ``[trackers.NAME]``."""


class CallbackParams(Table):
    """Parameters of a callback: a table ``[callbacks.NAME]``."""
