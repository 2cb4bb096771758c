"""What clients report of the gradient projections of a training: declarations, and the numbers of a finished Fit."""

from __future__ import annotations

from vitfleet.message import Numbers
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.training.objective import FitResult
from vitfleet.training.surgery import COUNT_NAMES, OBTUSE


def projection_metrics(prefix: str = "", steps: str = "steps") -> tuple[ClientMetric, ...]:
    """Declare what is counted of the projections of a training.

    Parameters
    ----------
    prefix
        Of the metrics' names.
    steps
        What the steps of this training are called.
    """
    return (
        ClientMetric(f"{prefix}integrated", f"{steps} with reference gradients", "sum", form="count"),
        ClientMetric(f"{prefix}rotated", f"{steps} with a rotated gradient", "sum", form="count"),
        ClientMetric(
            f"{prefix}degenerate", f"{steps} with a zero or linearly dependent gradient", "sum", True, "count"
        ),
        ClientMetric(f"{prefix}unsolved", f"{steps} whose projection was not solved", "sum", True, "count"),
    )


def projection_counts(result: FitResult, prefix: str = "") -> Numbers:
    """Return what was counted of the projections of a training.

    Raises
    ------
    ArithmeticError
        ``method.check`` found a step whose angle to a reference gradient is obtuse.
    """
    obtuse = int(result.observed[OBTUSE]) if OBTUSE in result.observed else 0
    if obtuse:
        raise ArithmeticError(f"method.check: {obtuse} of {result.steps} steps went against a reference gradient")
    return {f"{prefix}{name}": int(result.observed[name]) for name in COUNT_NAMES if name in result.observed}
