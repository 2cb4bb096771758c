"""Estimates of runs as text."""

from __future__ import annotations

from vitfleet.costs.estimate import Available, RunEstimate
from vitfleet.report.units import format_bytes, format_seconds

DAY = 86_400.0
MANY_DAYS = 2.0


def estimate_line(estimate: RunEstimate) -> str:
    """Return what runs will take, in a line: ``about 2.5 min, 540 MiB of memory, 12 MiB on disk``."""
    return (
        f"about {format_seconds(estimate.seconds)}, {format_bytes(estimate.memory_bytes)} of {estimate.memory_kind}, "
        f"{format_bytes(estimate.disk_bytes)} on disk"
    )


def shortage(estimate: RunEstimate, free: Available) -> str | None:
    """Return what is missing for runs, with the numbers; ``None`` if there is enough, or not known how much."""
    missing = [
        f"{format_bytes(needed)} of {what}, and {format_bytes(found)} are free"
        for what, needed, found in (
            (estimate.memory_kind, estimate.memory_bytes, free.memory_bytes),
            ("disk", estimate.disk_bytes, free.disk_bytes),
        )
        if found is not None and needed > found
    ]
    return f"needs about {'; '.join(missing)}" if missing else None


def too_much(estimate: RunEstimate, free: Available) -> str | None:
    """Return why runs should not be started without consent; ``None`` in most cases."""
    days = estimate.seconds / DAY
    problems = [f"would take about {days:,.3g} days"] if days > MANY_DAYS else []
    if missing := shortage(estimate, free):
        problems.append(missing)
    return f"it {' and '.join(problems)}" if problems else None
