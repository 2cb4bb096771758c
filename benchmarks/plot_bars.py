"""Draw what a comparison on tasks ended with as bars, grouped by a key of the configuration, and write it as CSV.

Example::

    vitfleet compare fedvit-families-tinyimagenet --method fedvit --method gem --method fedavg \\
        -s model.name=deit,cait,cvt,levit,pvt,pit,swin,t2t --data-dir data --out families
    python benchmarks/plot_bars.py families docs/results/families-tinyimagenet --by model.name

writes `docs/results/families-tinyimagenet.png` and `.csv`, with one group of bars per value of the key and one bar per
method: the mean over seeds, with the standard deviation where there are several. The CSV file has every run, also the
mean accuracy on each task just after it was learned.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from plot_curves import COLOURS
from vitfleet.config.registry import method_label
from vitfleet.run.comparison.manifest import read_members
from vitfleet.run.output.summary import is_finished, read_summary

TITLES = {"average_accuracy": "Average accuracy after the last task", "forgetting": "Forgetting"}


@dataclass(frozen=True)
class Result:
    """What a run ended with, in percent."""

    group: str
    method: str
    seed: int
    values: dict[str, float]


def read(comparison: Path, key: str) -> list[Result]:
    """Return the results of the finished runs of a comparison."""
    results = []
    for member in read_members(comparison):
        folder = member.folder(comparison)
        if not is_finished(folder):
            continue
        group: Any = member.config.model_dump(mode="json")
        for part in key.split("."):
            group = group.get(part) if isinstance(group, dict) else None
        continual = read_summary(folder).get("continual")
        if group is None or continual is None:
            raise SystemExit(f"{member.name}: has no {key}" if continual else f"{member.name}: is not a run on tasks")
        learned = statistics.mean(row[task] for task, row in enumerate(continual["matrix"]))
        fractions = {name: continual[name] for name in TITLES} | {"just_learned": learned}
        values = {name: 100 * fraction for name, fraction in fractions.items()}
        results.append(Result(str(group), method_label(member.config.method.name), member.config.seed, values))
    bars = Counter((result.group, result.method, result.seed) for result in results)
    if repeated := [bar for bar, count in bars.items() if count > 1]:
        raise SystemExit(f"{repeated[0]}: several runs; compare variants of a method in comparisons of their own")
    return results


def write_csv(results: list[Result], key: str, path: Path) -> None:
    """Write every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([key, "method", "seed", *results[0].values])
        for result in results:
            cells = [f"{value:.2f}" for value in result.values.values()]
            writer.writerow([result.group, result.method, result.seed, *cells])


def draw(results: list[Result], path: Path) -> None:
    """Draw one group of bars per value of the key."""
    groups = list(dict.fromkeys(result.group for result in results))
    methods = list(dict.fromkeys(result.method for result in results))
    width = 0.8 / len(methods)
    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (kind, title) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        for index, method in enumerate(methods):
            seeds = [[r.values[kind] for r in results if (r.group, r.method) == (group, method)] for group in groups]
            heights = [statistics.mean(values) if values else math.nan for values in seeds]
            errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in seeds]
            places = [place + (index - (len(methods) - 1) / 2) * width for place in range(len(groups))]
            axis.bar(places, heights, width * 0.92, label=method, color=COLOURS[index % len(COLOURS)])
            if any(errors):
                axis.errorbar(places, heights, errors, fmt="none", ecolor="#111827", capsize=2)
        axis.set_xticks(range(len(groups)), groups)
        axis.set_title(title)
        axis.set_ylabel("percent")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, ncols=len(methods), loc="upper right")
    figure.axes[0].set_ylim(top=1.12 * figure.axes[0].get_ylim()[1])
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("out", type=Path, help="path of the two files, without their endings")
    parser.add_argument("--by", default="model.name", metavar="KEY", help="the key whose values are the groups")
    args = parser.parse_args()
    results = read(args.comparison, args.by)
    if not results:
        parser.error(f"{args.comparison}: no run of this comparison is finished")
    write_csv(results, args.by, args.out.with_suffix(".csv"))
    draw(results, args.out.with_suffix(".png"))
    print(f"{args.out}.png and .csv: {len(results)} runs")


if __name__ == "__main__":
    main()
