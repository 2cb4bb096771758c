"""Declarations of the numbers that a method's clients report with their updates.

Generic code (the summary, the terminal, the report) reads these declarations instead of knowing any method's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

from vitfleet.message import Numbers

Reduction: TypeAlias = Literal["sum", "mean", "max"]
#: What a client may report: a whole number ≥ 0, any number, a list of either, or anything of these.
Form: TypeAlias = Literal["count", "number", "counts", "numbers", "any"]
REDUCTIONS: Mapping[Reduction, Callable[[list[int | float]], int | float]] = {"sum": sum, "mean": fmean, "max": max}


@dataclass(frozen=True)
class ClientMetric:
    """A number, or a list of numbers, that clients report with their updates.

    Attributes
    ----------
    name
        Its key among the numbers of a client's message and in the records.
    description
        What it is, as the label of a row in a table.
    reduction
        How the values of all clients and rounds become the one in the run's summary; ``None``: it is not summarised.
    warning
        Whether a summarised value other than zero is a warning; zero is then not worth a row in a table.
    form
        What it is; an update that reports anything else is rejected.
    """

    name: str
    description: str
    reduction: Reduction | None = None
    warning: bool = False
    form: Form = "any"


def reduce_client_metrics(metrics: Sequence[ClientMetric], reported: Iterable[Numbers]) -> dict[str, int | float]:
    """Return the summarised value of every metric that was reported at least once, in the order of declaration.

    Parameters
    ----------
    metrics
        The method's declarations.
    reported
        The numbers of every client's update, over all rounds.
    """
    values: dict[str, list[int | float]] = {metric.name: [] for metric in metrics if metric.reduction is not None}
    for numbers in reported:
        for name, column in values.items():
            value = numbers.get(name)
            if isinstance(value, int | float):
                column.append(value)
    return {
        metric.name: REDUCTIONS[metric.reduction](values[metric.name])
        for metric in metrics
        if metric.reduction is not None and values[metric.name]
    }
