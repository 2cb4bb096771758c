"""Communication of FedViT and FedWEIT over bandwidth, clients and tasks, by the virtual clock: FedViT's figure.

Example::

    python benchmarks/bandwidth.py --out docs/img

A FedViT client sends and receives the body, 2,691,648 numbers. A FedWEIT client sends base weights B and the sparse
adaptive weights A of its task; it receives B and, once per task, the adaptive weights of every other client. FedWEIT's
paper does not give the density of A for this model. Here it is chosen so that FedViT's saving over 20 clients is the
61.55 % that FedViT's paper reports: 30.5 % of the weights, each with its index.

Rounds, clients per round and epochs are FedViT's: 10 rounds per task, 40 % of the clients, 6 epochs over 250 images.
Clients are selected as in a run, their speed is that of the hardware (2 AGX, 2 TX2, 8 NX, 8 Nano), and a round waits
for its slowest client.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from vitfleet.config.fleet import SynchronousSchedule
from vitfleet.config.schema import Config, ModelConfig
from vitfleet.costs.flops import full_flops
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, RoundWorkload, assign_hardware, workload_seconds
from vitfleet.costs.virtual_clock import close_round
from vitfleet.models.zoo import build_model
from vitfleet.report.figure_types import AxisView, Curve, LineChart
from vitfleet.report.plotting import draw_files
from vitfleet.run.round_plan import choose_clients

WEIGHT_BYTES, INDEX_BYTES = 4, 4
ROUNDS_PER_TASK, CLIENT_FRACTION, EPOCHS, IMAGES = 10, 0.4, 6, 250
DENSITY = 0.305  # of FedWEIT's adaptive weights
HARDWARE = {"agx": 2, "tx2": 2, "nx": 8, "nano": 8}
CLASSES = 100

#: From the body's parameters, the clients, the task, and whether it is the client's first round of the task.
RoundBytes: TypeAlias = Callable[[int, int, int, bool], tuple[int, int]]


def fedvit_bytes(body: int, clients: int, task: int, first: bool) -> tuple[int, int]:
    """Return the bytes that a client receives and sends in a round: the body, independent of the other clients."""
    return WEIGHT_BYTES * body, WEIGHT_BYTES * body


def fedweit_bytes(body: int, clients: int, task: int, first: bool) -> tuple[int, int]:
    """Return the bytes that a client receives and sends in a round; other clients' adaptive weights once per task."""
    adaptive = int(DENSITY * body) * (WEIGHT_BYTES + INDEX_BYTES)
    others = (clients - 1) * adaptive if first and task else 0
    return WEIGHT_BYTES * body + others, WEIGHT_BYTES * body + adaptive


def simulate(
    round_bytes: RoundBytes, body: int, flops: int, clients: int, tasks: int, bandwidth: float
) -> tuple[float, float]:
    """Return the virtual seconds and the bytes of a run."""
    per_round = max(1, round(CLIENT_FRACTION * clients))
    config = Config.model_validate({"fleet": {"clients": clients, "per_round": per_round}})
    profiles = assign_hardware(HARDWARE, clients, config.seed)  # type: ignore[arg-type]
    now = total_bytes = 0.0
    for task in range(tasks):
        seen: set[int] = set()
        for number in range(ROUNDS_PER_TASK):
            selected = choose_clients(config, task * ROUNDS_PER_TASK + number + 1)
            seconds = {}
            for client in selected:
                down, up = round_bytes(body, clients, task, client not in seen)
                total_bytes += down + up
                workload = RoundWorkload(down, flops * IMAGES * EPOCHS, up)
                seconds[client] = workload_seconds(HARDWARE_PROFILES[profiles[client]], workload, bandwidth)
            seen |= set(selected)
            _, now = close_round(SynchronousSchedule(), per_round, now, seconds)
    return now, total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="draw the figures into this folder")
    args = parser.parse_args()
    model = ModelConfig(dim=192, depth=6, heads=12, patch_size=4)
    net = build_model(model, CLASSES, 3, 32, 0)
    body, flops = net.anatomy.count_parameters(net.anatomy.body), full_flops(net).training
    methods: dict[str, RoundBytes] = {"FedViT": fedvit_bytes, "FedWEIT": fedweit_bytes}

    def make_curves(x: list[float], value: Callable[[RoundBytes, float], float]) -> list[Curve]:
        return [
            Curve(name, style, x, [value(round_bytes, position) for position in x])
            for style, (name, round_bytes) in enumerate(methods.items())
        ]

    bandwidths = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
    hours = make_curves(
        bandwidths, lambda round_bytes, bandwidth: simulate(round_bytes, body, flops, 20, 10, bandwidth * 1e6)[0] / 3600
    )
    fleet = make_curves(
        [5, 10, 20, 50, 100], lambda round_bytes, n: simulate(round_bytes, body, flops, int(n), 10, 1e6)[1] / n / 1e9
    )
    tasks = make_curves(
        list(range(1, 11)), lambda round_bytes, n: simulate(round_bytes, body, flops, 20, int(n), 1e6)[1] / 1e9
    )
    figures = [
        LineChart("bandwidth", "Ten tasks, 20 clients", "virtual hours", [AxisView("line", "MB/s per client", hours)]),
        LineChart("bytes-by-clients", "Ten tasks", "GB per client", [AxisView("clients", "clients", fleet)]),
        LineChart("bytes-by-tasks", "20 clients", "GB, all clients", [AxisView("tasks", "tasks", tasks)]),
    ]
    for figure in figures:
        (view,) = figure.views
        print(f"\n| {view.label} | " + " | ".join(f"{line.name}, {figure.label}" for line in view.curves) + " |")
        print("|---|" + "---|" * len(view.curves))
        for position, x in enumerate(view.curves[0].x):
            print(f"| {x:g} | " + " | ".join(f"{line.y[position]:.3g}" for line in view.curves) + " |")
        if args.out:
            draw_files(figure, args.out)
    fedvit, fedweit = (simulate(round_bytes, body, flops, 20, 10, 1e6)[1] for round_bytes in methods.values())
    print(f"\nbody {body:,} parameters; FedViT sends {1 - fedvit / fedweit:.2%} less over 20 clients, ten tasks")


if __name__ == "__main__":
    main()
