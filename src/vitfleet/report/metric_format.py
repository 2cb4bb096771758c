"""Values of metrics as text, as each metric's parameter table declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitfleet.config.base import MetricParams
from vitfleet.config.registry import METRICS
from vitfleet.run.records import UNAVAILABLE


def metric_params(metric: str) -> type[MetricParams]:
    """Return a metric's parameter table; that of any metric if its plug-in is not loaded."""
    entry = METRICS.get(metric)
    params: type[MetricParams] = entry.params if entry is not None else MetricParams  # type: ignore[assignment]
    return params


def metric_title(metric: str, key: str = "") -> str:
    """Return the name of a metric, or of one of its values, in words: ``local accuracy worst 10 percent``."""
    return " ".join(name.replace("_", " ") for name in (metric, key) if name)


def shown_values(metric: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that tables show."""
    shown = metric_params(metric).shown
    return {
        key: value
        for key, value in values.items()
        if key != UNAVAILABLE and (key in shown if shown else isinstance(value, int | float))
    }


def shown_numbers(metric: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values that tables show."""
    return {key: value for key, value in shown_values(metric, values).items() if isinstance(value, int | float)}


def is_fraction(metric: str, key: str) -> bool:
    """Return whether a value is shown in percent."""
    return key in metric_params(metric).fractions


def format_number(metric: str, key: str, value: float, deviation: float | None = None) -> str:
    """Return a number, with its standard deviation over the seeds: ``87.3 ± 1.2 %``."""
    scale, digits, unit = (100, ".1f", " %") if is_fraction(metric, key) else (1, ".4g", "")
    spread = "" if deviation is None else f" ± {scale * deviation:{digits}}"
    return f"{scale * value:{digits}}{spread}{unit}"


def metric_text(metric: str, values: Mapping[str, Any]) -> str:
    """Return a metric's values in one line; the reason if it could not be measured."""
    if UNAVAILABLE in values:
        return f"not measured: {values[UNAVAILABLE]}"
    parts = []
    for key, value in shown_values(metric, values).items():
        if isinstance(value, int | float):
            parts.append(f"{key.replace('_', ' ')} {format_number(metric, key, value)}")
        elif value:
            parts.append("; ".join(map(str, value)) if isinstance(value, list) else str(value))
    return ", ".join(parts) or "–"
