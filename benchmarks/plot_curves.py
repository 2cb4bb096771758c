"""Draw the curves of a comparison for a page of results, mean and standard deviation over seeds, and write them as CSV.

Example::

    vitfleet compare transfl-cifar10 --method standalone --method fedavg --method transfl --seeds 0,1,2 --out both
    python benchmarks/plot_curves.py both docs/results/transfl-cifar10

writes `docs/results/transfl-cifar10.png` and `.csv`. An unfinished comparison is drawn up to its last round.
`--rename OLD NEW` replaces a configuration's name, here and in `targets.py`.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vitfleet.files import COMPARISON_FILE
from vitfleet.run.comparison.manifest import read_members
from vitfleet.run.records import read_records

COLOURS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c", "#64748b"]
DASHES = ["-", "--", ":"]  # when all colours are used, they are repeated with the next dashes
ROUND_TITLES = {"local": "Local test accuracy", "global": "Test accuracy, common test set"}
TASK_TITLES = {"average_accuracy": "Average accuracy over the learned tasks", "forgetting": "Forgetting"}


@dataclass(frozen=True)
class Point:
    """Measurements after a round, or a task, of a run; fractions."""

    name: str
    seed: int
    x: int
    values: dict[str, float | None]


def read(comparison: Path, tasks: bool) -> Iterator[Point]:
    """Yield the measurements of every run of a comparison, finished or not."""
    for member in read_members(comparison):
        folder = member.folder(comparison)
        for record in read_records(folder):
            if tasks and record.task is not None:
                values = {kind: getattr(record.task, kind) for kind in TASK_TITLES}
                yield Point(member.name, member.config.seed, record.task.task, values)
            elif not tasks and record.accuracy is not None:
                values = {"local": record.accuracy.local, "global": record.accuracy.global_}
                yield Point(member.name, member.config.seed, record.round, values)


def comparison_folder(text: str) -> Path:
    """Return the path of a comparison's folder, for argparse."""
    path = Path(text)
    if not (path / COMPARISON_FILE).is_file():
        raise argparse.ArgumentTypeError(f"{path} is not the folder of a comparison: it has no {COMPARISON_FILE}")
    return path


def add_rename_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--rename OLD NEW``, which may be repeated."""
    parser.add_argument("--rename", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))


def new_names(names: Iterable[str], renames: list[list[str]]) -> dict[str, str]:
    """Return the new name of every configuration; refuse to rename one that does not exist or to merge two."""
    wanted = {old: new for old, new in renames}
    known = list(dict.fromkeys(names))
    if missing := wanted.keys() - set(known):
        raise SystemExit(f"--rename {min(missing)!r}: there is no such configuration; there are {', '.join(known)}")
    result = {name: wanted.get(name, name) for name in known}
    if len(set(result.values())) < len(result):
        raise SystemExit("--rename: two configurations would have the same name")
    return result


def renamed(points: list[Point], renames: list[list[str]]) -> list[Point]:
    names = new_names((point.name for point in points), renames)
    return [replace(point, name=names[point.name]) for point in points]


def write_csv(points: list[Point], kinds: list[str], label: str, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "seed", label, *kinds])
        for point in points:
            cells = ["" if point.values[kind] is None else f"{point.values[kind]:.5f}" for kind in kinds]
            writer.writerow([point.name, point.seed, point.x, *cells])


def draw(points: list[Point], titles: dict[str, str], label: str, path: Path) -> None:
    # Percentages of all seeds, by kind, configuration and x.
    values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for point in points:
        for kind, value in point.values.items():
            if value is not None:
                values[kind][point.name][point.x].append(100 * value)
    names = list(dict.fromkeys(point.name for point in points))
    styles = {
        name: {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}
        for index, name in enumerate(names)
    }
    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name, by_x in values[kind].items():
            x = np.array(sorted(by_x))
            mean = np.array([np.mean(by_x[value]) for value in x])
            deviation = np.array([np.std(by_x[value], ddof=1) if len(by_x[value]) > 1 else 0 for value in x])
            axis.plot(x, mean, label=name, linewidth=1.8, **styles[name])
            axis.fill_between(
                x, mean - deviation, mean + deviation, color=styles[name]["color"], alpha=0.12, linewidth=0
            )
        axis.set(title=title, xlabel=label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("%")
    # Outside of the axes, where it hides no curve, sorted by the last values of one of them.
    sorted_by = 0 if "forgetting" in titles else 1
    lines = dict(zip(*reversed(figure.axes[sorted_by].get_legend_handles_labels()), strict=True))
    best_first = sorted(lines, key=lambda name: -float(lines[name].get_ydata()[-1]))
    figure.legend([lines[name] for name in best_first], best_first, loc="outside right center", frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=comparison_folder)
    parser.add_argument("target", type=Path, help="output files, without ending")
    add_rename_option(parser)
    args = parser.parse_args()
    tasks = read_members(args.comparison)[0].config.data.tasks is not None
    titles, label = (TASK_TITLES, "task") if tasks else (ROUND_TITLES, "round")
    points = renamed(list(read(args.comparison, tasks)), args.rename)
    write_csv(points, list(titles), label, args.target.with_suffix(".csv"))
    draw(points, titles, label, args.target.with_suffix(".png"))


if __name__ == "__main__":
    main()
