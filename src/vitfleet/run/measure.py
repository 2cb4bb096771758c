"""Measure a run's configured metrics after a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitfleet.config.registry import METRICS
from vitfleet.errors import UserError
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.metric_context import MetricContext, MetricUnavailableError
from vitfleet.run.records import UNAVAILABLE, MetricValue, RoundRecord

if TYPE_CHECKING:
    from vitfleet.run.context import RunContext
    from vitfleet.run.state import RunState


def with_metrics(
    run: RunContext, state: RunState, record: RoundRecord, is_last: bool, progress: Progress = NO_PROGRESS
) -> RoundRecord:
    """Return a round's record with the metrics that are due after it and not measured yet.

    Parameters
    ----------
    is_last
        Whether the run ends with this round.
    """
    due = {
        name: params
        for name, params in run.config.metrics.items()
        if name not in record.metrics and params.is_due(record.round, is_last)
    }
    if not due:
        return record
    context = MetricContext(run, state, record, progress)
    measured = {name: _measure(name, params, context) for name, params in due.items()}
    return replace(record, metrics={**record.metrics, **measured})


def _measure(name: str, params: Any, context: MetricContext) -> dict[str, MetricValue]:
    try:
        values = METRICS[name].target(params, context)
    except MetricUnavailableError as reason:
        return {UNAVAILABLE: str(reason)}
    if not isinstance(values, Mapping):
        raise UserError(f"metric {name!r}: must return a mapping of values by name, not {type(values).__name__}")
    return {str(key): plain_value(value, f"{name}.{key}") for key, value in values.items()}


def plain_value(value: object, label: str) -> MetricValue:
    """Return a value as JSON can hold it; a number that is not finite becomes ``None``.

    Parameters
    ----------
    label
        Name of the metric and its value, for messages.
    """
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(item, label) for item in value]
    raise UserError(f"metric {label}: a value must be a number, a text or a list of them, not {type(value).__name__}")
