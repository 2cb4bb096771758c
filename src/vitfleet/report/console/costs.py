"""Costs in the terminal: of a client's round on each device, with the meaning of the columns, and of a run to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from vitfleet.config.fleet import DeviceName
from vitfleet.costs.estimate import Available, RunEstimate
from vitfleet.costs.fitting import Remedy
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, RESERVED_BYTES
from vitfleet.costs.report import CostReport
from vitfleet.report.console.results import plain_table
from vitfleet.report.units import format_bytes, format_count, format_seconds

MAX_DEVICE_COLUMNS = 7  # with the methods' names, as many as 80 columns hold
TOO_LARGE = "too large"
DAY = 86_400.0  # seconds
MANY_DAYS = 2.0


# Heading, meaning and text of each column: of the costs of a method, and of a device in the costs of one method.
_COSTS: Sequence[tuple[str, str, Callable[[CostReport], str]]] = (
    ("GMACs", "multiply-adds of a forward pass, in billions, per image", lambda cost: f"{cost.forward_gmac:.3g}"),
    ("GFLOPs", "operations of a forward and backward pass, in billions, per image", lambda cost: f"{cost.train_gflops:.3g}"),
    ("ratio", "GFLOPs of full training on whole images, divided by these", lambda cost: f"{cost.train_ratio_to_full:.2f}"),
    ("trained", "number of parameters that are trained", lambda cost: format_count(cost.trainable_params)),
    ("memory", "peak of a training step with this train.batch_size", lambda cost: format_bytes(cost.peak_memory_bytes)),
    ("upload", "what a client sends per round", lambda cost: format_bytes(cost.up_bytes)),
    ("download", "what a client receives per round", lambda cost: format_bytes(cost.down_bytes)),
    ("once", "what a client receives once, before its first round", lambda cost: format_bytes(cost.first_bytes)),
)
def print_costs(
    console: Console, reports: Sequence[CostReport], devices: Sequence[DeviceName], remedies: Sequence[Remedy]
) -> None:
    """Print the costs of methods, then of the first one on every device, and what would fit where it does not."""
    first = reports[0]
    for table in (cost_table(reports), cost_legend(first), device_table(first, devices), device_legend()):
        console.print(table)
        console.print()
    if len(reports) > 1 and len(devices) <= MAX_DEVICE_COLUMNS:
        console.print(round_times_table(reports, devices))
        console.print()
    for line in remedy_lines(reports, remedies):
        console.print(line, highlight=False, markup=False)


def cost_table(reports: Sequence[CostReport]) -> Table:
    """Return the costs of methods for a client, one row per method."""
    table = plain_table(None, ["GMACs", "GFLOPs", "ratio", "trained", "memory", "upload", "download", "once"])
    for report in reports:
        table.add_row(
            report.method,
            f"{report.forward_gmac:.3g}",
            f"{report.train_gflops:.3g}",
            f"{report.train_ratio_to_full:.2f}",
            format_count(report.trainable_params),
            format_bytes(report.peak_memory_bytes),
            format_bytes(report.up_bytes),
            format_bytes(report.down_bytes),
            format_bytes(report.first_bytes),
        )
    return table


def cost_legend(report: CostReport) -> Table:
    """Return the meaning of every column of the costs."""
    return _legend(
        {
            "GMACs": "multiply-adds of a forward pass, in billions, per image",
            "GFLOPs": "operations of a forward and backward pass, in billions, per image",
            "ratio": "GFLOPs of full training on whole images, divided by these",
            "trained": "number of parameters that are trained",
            "memory": f"peak of a training step with train.batch_size = {report.batch_size}",
            "upload, download": "what a client sends and receives per round",
            "once": "what a client receives once, before its first round",
        }
    )


def device_table(report: CostReport, devices: Sequence[DeviceName]) -> Table:
    """Return the time of a client's round on each device."""
    title = f"{report.method}: a round with {report.samples:,} images, {report.round_gflops:,.3g} GFLOPs"
    table = plain_table(None, ["device", "has", "training", "per round", "MB per day"], padding=2)
    table.columns[1].justify = "left"
    table.title, table.title_justify = title, "left"
    for name in devices:
        cost, profile = report.devices[name], HARDWARE_PROFILES[name]
        fits = "fits" if cost["fits_memory"] else TOO_LARGE
        per_day = f"{cost['megabytes_a_day']:,.0f}" if cost["fits_memory"] else "–"
        seconds = format_seconds(cost["round_seconds"]) if cost["fits_memory"] else "–"
        table.add_row(name, profile.title, format_bytes(profile.memory_bytes), fits, seconds, per_day)
    return table


def device_legend() -> Table:
    """Return the meaning of every column of the devices."""
    return _legend(
        {
            "has": "the device's whole memory",
            "training": f"whether it fits into this memory, with {format_bytes(RESERVED_BYTES)} for the system",
            "per round": "time to receive, train and send, an estimate",
            "MB per day": "upload and download of a client that is in every round",
        }
    )


def round_times_table(reports: Sequence[CostReport], devices: Sequence[DeviceName]) -> Table:
    """Return the time of a round of every method on every device."""
    table = plain_table(None, devices)
    table.title, table.title_justify = f"time per round ({TOO_LARGE}: for the device's memory)", "left"
    for report in reports:
        costs = [report.devices[name] for name in devices]
        cells = [format_seconds(cost["round_seconds"]) if cost["fits_memory"] else TOO_LARGE for cost in costs]
        table.add_row(report.method, *cells)
    return table


def remedy_lines(reports: Sequence[CostReport], remedies: Sequence[Remedy]) -> Iterator[str]:
    """Yield what would fit, for each device that cannot hold the training of the first report."""
    by_changes: dict[tuple[str, ...], list[str]] = {}
    for remedy in remedies:
        changes = _changes(remedy, reports[0].method, len(reports) > 1)
        by_changes.setdefault(changes, []).append(HARDWARE_PROFILES[remedy.device].title)
    for changes, titles in by_changes.items():
        yield f"{reports[0].method} does not fit into: {'; '.join(titles)}. Each of these would:"
        yield from (f"  {change}" for change in changes)


def _changes(remedy: Remedy, method: str, compared: bool) -> tuple[str, ...]:
    """Return the changes after which a training fits; ``compared``: whether there are reports of other methods."""
    changes = []
    if remedy.batch_size is not None:
        changes.append(f"-o train.batch_size={remedy.batch_size}")
    if remedy.mask_ratio is not None:
        # With the method: the ratio of a configuration is that of its own method, others are reported with theirs.
        changes.append(f"-o method.name={method} -o train.mask_ratio={remedy.mask_ratio}")
    if remedy.methods:
        changes.append(f"another method: {', '.join(remedy.methods)}")
    elif not compared:
        changes.append("perhaps another method: leave out --method to see which")
    return (*changes, "a smaller model (model.name, model.depth, model.image_size)")


def _legend(meanings: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), style="dim")
    for name, meaning in meanings.items():
        table.add_row(name, meaning)
    return table


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
