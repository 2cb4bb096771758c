"""Speed of a whole run, with messages, aggregation, evaluation, records and checkpoints, and where its time goes.

Examples::

    python benchmarks/whole_run.py transfl-cifar10 --data-dir data
    python benchmarks/whole_run.py eftvit-cifar100 -o model.weights=null --data-dir data --json whole-run.json

The run is that of the preset, with its evaluation. The time of a round is split by the host's clock, after waiting for
the device at the end of each part: the clients' training, the server's own training, evaluation, checkpoints (with
the wait for the previous one), warm-up (compiling and capturing, taken out of both trainings), and the rest, which is
messages, aggregation and records. With ``--steps`` the speed of the clients' steps alone is measured too, with the
clients of one round, all with full batches: the difference of a long and a short training, so that everything but steps
cancels out. With ``--stop-after`` only the first rounds of the preset's schedule are run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from vitfleet.config import load_config
from vitfleet.data.images import Shard
from vitfleet.files import TIMINGS_FILE
from vitfleet.fleet import client_runtime
from vitfleet.methods.base import ClientRoundInput
from vitfleet.run import round as round_module
from vitfleet.run.callbacks import Callback, StopRun
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.context import RunContext
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.training.driver import PendingUpdate, run_updates
from vitfleet.training.stacking.inputs import RngContext

SHORT, LONG, REPEATS = 16, 48, 5  # steps, and how often both are timed
Parameters, Result = ParamSpec("Parameters"), TypeVar("Result")


@dataclass
class Stopwatch(Callback):
    """Records the end, the samples and the accuracy of each round, and adds up the time of its parts."""

    device: torch.device
    stop_after: int | None = None
    moments: list[float] = field(default_factory=lambda: [time.perf_counter()])
    samples: list[int] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        self.moments.append(time.perf_counter())
        samples = [entry.numbers.get("samples") for entry in record.clients]
        self.samples.append(sum(count for count in samples if isinstance(count, int)))
        if record.accuracy is not None and record.accuracy.global_ is not None:
            self.accuracies[record.round] = record.accuracy.global_
        for spent in self.parts.values():
            spent.append(0.0)
        if len(self.samples) % 10 == 0 or record.round in self.accuracies:
            accuracy = self.accuracies.get(record.round)
            print(f"round {record.round}: {self.moments[-1] - self.moments[0]:.1f} s, accuracy {accuracy}", flush=True)
        return StopRun("--stop-after") if record.round == self.stop_after else None

    def timed(self, name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Return a function whose time is added to a part of the round."""
        spent = self.parts.setdefault(name, [0.0])

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _synchronize(self.device)
                spent[-1] += time.perf_counter() - started

        return call


def step_rate(context: RunContext) -> float:
    """Return the samples per second of steps alone, with the clients of one round and full batches."""
    config, method, machine = context.config, context.method, context.machine
    clients, batch = config.fleet.per_round, config.train.batch_size
    images = context.data.train
    server = context.initial_server_state()

    def seconds(steps: int) -> float:
        updates = []
        for client in range(clients):
            index = (torch.arange(steps * batch, device=machine.device) + client * LONG * batch) % len(images)
            shard = Shard(images, index)
            job = ClientRoundInput(
                1, client, method.message_to_client(server, 1, client, None), context.base.tensors, None, shard
            )
            updates.append(PendingUpdate(method.client_update(job), shard, RngContext(0, 1, client)))
        _synchronize(machine.device)
        started = time.perf_counter()
        run_updates(updates, context.trainer)
        _synchronize(machine.device)
        return time.perf_counter() - started

    seconds(LONG), seconds(SHORT)
    elapsed = statistics.median(seconds(LONG) - seconds(SHORT) for _ in range(REPEATS))
    return clients * batch * (LONG - SHORT) * config.train.epochs / elapsed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="key=value")
    parser.add_argument("--data-dir")
    parser.add_argument("--folder", type=Path, help="the run's folder; an interrupted run there is resumed")
    parser.add_argument("--stop-after", type=int, metavar="ROUND")
    parser.add_argument("--steps", action="store_true", help="also measure the clients' steps alone")
    parser.add_argument("--json", type=Path, help="write every round's parts to this file")
    args = parser.parse_args()
    config = load_config(args.preset, args.overrides, {"data.dir": args.data_dir})
    context = open_run(config, args.folder or Path(tempfile.mkdtemp()))
    device = context.machine.device
    stopwatch = Stopwatch(device, args.stop_after)
    client_runtime.run_updates = stopwatch.timed("clients", run_updates)
    round_module._update_server = stopwatch.timed("server", round_module._update_server)
    round_module._evaluate = stopwatch.timed("evaluation", round_module._evaluate)
    Checkpoints.wait = stopwatch.timed("wait for the previous checkpoint", Checkpoints.wait)  # type: ignore[method-assign]
    Checkpoints.commit = stopwatch.timed("checkpoint", Checkpoints.commit)  # type: ignore[method-assign]
    run_rounds(context, callbacks=[stopwatch])
    client_runtime.run_updates = run_updates

    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    precision = "bf16" if context.machine.bf16 else "fp32"
    print(f"{args.preset} {' '.join(args.overrides)}, {device_name}, {precision}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}; {context.trainer.execution_summary()}")
    rows = round_rows(stopwatch, context)
    print_table(rows)
    if args.json:
        rounds = {"rounds": rows, "accuracy": stopwatch.accuracies}
        args.json.write_text(json.dumps(rounds, indent=1))
    if args.steps:
        rate = step_rate(context)
        run_rate = sum(stopwatch.samples) / sum(row["total"] for row in rows)
        print(f"clients' steps alone: {rate:,.0f} samples/s; the whole run: {run_rate / rate:.1%} of it")


def round_rows(stopwatch: Stopwatch, context: RunContext) -> list[dict[str, float]]:
    """Return the seconds of each round: in all, and of each part."""
    lines = (context.folder / TIMINGS_FILE).read_text().splitlines()[-len(stopwatch.samples) :]
    rows = []
    for index, line in enumerate(lines):
        total = stopwatch.moments[index + 1] - stopwatch.moments[index]
        parts = {name: spent[index] for name, spent in stopwatch.parts.items()}
        warm_up = float(json.loads(line)["warm_up_seconds"])
        rows.append({"total": total, "warm-up": warm_up, **parts, "rest": total - sum(parts.values())})
    return rows


def print_table(rows: list[dict[str, float]]) -> None:
    """Print the mean seconds per round, of all rounds and of each quarter of them."""
    quarter = max(1, len(rows) // 4)
    spans = [("all", rows)] + [
        (f"{start + 1} … {min(start + quarter, len(rows))}", rows[start : start + quarter])
        for start in range(0, len(rows), quarter)
    ]
    print(f"total {sum(row['total'] for row in rows):.1f} s; mean seconds per round (trainings include warm-up):")
    print("| rounds | " + " | ".join(rows[0]) + " |")
    print("|---" * (len(rows[0]) + 1) + "|")
    for name, span in spans:
        means = [sum(row[part] for row in span) / len(span) for part in rows[0]]
        print(f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |", flush=True)


if __name__ == "__main__":
    main()
