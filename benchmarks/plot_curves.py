"""Draw the curves that compare_methods.py wrote: accuracy by round, mean over seeds with its spread.

Example::

    python benchmarks/plot_curves.py docs/results/transfl-cifar10.csv docs/results/transfl-cifar10.png
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c", "#64748b"]
DASHES = ["-", "--", ":"]  # a colour comes again with the next of these
FIGURES = {"local": "Clients at home: own model, own test images", "global": "Common test set"}


def main(source: Path, target: Path) -> None:
    values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with source.open() as file:
        for row in csv.DictReader(file):
            for kind in FIGURES:
                if row[kind]:
                    values[kind][row["method"]][int(row["round"])].append(100 * float(row[kind]))
    methods = list(values["global"])
    styles = {
        method: {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at // len(COLOURS) % len(DASHES)]}
        for at, method in enumerate(methods)
    }
    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (kind, title) in zip(figure.subplots(1, 2, sharey=True), FIGURES.items(), strict=True):
        for method, rounds in values[kind].items():
            x = np.array(sorted(rounds))
            mean = np.array([np.mean(rounds[round]) for round in x])
            spread = np.array([np.std(rounds[round], ddof=1) if len(rounds[round]) > 1 else 0 for round in x])
            axis.plot(x, mean, label=method, linewidth=1.8, **styles[method])
            axis.fill_between(x, mean - spread, mean + spread, color=styles[method]["color"], alpha=0.12, linewidth=0)
        axis.set(title=title, xlabel="round")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("accuracy, %")
    # Beside the axes, where it hides no curve, in the order in which the curves of the common test set end.
    lines = dict(zip(*reversed(figure.axes[1].get_legend_handles_labels()), strict=True))
    best_first = sorted(methods, key=lambda method: -float(lines[method].get_ydata()[-1]))
    figure.legend([lines[method] for method in best_first], best_first, loc="outside right center", frameon=False)
    figure.savefig(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
