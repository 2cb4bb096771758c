"""FedViT's figure of communication: FedViT against FedWEIT over bandwidth, clients and tasks, by the virtual clock.

Example::

    python benchmarks/bandwidth.py --out docs/img

What a client of FedViT sends and receives is the body, 2,691,648 numbers. FedWEIT sends base weights B and its task's
adaptive weights A, thinned out; it receives B and, once a task, the adaptive weights of every other client. How thin A
is, its paper does not say for this model; here it is what makes FedViT's saving over 20 clients the 61.55 % that its
paper reports: 30.5 % of the weights, each with its place.

Rounds, clients a round and epochs are FedViT's: 10 rounds a task, 40 % of the clients, 6 epochs over 250 images. Who
is asked is drawn as in a run, how long it takes is the devices' (2 AGX, 2 TX2, 8 NX, 8 Nano), a round waits for its
slowest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from vitfleet.config.fleet import SynchronousSchedule
from vitfleet.config.schema import Config, ModelConfig
from vitfleet.costs.flops import full_flops
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, RoundWorkload, assign_hardware, workload_seconds
from vitfleet.costs.virtual_clock import close_round
from vitfleet.models.zoo import build_model
from vitfleet.report.figure_types import AxisView, Curve, LineChart
from vitfleet.report.plotting import draw_files
from vitfleet.run.round_plan import choose_clients

FLOAT, PLACE = 4, 4  # bytes of a weight, and of its place among the others
ROUNDS, SHARE, EPOCHS, IMAGES = 10, 0.4, 6, 250
DENSITY = 0.305
MIX = {"agx": 2, "tx2": 2, "nx": 8, "nano": 8}
CLASSES = 100

Bytes = Callable[[int, int, int, bool], tuple[int, int]]


def fedvit_bytes(body: int, clients: int, task: int, first: bool) -> tuple[int, int]:
    """Return what a client receives and sends in a round: the body, whoever else there is."""
    return FLOAT * body, FLOAT * body


def fedweit_bytes(body: int, clients: int, task: int, first: bool) -> tuple[int, int]:
    """Return what a client receives and sends in a round; the others' adaptive weights come once a task."""
    adaptive = int(DENSITY * body) * (FLOAT + PLACE)
    others = (clients - 1) * adaptive if first and task else 0
    return FLOAT * body + others, FLOAT * body + adaptive


def play(bytes_of: Bytes, body: int, flops: int, clients: int, tasks: int, bandwidth: float) -> tuple[float, float]:
    """Return the virtual seconds and the bytes of a whole run."""
    per_round = max(1, round(SHARE * clients))
    config = Config.model_validate({"fleet": {"clients": clients, "per_round": per_round}})
    devices = assign_hardware(MIX, clients, config.seed)  # type: ignore[arg-type]
    now = total = 0.0
    for task in range(tasks):
        seen: set[int] = set()
        for number in range(ROUNDS):
            asked = choose_clients(config, task * ROUNDS + number + 1)
            seconds = {}
            for client in asked:
                down, up = bytes_of(body, clients, task, client not in seen)
                total += down + up
                workload = RoundWorkload(down, flops * IMAGES * EPOCHS, up)
                seconds[client] = workload_seconds(HARDWARE_PROFILES[devices[client]], workload, bandwidth)
            seen |= set(asked)
            _, now = close_round(SynchronousSchedule(), per_round, now, seconds)
    return now, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="draw the figures into this folder")
    args = parser.parse_args()
    model = ModelConfig(dim=192, depth=6, heads=12, patch_size=4)
    net = build_model(model, CLASSES, 3, 32, 0)
    body, flops = net.anatomy.count_parameters(net.anatomy.body), full_flops(net).training
    methods: dict[str, Bytes] = {"FedViT": fedvit_bytes, "FedWEIT": fedweit_bytes}

    def series(x: list[float], value: Callable[[Bytes, float], float]) -> list[Curve]:
        return [
            Curve(name, style, x, [value(bytes_of, one) for one in x])
            for style, (name, bytes_of) in enumerate(methods.items())
        ]

    lines = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
    hours = series(lines, lambda bytes_of, line: play(bytes_of, body, flops, 20, 10, line * 1e6)[0] / 3600)
    fleet = series([5, 10, 20, 50, 100], lambda bytes_of, n: play(bytes_of, body, flops, int(n), 10, 1e6)[1] / n / 1e9)
    tasks = series(list(range(1, 11)), lambda bytes_of, n: play(bytes_of, body, flops, 20, int(n), 1e6)[1] / 1e9)
    figures = [
        LineChart("bandwidth", "Ten tasks, 20 clients", "virtual hours", [AxisView("line", "MB/s a client", hours)]),
        LineChart("bytes-by-clients", "Ten tasks", "GB a client", [AxisView("clients", "clients", fleet)]),
        LineChart("bytes-by-tasks", "20 clients", "GB, all clients", [AxisView("tasks", "tasks", tasks)]),
    ]
    for figure in figures:
        (view,) = figure.views
        print(f"\n| {view.label} | " + " | ".join(f"{one.name}, {figure.label}" for one in view.series) + " |")
        print("|---|" + "---|" * len(view.series))
        for place, x in enumerate(view.series[0].x):
            print(f"| {x:g} | " + " | ".join(f"{one.y[place]:.3g}" for one in view.series) + " |")
        if args.out:
            draw_files(figure, args.out)
    ours, theirs = (play(one, body, flops, 20, 10, 1e6)[1] for one in methods.values())
    print(f"\nbody {body:,} parameters; FedViT sends {1 - ours / theirs:.2%} less over 20 clients, ten tasks")


if __name__ == "__main__":
    main()
