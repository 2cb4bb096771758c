"""Costs in the terminal: of a client's round on each device, with the meaning of the columns, and of a run to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from vitfleet.config.fleet import DeviceName
from vitfleet.costs.estimate import Available, RunEstimate
from vitfleet.costs.fitting import Remedy
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, MEGABYTE, RESERVED_BYTES
from vitfleet.costs.report import CostReport
from vitfleet.report.console.results import plain_table
from vitfleet.report.units import UNKNOWN, format_bytes, format_count, format_seconds, format_times

MAX_DEVICE_COLUMNS = 7  # with the methods' names, as many as 80 columns hold
TOO_LARGE = "too large"
DAY = 86_400.0  # seconds
MANY_DAYS = 2.0


# Of each column: its heading, its meaning, and its text for a method, or for a method on a device.
_METHOD_COLUMNS: Sequence[tuple[str, str, Callable[[CostReport], str]]] = (
    ("GMACs", "multiply-adds of the forward passes, in billions, per image", lambda of: f"{of.forward_gmac:.3g}"),
    (
        "GFLOPs",
        "operations of all passes, in billions, per image seen in training",
        lambda of: f"{of.train_gflops:.3g}",
    ),
    ("ratio", "GFLOPs of full training on whole images, divided by these", lambda of: f"{of.train_ratio_to_full:.2f}"),
    ("trained", "number of parameters that are trained", lambda of: format_count(of.trainable_params)),
    ("memory", "peak of a training step with train.batch_size = {}", lambda of: format_bytes(of.peak_memory_bytes)),
    ("upload", "what a client sends per round", lambda of: format_bytes(of.up_bytes)),
    ("download", "what a client receives per round", lambda of: format_bytes(of.down_bytes)),
    ("once", "what a client receives once, before its first round", lambda of: format_bytes(of.first_bytes)),
)
_DEVICE_LEGEND = {
    "has": "the device's whole memory",
    "training": f"whether it fits into this memory, with {format_bytes(RESERVED_BYTES)} for the system",
    "per round": "time to receive, train and send, an estimate",
    "traffic": "upload and download in a day, of a client that is in every round",
}


def print_costs(
    console: Console, reports: Sequence[CostReport], devices: Sequence[DeviceName], remedies: Sequence[Remedy]
) -> None:
    """Print the costs of methods, then of the first one on every device, and what would fit where it does not."""
    first = reports[0]
    meanings = {heading: meaning.format(first.batch_size) for heading, meaning, _ in _METHOD_COLUMNS}
    for table in (cost_table(reports), _legend(meanings), device_table(first, devices), _legend(_DEVICE_LEGEND)):
        console.print(table)
        console.print()
    if len(reports) > 1 and len(devices) <= MAX_DEVICE_COLUMNS:
        console.print(round_times_table(reports, devices))
        console.print()
    for line in [*head_lines(reports), *views_lines(reports), *remedy_lines(reports, remedies)]:
        console.print(line, highlight=False, markup=False)


def cost_table(reports: Sequence[CostReport]) -> Table:
    """Return the costs of methods for a client, one row per method."""
    table = plain_table([heading for heading, _, _ in _METHOD_COLUMNS])
    for report in reports:
        table.add_row(report.method, *(text(report) for _, _, text in _METHOD_COLUMNS))
    return table


def device_table(report: CostReport, devices: Sequence[DeviceName]) -> Table:
    """Return the time of a client's round on each device."""
    title = f"{report.method}: a round with {report.samples:,} images, {report.round_gflops:,.3g} GFLOPs"
    table = plain_table(["device", *_DEVICE_LEGEND], padding=2, title=title)
    table.columns[1].justify = "left"
    for name in devices:
        cost, profile = report.devices[name], HARDWARE_PROFILES[name]
        cells = [TOO_LARGE, UNKNOWN, UNKNOWN]
        if cost["fits_memory"]:
            per_day = format_bytes(MEGABYTE * cost["megabytes_a_day"])
            cells = ["fits", format_seconds(cost["round_seconds"]), per_day]
        table.add_row(name, profile.title, format_bytes(profile.memory_bytes), *cells)
    return table


def round_times_table(reports: Sequence[CostReport], devices: Sequence[DeviceName]) -> Table:
    """Return the time of a round of every method on every device."""
    table = plain_table(devices, title=f"time per round ({TOO_LARGE}: for the device's memory)")
    for report in reports:
        costs = [report.devices[name] for name in devices]
        cells = [format_seconds(cost["round_seconds"]) if cost["fits_memory"] else TOO_LARGE for cost in costs]
        table.add_row(report.method, *cells)
    return table


def head_lines(reports: Sequence[CostReport]) -> Iterator[str]:
    """Yield what solving the head costs a client, for each method with which it is solved."""
    for report in reports:
        for which, head in (("the head", report.head), ("the last head", report.last_head)):
            if head is not None:
                yield (
                    f"{report.method}: {which} is solved {format_times(head.times)} in a run; for it every client "
                    f"computes {head.gflops:,.3g} GFLOPs in {format_bytes(head.peak_memory_bytes)} of memory and sends "
                    f"{format_bytes(head.up_bytes)} each time"
                )


def views_lines(reports: Sequence[CostReport]) -> Iterator[str]:
    """Yield what cached views cost a client, for each method with which it keeps any."""
    for report in reports:
        if (views := report.views) is not None:
            yield (
                f"{report.method}: in its first round a client computes {views.views} views of its images once, "
                f"{views.gflops:,.3g} GFLOPs, and keeps {format_bytes(views.kept_bytes)}"
            )


def left_out_lines(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield which methods are in no table because the configuration is not one of theirs, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason.removeprefix(f"method.name = {name!r}: "), []).append(name)
    for reason, names in by_reason.items():
        yield f"not in these tables: {', '.join(names)} ({reason})"


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


def _legend(meanings: Mapping[str, str]) -> Table:
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
