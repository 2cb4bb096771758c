"""How much of the training step's rate a whole run keeps: rounds with messages, aggregation, records and checkpoints.

Example::

    python benchmarks/whole_run.py transfl-cifar10 --data-dir data

The run is the preset's, without evaluation but in the last round, which is left out of the time. The step's rate is
that of as many clients as take part in a round, all with full batches: the difference of a long and a short training by
the samples between them, so that nothing but steps is in it. What a round takes is split by the host's clock: what is
not spent in training and in handing over a checkpoint (and, within that, in waiting for the last one to be written) is
messages, aggregation and records.
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
    """Notes when each round is done and how many samples it trained, and sums what its parts took."""

    moments: list[float] = field(default_factory=lambda: [time.perf_counter()])
    samples: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.moments.append(time.perf_counter())
        told = [entry.numbers.get("samples") for entry in record.clients]
        self.samples.append(sum(one for one in told if isinstance(one, int)))
        for spent in self.parts.values():
            spent.append(0.0)

    def timed(self, name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Return a function whose time counts to a part of the round."""
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
    """Return the samples a second of the step itself, with a round's clients and full batches."""
    config, method, machine = context.config, context.method, context.machine
    clients, batch = config.fleet.per_round, config.train.batch_size
    images = context.data.train
    server = context.initial_server_state()

    def seconds(steps: int) -> float:
        halves = []
        for client in range(clients):
            index = (torch.arange(steps * batch, device=machine.device) + client * LONG * batch) % len(images)
            shard = Shard(images, index)
            job = ClientJob(
                1, client, method.client_message(server, 1, client, None), context.base.tensors, None, shard
            )
            halves.append(Participant(method.client_update(job), shard, RngContext(0, 1, client)))
        _wait(machine.device)
        started = time.perf_counter()
        run_cohort(halves, context.trainer)
        _wait(machine.device)
        return time.perf_counter() - started

    seconds(LONG), seconds(SHORT)
    taken = statistics.median(seconds(LONG) - seconds(SHORT) for _ in range(REPEATS))
    return clients * batch * (LONG - SHORT) * config.train.epochs / taken


def _wait(device: torch.device) -> None:
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
    watch = Stopwatch()
    inline.run_cohort = watch.timed("training", inline.run_cohort)
    Checkpoints.wait = watch.timed("the last checkpoint", Checkpoints.wait)  # type: ignore[method-assign]
    Checkpoints.commit = watch.timed("checkpoint", Checkpoints.commit)  # type: ignore[method-assign]
    run_rounds(context, callbacks=[watch])
    inline.run_cohort = run_cohort

    rounds = [after - before for before, after in zip(watch.moments, watch.moments[1:], strict=False)][:-1]
    samples = watch.samples[:-1]
    half = len(rounds) // 2
    rate = step_rate(context)
    place = torch.cuda.get_device_name() if context.machine.device.type == "cuda" else "CPU"
    precision = "bf16" if context.machine.bf16 else "fp32"
    print(f"{args.preset}, {config.rounds} rounds, {place}, {precision}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}")
    print(f"the step alone: {rate:,.0f} samples/s ({config.fleet.per_round} clients, {config.train.batch_size} images)")
    for name, start in (("all rounds", 0), ("the second half", half)):
        whole = sum(rounds[start:])
        own = sum(samples[start:]) / whole
        print(f"{name}: {whole:.2f} s, {own:,.0f} samples/s, {own / rate:.1%} of the step's rate; of the time", end="")
        for part, spent in watch.parts.items():
            print(f" {part} {sum(spent[start : len(rounds)]) / whole:.1%}", end="")
        print(f"; warm-up {_warm_up(context, start, len(rounds)):.2f} s", flush=True)


def _warm_up(context: RunContext, start: int, stop: int) -> float:
    lines = (context.folder / "timings.jsonl").read_text().splitlines()
    return sum(float(json.loads(line)["warm_up_seconds"]) for line in lines[start:stop])


if __name__ == "__main__":
    main()
