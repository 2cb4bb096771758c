"""Scaling of a simulation: time per round against the number of clients, and memory over a long run.

Example::

    python benchmarks/scaling.py clients --data-dir data     # 10 of 100 and 10 of 10,000 clients, CIFAR-10
    python benchmarks/scaling.py memory                      # 200 rounds on digits, peak resident set by round

`clients` gives every client the same number of images (5), so that a round trains equally long. The difference is the
cost of the fleet's size: sampling, records, checkpoints. Both fleets are measured in turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vitfleet.config import load_config
from vitfleet.run.callbacks import Callback
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState


@dataclass
class Stopwatch(Callback):
    """Records when each round ends, and the resident memory then."""

    moments: list[float] = field(default_factory=lambda: [time.perf_counter()])
    resident: list[int] = field(default_factory=list)

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.moments.append(time.perf_counter())
        self.resident.append(psutil.Process().memory_info().rss)

    def rounds(self) -> list[float]:
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]


def run_simulation(overrides: list[str], data_dir: str | None = None) -> Stopwatch:
    config = load_config("digits", overrides, {"data.dir": data_dir})
    context = open_run(config, Path(tempfile.mkdtemp()))
    stopwatch = Stopwatch()
    run_rounds(context, callbacks=[stopwatch])
    return stopwatch


def clients(data_dir: str, rounds: int, repeats: int) -> None:
    common = [
        "data.name=cifar10",
        "data.partition.kind=iid",
        "model.patch_size=4",
        "fleet.per_round=10",
        "train.epochs=3",
        f"rounds={rounds}",
        f"eval.every={rounds}",
    ]
    for method in ("fedavg", "transfl"):
        seconds: dict[int, list[float]] = {100: [], 10_000: []}
        for _ in range(repeats):
            for count in seconds:
                sizes = [f"fleet.clients={count}", f"data.limit={5 * count}", f"method.name={method}"]
                # Without the first round, which warms up, and the last, which evaluates.
                seconds[count] += run_simulation([*common, *sizes], data_dir).rounds()[1:-1]
        medians = {count: statistics.median(times) for count, times in seconds.items()}
        ratio = medians[10_000] / medians[100]
        print(json.dumps({"method": method, "seconds_per_round": medians, "ratio": round(ratio, 3)}), flush=True)


def memory(rounds: int) -> None:
    for method in ("fedavg", "transfl"):
        stopwatch = run_simulation([f"rounds={rounds}", "train.epochs=1", f"method.name={method}"])
        early, late = max(stopwatch.resident[:60][-50:]), max(stopwatch.resident[-50:])
        ratio = round(late / early, 4)
        print(json.dumps({"method": method, "rounds_10_60": early, "last_50": late, "ratio": ratio}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clients", "memory"])
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    if args.what == "clients":
        clients(args.data_dir, args.rounds or 30, args.repeats)
    else:
        memory(args.rounds or 200)


if __name__ == "__main__":
    main()
