"""What each method of a comparison needs to reach fractions of a reference method's final accuracy, as Markdown.

Example::

    vitfleet compare eftvit-cifar100-tiny --method eftvit --method fed-full --seeds 0,1,2 --out results \\
        -o fleet.devices.nano=1
    python benchmarks/targets.py results --reference fed-full --fractions 0.5,0.7,0.85

Accuracy is the global one, and the local one beside it: the mean over a round's clients, each with its own model on
its own test images. Rounds, bytes, operations and virtual time are those up to the first evaluation that reaches the
target: bytes of all messages, operations of all clients' trainings. Means over seeds; a target that not every seed
reaches is "–" with the number of seeds that do.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from plot_curves import add_rename_option, comparison_folder, new_names
from vitfleet.run.comparison.manifest import read_members
from vitfleet.run.records import read_records


@dataclass(frozen=True)
class Point:
    """An evaluation of a run, and what the run had cost by then."""

    round: int
    accuracy: float
    local: float | None
    gibibytes: float
    tera_ops: float
    hours: float | None


def read_run(folder: Path) -> list[Point]:
    """Return the evaluations of a run, finished or not."""
    points, gflops = [], 0.0
    for record in read_records(folder):
        gflops += sum(entry.gflops or 0.0 for entry in record.clients)
        if record.accuracy is None or record.accuracy.global_ is None:
            continue
        total_bytes = record.total_up_bytes + record.total_down_bytes
        hours = None if record.virtual_seconds is None else record.virtual_seconds / 3600
        points.append(
            Point(
                record.round, record.accuracy.global_, record.accuracy.local, total_bytes / 2**30, gflops / 1e3, hours
            )
        )
    return points


def first_reaching(points: list[Point], target: float) -> Point | None:
    """Return the first evaluation that reaches an accuracy."""
    return next((point for point in points if point.accuracy >= target), None)


def cost_cell(runs: list[list[Point]], target: float) -> str:
    """Return what the runs of a method need to reach an accuracy."""
    reached = [point for point in (first_reaching(points, target) for points in runs) if point is not None]
    if len(reached) < len(runs):
        return f"– ({len(reached)} of {len(runs)})" if reached else "–"
    round_, gibibytes, tera_ops = (
        statistics.mean(getattr(point, name) for point in reached) for name in ("round", "gibibytes", "tera_ops")
    )
    cell = f"{round_:.0f} · {gibibytes:.2f} GiB · {digits(tera_ops)} T"
    hours = [point.hours for point in reached if point.hours is not None]
    return f"{cell} · {duration(statistics.mean(hours))}" if hours else cell


def digits(value: float) -> str:
    """Return a number with at least two significant digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{digits(60 * hours)} min"


def percent(values: list[float]) -> str:
    """Return a mean in percent, with the standard deviation over seeds where there are several."""
    if not values:
        return ""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=comparison_folder)
    parser.add_argument("--reference", default="fed-full", help="the run's name in the comparison begins with this")
    parser.add_argument("--fractions", default="0.5,0.7,0.85")
    add_rename_option(parser)
    args = parser.parse_args()
    fractions = [float(text) for text in args.fractions.split(",")]
    runs: dict[str, list[list[Point]]] = defaultdict(list)
    for member in read_members(args.comparison):
        folder = member.folder(args.comparison)
        if points := read_run(folder):
            runs[member.name].append(points)
    names = new_names(runs, args.rename)
    references = [name for name in runs if name.startswith(args.reference)]
    if not references:
        raise SystemExit(f"no run whose name begins with {args.reference!r}; there are {', '.join(runs) or 'none'}")
    final = statistics.mean(points[-1].accuracy for points in runs[references[0]])
    targets = [fraction * final for fraction in fractions]
    heads = [f"to {100 * target:.1f} %: rounds · bytes · operations · virtual time" for target in targets]
    print(f"| method | seeds | rounds | global accuracy | best | local accuracy | {' | '.join(heads)} |")
    print("|---" * (6 + len(targets)) + "|")
    for name, all_points in runs.items():
        ends = [points[-1] for points in all_points]
        cells = [
            names[name],
            str(len(all_points)),
            f"{min(point.round for point in ends)}",
            percent([point.accuracy for point in ends]),
            percent([max(point.accuracy for point in points) for points in all_points]),
            percent([point.local for point in ends if point.local is not None]),
            *(cost_cell(all_points, target) for target in targets),
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
