"""Communication of FedViT and FedWEIT over bandwidth, clients and tasks, measured in real runs: FedViT's figure.

Example::

    python benchmarks/bandwidth.py --preset fedvit-cifar100 --data-dir data --runs runs/bandwidth --out docs/img

Both methods train on the preset's tasks, once for every number of clients, 40 % of them in a round. The bytes that each
client received and sent, and its operations, are those of the runs' records. How long a run takes at a bandwidth
follows from them: a client's speed is that of its hardware (2 AGX, 2 TX2, 8 NX, 8 Nano), and a round waits for its
slowest client. A run that is complete in ``--runs`` is not repeated, one that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitfleet.config import load_config
from vitfleet.config.fleet import SynchronousSchedule
from vitfleet.costs.hardware_profiles import (
    HARDWARE_PROFILES,
    MEGABYTE,
    RoundWorkload,
    assign_hardware,
    workload_seconds,
)
from vitfleet.costs.virtual_clock import close_round
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.types import AxisView, Curve, LineChart
from vitfleet.report.units import MEBIBYTE
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run

METHODS = {"FedViT": "fedvit", "FedWEIT": "fedweit"}
HARDWARE: Any = {"agx": 2, "tx2": 2, "nx": 8, "nano": 8}
CLIENT_FRACTION = 0.4
BANDWIDTHS = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]  # MB/s


@dataclass(frozen=True)
class MeasuredRun:
    """The records of a run with a number of clients."""

    clients: int
    seed: int
    records: Sequence[RoundRecord]

    def minutes(self, bandwidth: float) -> float:
        """Return the virtual minutes of the run at a bandwidth in MB/s."""
        profiles, now = assign_hardware(HARDWARE, self.clients, self.seed), 0.0
        for record in self.records:
            seconds = {}
            for entry in record.clients:
                workload = RoundWorkload(entry.down_bytes, int((entry.gflops or 0) * 1e9), entry.up_bytes)
                device = HARDWARE_PROFILES[profiles[entry.client]]
                seconds[entry.client] = workload_seconds(device, workload, bandwidth * MEGABYTE)
            _, now = close_round(SynchronousSchedule(), len(seconds), now, seconds)
        return now / 60

    def mebibytes_by_task(self) -> list[float]:
        """Return the MiB that all clients received and sent, up to the end of each task."""
        return [(r.total_up_bytes + r.total_down_bytes) / MEBIBYTE for r in self.records if r.task is not None]


def measure(method: str, clients: int, preset: str, overrides: Sequence[str], folder: Path) -> MeasuredRun:
    """Train, or finish an earlier run, and return its records."""
    fleet = f"fleet.clients={clients}", f"fleet.per_round={max(1, round(CLIENT_FRACTION * clients))}"
    # The keys of a preset's method are those of FedViT.
    config = load_config(preset, [f"method={{name='{method}'}}", *fleet, *overrides])
    context = open_run(config, folder)
    run_rounds(context, load_state(context))
    return MeasuredRun(clients, config.seed, list(read_records(folder)))


def make_curves(x: Sequence[float], values: Callable[[str], Sequence[float]]) -> list[Curve]:
    """Return a curve of each method."""
    return [Curve(name, style, list(x), list(values(name))) for style, name in enumerate(METHODS)]


def make_figures(runs: dict[str, list[MeasuredRun]], shown: int) -> list[LineChart]:
    """Return the figures; those over bandwidth and tasks are of the runs at a position."""
    clients = [run.clients for run in runs["FedViT"]]
    minutes = make_curves(BANDWIDTHS, lambda name: [runs[name][shown].minutes(bandwidth) for bandwidth in BANDWIDTHS])
    fleet = make_curves(clients, lambda name: [run.mebibytes_by_task()[-1] / run.clients for run in runs[name]])
    by_task = {name: runs[name][shown].mebibytes_by_task() for name in METHODS}
    tasks = make_curves(range(1, len(by_task["FedViT"]) + 1), by_task.__getitem__)
    title = f"{clients[shown]} clients"
    return [
        LineChart("bandwidth", title, "virtual minutes", [AxisView("line", "MB/s per client", minutes)]),
        LineChart("bytes-by-clients", "all tasks", "MiB per client", [AxisView("clients", "clients", fleet)]),
        LineChart("bytes-by-tasks", title, "MiB, all clients", [AxisView("tasks", "tasks", tasks)]),
    ]


def print_table(figure: LineChart) -> None:
    """Print a figure as a table."""
    (view,) = figure.views
    print(f"\n| {view.label} | " + " | ".join(f"{line.name}, {figure.label}" for line in view.curves) + " |")
    print("|---|" + "---|" * len(view.curves))
    for position, x in enumerate(view.curves[0].x):
        print(f"| {x:g} | " + " | ".join(f"{line.y[position]:.3g}" for line in view.curves) + " |")


def density(run: MeasuredRun) -> float:
    """Return the mean number of adaptive weights that an update has."""
    kept = [entry.numbers.get("adaptive_kept") for record in run.records for entry in record.clients]
    numbers = [number for number in kept if isinstance(number, int)]
    return sum(numbers) / max(1, len(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="fedvit-digits", help="a preset with tasks (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10, 20], help="numbers of clients")
    parser.add_argument("--data-dir", type=Path, help="where the data sets are")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="a key")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, help="draw the figures into this folder")
    args = parser.parse_args()
    overrides = [*args.overrides, *([f"data.dir={args.data_dir}"] if args.data_dir else [])]
    runs = {
        name: [
            measure(method, clients, args.preset, overrides, args.runs / f"{method}-{clients}")
            for clients in args.clients
        ]
        for name, method in METHODS.items()
    }
    shown = args.clients.index(20) if 20 in args.clients else len(args.clients) - 1
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    for figure in make_figures(runs, shown):
        print_table(figure)
        if args.out:
            draw_files(figure, args.out)
    fedvit, fedweit = (runs[name][shown].mebibytes_by_task()[-1] for name in METHODS)
    print(
        f"\nFedViT sends and receives {1 - fedvit / fedweit:.2%} less than FedWEIT with {args.clients[shown]} clients;"
    )
    print(f"an update of FedWEIT has {density(runs['FedWEIT'][shown]):,.0f} adaptive weights on average")


if __name__ == "__main__":
    main()
