"""Base classes of configuration tables.

A component's parameter table derives from the base class of its kind. The first field of a tagged table is its tag: the
registry fixes it to the component's name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class MetricParams(Table):
    """Parameters of a metric: a table ``[metrics.NAME]``."""

    every: int | Literal["end"] = Field("end", description="rounds between measurements, or `end`: the last round only")


class TrackerParams(Table):
    """Parameters of an experiment tracker: a table ``[trackers.NAME]``."""


class CallbackParams(Table):
    """Parameters of a callback: a table ``[callbacks.NAME]``."""
