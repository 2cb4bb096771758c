"""Draw a comparison's curves for a page of results: accuracy by round, mean over seeds with its spread; and as CSV.

Example::

    vitfleet compare transfl-cifar10 --method standalone --method fedavg --method transfl --seeds 0,1,2 --out both
    python benchmarks/plot_curves.py both docs/results/transfl-cifar10

writes `docs/results/transfl-cifar10.png` and `.csv`. A comparison that was stopped is drawn as far as it came.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vitfleet.run.compare import read_members
from vitfleet.run.records import read_records

COLOURS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c", "#64748b"]
DASHES = ["-", "--", ":"]  # a colour comes again with the next of these
PLAIN = {"local": "Clients at home: own model, own test images", "global": "Common test set"}
TASKS = {"average_accuracy": "Average accuracy on the tasks learned", "forgetting": "Forgetting"}


@dataclass(frozen=True)
class Point:
    """What was measured after a round, or a task, of a run; shares 0…1."""

    name: str
    seed: int
    at: int
    values: dict[str, float | None]


def read(comparison: Path, tasks: bool) -> Iterator[Point]:
    """Read every run of a comparison as far as it came."""
    for member in read_members(comparison):
        folder = member.folder(comparison)
        for record in read_records(folder) if (folder / "records.jsonl").exists() else ():
            if tasks and record.task is not None:
                values = {kind: getattr(record.task, kind) for kind in TASKS}
                yield Point(member.name, member.config.seed, record.task.task, values)
            elif not tasks and record.accuracy is not None:
                values = {"local": record.accuracy.local, "global": record.accuracy.global_}
                yield Point(member.name, member.config.seed, record.round, values)


def write_csv(points: list[Point], step_kinds: list[str], label: str, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "seed", label, *step_kinds])
        for one in points:
            cells = ["" if one.values[kind] is None else f"{one.values[kind]:.5f}" for kind in step_kinds]
            writer.writerow([one.name, one.seed, one.at, *cells])


def draw(points: list[Point], step_kinds: dict[str, str], label: str, path: Path) -> None:
    found: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for one in points:
        for kind, value in one.values.items():
            if value is not None:
                found[kind][one.name][one.at].append(100 * value)
    names = list(dict.fromkeys(one.name for one in points))
    styles = {
        name: {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at // len(COLOURS) % len(DASHES)]}
        for at, name in enumerate(names)
    }
    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (kind, title) in zip(figure.subplots(1, 2), step_kinds.items(), strict=True):
        for name, places in found[kind].items():
            x = np.array(sorted(places))
            mean = np.array([np.mean(places[at]) for at in x])
            spread = np.array([np.std(places[at], ddof=1) if len(places[at]) > 1 else 0 for at in x])
            axis.plot(x, mean, label=name, linewidth=1.8, **styles[name])
            axis.fill_between(x, mean - spread, mean + spread, color=styles[name]["color"], alpha=0.12, linewidth=0)
        axis.set(title=title, xlabel=label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("%")
    # Beside the axes, where it hides no curve, in the order in which the curves of one figure end.
    by = 0 if "forgetting" in step_kinds else 1
    lines = dict(zip(*reversed(figure.axes[by].get_legend_handles_labels()), strict=True))
    best_first = sorted(lines, key=lambda name: -float(lines[name].get_ydata()[-1]))
    figure.legend([lines[name] for name in best_first], best_first, loc="outside right center", frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("target", type=Path, help="where they go, without an ending")
    args = parser.parse_args()
    tasks = read_members(args.comparison)[0].config.data.tasks is not None
    step_kinds, label = (TASKS, "task") if tasks else (PLAIN, "round")
    points = list(read(args.comparison, tasks))
    write_csv(points, list(step_kinds), label, args.target.with_suffix(".csv"))
    draw(points, step_kinds, label, args.target.with_suffix(".png"))


if __name__ == "__main__":
    main()
