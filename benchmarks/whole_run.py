"""Speed of a whole run, with messages, aggregation, records and checkpoints, relative to its training steps alone.

Example::

    python benchmarks/whole_run.py transfl-cifar10 --data-dir data

The run is that of the preset, evaluated only in the last round, which is not timed. The speed of steps is measured with
the clients of one round, all with full batches: the difference of a long and a short training, so that everything
but steps cancels out. The time of a round is split by the host's clock: training, checkpoints (with the wait for the
previous one), and the rest, which is messages, aggregation and records.
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
from vitfleet.fleet import inline
from vitfleet.methods.base import ClientJob
from vitfleet.run.callbacks import Callback
from vitfleet.run.checkpoint import Checkpoints
from vitfleet.run.context import RunContext
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.training.cohort_driver import Participant, run_cohort
from vitfleet.training.cohort_inputs import RngContext

SHORT, LONG, REPEATS = 16, 48, 5  # steps, and how often both are timed
Parameters, Result = ParamSpec("Parameters"), TypeVar("Result")


@dataclass
class Stopwatch(Callback):
    """Records the end and the samples of each round, and adds up the time of its parts."""

    moments: list[float] = field(default_factory=lambda: [time.perf_counter()])
    samples: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.moments.append(time.perf_counter())
        samples = [entry.numbers.get("samples") for entry in record.clients]
        self.samples.append(sum(count for count in samples if isinstance(count, int)))
        for spent in self.parts.values():
            spent.append(0.0)

    def timed(self, name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Return a function whose time is added to a part of the round."""
        spent = self.parts.setdefault(name, [0.0])

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[-1] += time.perf_counter() - started

        return call


def step_rate(context: RunContext) -> float:
    """Return the samples per second of steps alone, with the clients of one round and full batches."""
    config, method, machine = context.config, context.method, context.machine
    clients, batch = config.fleet.per_round, config.train.batch_size
    images = context.data.train
    server = context.initial_server_state()

    def seconds(steps: int) -> float:
        participants = []
        for client in range(clients):
            index = (torch.arange(steps * batch, device=machine.device) + client * LONG * batch) % len(images)
            shard = Shard(images, index)
            job = ClientJob(
                1, client, method.client_message(server, 1, client, None), context.base.tensors, None, shard
            )
            participants.append(Participant(method.client_update(job), shard, RngContext(0, 1, client)))
        _synchronize(machine.device)
        started = time.perf_counter()
        run_cohort(participants, context.trainer)
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
    args = parser.parse_args()
    never = "eval.every=1000000000"
    config = load_config(args.preset, [*args.overrides, never], {"data.dir": args.data_dir} if args.data_dir else {})
    context = open_run(config, Path(tempfile.mkdtemp()))
    stopwatch = Stopwatch()
    inline.run_cohort = stopwatch.timed("training", inline.run_cohort)
    Checkpoints.wait = stopwatch.timed("wait for the previous checkpoint", Checkpoints.wait)  # type: ignore[method-assign]
    Checkpoints.commit = stopwatch.timed("checkpoint", Checkpoints.commit)  # type: ignore[method-assign]
    run_rounds(context, callbacks=[stopwatch])
    inline.run_cohort = run_cohort

    rounds = [after - before for before, after in zip(stopwatch.moments, stopwatch.moments[1:], strict=False)][:-1]
    samples = stopwatch.samples[:-1]
    half = len(rounds) // 2
    rate = step_rate(context)
    device_name = torch.cuda.get_device_name() if context.machine.device.type == "cuda" else "CPU"
    precision = "bf16" if context.machine.bf16 else "fp32"
    print(f"{args.preset}, {config.rounds} rounds, {device_name}, {precision}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}")
    print(f"steps alone: {rate:,.0f} samples/s ({config.fleet.per_round} clients, {config.train.batch_size} images)")
    for name, start in (("all rounds", 0), ("the second half", half)):
        total = sum(rounds[start:])
        run_rate = sum(samples[start:]) / total
        print(
            f"{name}: {total:.2f} s, {run_rate:,.0f} samples/s, {run_rate / rate:.1%} of steps alone; of the time",
            end="",
        )
        for part, spent in stopwatch.parts.items():
            print(f" {part} {sum(spent[start : len(rounds)]) / total:.1%}", end="")
        print(f"; warm-up {_warm_up(context, start, len(rounds)):.2f} s", flush=True)


def _warm_up(context: RunContext, start: int, stop: int) -> float:
    lines = (context.folder / "timings.jsonl").read_text().splitlines()
    return sum(float(json.loads(line)["warm_up_seconds"]) for line in lines[start:stop])


if __name__ == "__main__":
    main()
