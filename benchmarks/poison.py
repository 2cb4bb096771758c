"""What one device of ten that lies costs the others, with and without a defence; and what a defence costs honest runs.

``run`` trains a run for every cell of a table, method × rule × attack × seed, several at a time, and adds a line to a
CSV file as each ends; cells that the file has are not run again. In a poisoned run one device, of ten, of which five
take part in a round, sends false updates whenever it takes part; the accuracy is that of the honest devices' models.
``honest`` trains runs without an attack on four data sets, with the defence and without. ``table`` prints a file.

Examples::

    python benchmarks/poison.py run poison.csv --jobs 14
    python benchmarks/poison.py run poison.csv --methods fedavg --rules none clip median --attacks "sign flip"
    python benchmarks/poison.py honest honest.csv --data cifar10 cifar100 -o machine.device=cuda
    python benchmarks/poison.py table poison.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from vitfleet.config import load_config
from vitfleet.config.plugins import load_plugins
from vitfleet.data.images import Shard
from vitfleet.errors import UserError
from vitfleet.fleet.base import EvalRequest, Fleet, FleetWrapper, Reply, Request
from vitfleet.fleet.simulation import SimulatedFleet
from vitfleet.message import Message, Tensors
from vitfleet.run.context import RunContext
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

LIAR = 1  # the client that lies

#: Turns the liar's message, given what the server sent and the honest messages of the round, into a false one, or none.
Lie = Callable[[Message, Tensors, Sequence[Message]], Message | None]


def scaled(factor: float, honest: Message, received: Tensors, others: Sequence[Message]) -> Message:
    """Scale the update: what is sent, relative to what was received; features, which are not received, to zero."""

    def changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        start = received[name] if name in received else torch.zeros_like(tensor)
        return (start + factor * (tensor - start)).to(tensor.dtype)

    return replace(honest, tensors={name: changed(name, tensor) for name, tensor in honest.tensors.items()})


def absent(honest: Message, received: Tensors, others: Sequence[Message]) -> None:
    """Send nothing: what a device costs that does not take part, whatever the server does."""


def with_many_samples(factor: float, honest: Message, received: Tensors, others: Sequence[Message]) -> Message:
    """Scale the update, and claim as many samples as a message may."""
    message = scaled(factor, honest, received, others)
    return replace(message, numbers={**message.numbers, "samples": 10**8})


def a_little(z: float, honest: Message, received: Tensors, others: Sequence[Message]) -> Message:
    """Send the mean of the honest messages less ``z`` standard deviations (Baruch et al., 2019)."""
    tensors = dict(honest.tensors)
    for name, tensor in honest.tensors.items():
        sent = [other.tensors[name] for other in others if name in other.tensors]
        same = [one for one in sent if one.shape == tensor.shape]
        if tensor.is_floating_point() and len(same) > 1:
            stack = torch.stack([one.double() for one in same])
            tensors[name] = (stack.mean(0) - z * stack.std(0)).to(tensor.dtype)
        elif tensor.is_floating_point() and name not in received:  # features: each device's have their own number
            tensors[name] = (tensor.double() - z * tensor.double().std(0)).to(tensor.dtype)
    return replace(honest, tensors=tensors)


ATTACKS: Mapping[str, Lie | None] = {
    "none": partial(scaled, 1.0),
    "sign flip": partial(scaled, -10.0),
    "scaled": partial(scaled, 10.0),
    "lied samples": partial(with_many_samples, -1.0),
    "label flip": None,  # its images have wrong labels
    "a little": partial(a_little, 1.5),
    "flip, samples": partial(with_many_samples, -10.0),
    "absent": absent,
}
DIGITS = ("eval.every=1000", "fleet.devices={}")
POISONED = {
    "fedavg": ("start-fedavg", *DIGITS),
    "transfl": ("start-transfl", *DIGITS),
    "fed-lora": ("start-fedavg", "method.name=fed-lora", *DIGITS),
    "eftvit": ("start-eftvit", *DIGITS),
    "fedvit": ("start-fedvit", "fleet.clients=10", "fleet.per_round=5", *DIGITS),
}
OTHER_METHOD = ("start-fedavg", *DIGITS)
NO_DEFENCE = "aggregate.defence=off"
RULES = {
    "none": (NO_DEFENCE,),
    "clip": ("aggregate.defence=clip",),  # what a fleet of real devices has by default
    "median": (NO_DEFENCE, "aggregate.rule=median"),
    "trimmed": (NO_DEFENCE, "aggregate.rule=trimmed"),
    "geometric-median": (NO_DEFENCE, "aggregate.rule=geometric-median"),
    "multi-krum": (NO_DEFENCE, "aggregate.rule=multi-krum"),
    "norm_factor=3": (NO_DEFENCE, "aggregate.norm_factor=3"),
}
CIFAR = ("fedavg-cifar100", "rounds=30", "eval.every=1000", "eval.clients=0")
HONEST = {
    "digits": ("start-fedavg", *DIGITS),
    "cifar10": (*CIFAR, "data.name=cifar10"),
    "cifar100": CIFAR,
    "ucmerced": (
        *("fedavg-cifar100", "data.name=ucmerced", "rounds=20", "eval.every=1000", "eval.clients=0"),
        *("model={name='vit_tiny_patch16_224', image_size=112}", "train.lr=1e-4", "train.epochs=1"),
    ),
}


@dataclass
class Poisoned(FleetWrapper[Fleet]):
    """A fleet with one client that lies in every round it takes part in."""

    lie: Lie

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train, and change the liar's reply; it knows what all others send."""
        asked = list(requests)
        replies = list(self.inner.train(asked))
        others = [reply.message for reply in replies if reply.client != LIAR and reply.message is not None]
        received = {request.client: request.message.tensors for request in asked}
        for reply in replies:
            if reply.client == LIAR and reply.message is not None:
                message = self.lie(reply.message, received[LIAR], others)
                yield replace(reply, message=message, failure="absent" if message is None else None)
            else:
                yield reply


def with_wrong_labels(shard: Callable[[int, int], Shard], num_classes: int, client: int, task: int) -> Shard:
    """Return a client's images; those of the liar have labels counted from the other end."""
    images = shard(client, task)
    if client != LIAR:
        return images
    return replace(images, images=replace(images.images, labels=num_classes - 1 - images.images.labels))


class Cell(NamedTuple):
    """A run: a cell of the table."""

    data: str
    method: str
    rule: str
    attack: str
    seed: int


def accuracy_of(cell: Cell, keys: Sequence[str], plugins: Sequence[Path]) -> tuple[str, float]:
    """Train a cell's run; return the accuracy of the honest clients' models in percent, or an error, and seconds."""
    torch.set_num_threads(1)
    load_plugins(plugins)
    started = time.monotonic()
    source, *overrides = keys
    own = (f"seed={cell.seed}", "trackers={}", "machine.threads=1", "machine.workers=1")
    try:
        config = load_config(source, [*overrides, *RULES.get(cell.rule, (f"aggregate.rule={cell.rule}",)), *own])
        with tempfile.TemporaryDirectory() as folder:
            context = open_run(config, Path(folder))
            state = run_rounds(replace(context, fleet=attacked(context, cell.attack))).state
            accuracy = f"{honest_accuracy(context, state):.2f}"
    except UserError as error:  # a rule that cannot work with so few replies
        accuracy = str(error)
    return accuracy, time.monotonic() - started


def attacked(context: RunContext, attack: str) -> Fleet:
    """Return a run's fleet with a liar in it."""
    fleet, lie = context.fleet, ATTACKS[attack]
    if attack == "none":
        return fleet
    if lie is not None:
        return Poisoned(fleet, lie)
    assert isinstance(fleet, SimulatedFleet)
    fleet.shard = partial(with_wrong_labels, fleet.shard, len(context.data.classes))
    return fleet


def honest_accuracy(context: RunContext, state: RunState) -> float:
    """Return the mean accuracy of the honest clients' models: on all test images, or with tasks on their own."""
    clients = [client for client in range(context.config.fleet.clients) if client != LIAR]
    if context.config.data.tasks is not None:
        last_seen = {client: state.last_seen.get(client) for client in clients}
        replies = context.fleet.evaluate(EvalRequest(state.server, context.config.num_tasks, last_seen))
        counts = [(sum(e.correct for e in r.evaluations), sum(e.tested for e in r.evaluations)) for r in replies]
        return 100 * statistics.fmean(correct / tested for correct, tested in counts)
    if context.method.has_global_model:
        clients = clients[:1]
    models = [
        context.method.model_weights(state.server, context.base.tensors, own)
        for own in ((None if context.method.has_global_model else context.fleet.client_state(c)) for c in clients)
    ]
    return 100 * statistics.fmean(context.evaluator.evaluate(model).means()[0][0] for model in models)


# Commands

FIELDS = (*Cell._fields, "accuracy", "seconds")


def read_cells(path: Path) -> dict[Cell, str]:
    """Return the cells that a file has, with their accuracies."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            Cell(row["data"], row["method"], row["rule"], row["attack"], int(row["seed"])): row["accuracy"]
            for row in csv.DictReader(file)
        }


def run_cells(args: argparse.Namespace, keys: Mapping[Cell, Sequence[str]]) -> int:
    """Train the cells that the file does not have; add a line as each ends."""
    known, began = read_cells(args.out), time.monotonic()
    todo = [cell for cell in keys if cell not in known]
    print(f"{len(todo)} of {len(keys)} cells to run, {args.jobs} at a time", flush=True)
    if not args.out.exists():
        args.out.write_text(",".join(FIELDS) + "\n")
    with args.out.open("a", newline="") as file, ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        futures: dict[Future[tuple[str, float]], Cell] = {
            pool.submit(accuracy_of, cell, (*keys[cell], *args.override), args.plugin): cell for cell in todo
        }
        for future in as_completed(futures):
            if future.cancelled():
                continue
            accuracy, seconds = future.result()
            csv.writer(file).writerow([*futures[future], accuracy, f"{seconds:.0f}"])
            file.flush()
            print(*futures[future], accuracy, f"{seconds:.0f} s", flush=True)
            if time.monotonic() - began > 60 * args.minutes:
                pool.shutdown(wait=False, cancel_futures=True)  # those that run end
    return 0


def run_command(args: argparse.Namespace) -> int:
    """Train the poisoned runs."""
    return run_cells(
        args,
        {
            Cell("digits", method, rule, attack, seed): POISONED.get(method, (*OTHER_METHOD, f"method.name={method}"))
            for seed in args.seeds
            for rule in args.rules
            for method in args.methods
            for attack in args.attacks
        },
    )


def honest_command(args: argparse.Namespace) -> int:
    """Train honest runs."""
    return run_cells(
        args,
        {
            Cell(data, "fedavg" if method is None else method, rule, "none", seed): (
                *HONEST[data],
                *(() if method is None else (f"method.name={method}",)),
            )
            for seed in args.seeds
            for data in args.data
            for method in args.methods or (None,)
            for rule in args.rules
        },
    )


def table_command(args: argparse.Namespace) -> int:
    """Print a file's cells as a table: one row per method and rule, one column per attack, seeds beside each other."""
    cells = read_cells(args.out)
    attacks = [attack for attack in ATTACKS if any(cell.attack == attack for cell in cells)]
    rows = list(dict.fromkeys((cell.data, cell.method, cell.rule) for cell in cells))
    order = {rule: place for place, rule in enumerate(RULES)}
    print(f"| data | method | rule | {' | '.join(attacks)} |")
    print(f"|---|---|---|{'---|' * len(attacks)}")
    for data, method, rule in sorted(rows, key=lambda row: (row[0], row[1], order.get(row[2], len(order)))):
        columns = []
        for attack in attacks:
            of_seeds = {
                cell.seed: accuracy for cell, accuracy in cells.items() if cell[:4] == (data, method, rule, attack)
            }
            columns.append(" / ".join(_shown(of_seeds[seed]) for seed in sorted(of_seeds)))
        print(f"| {data} | {method} | {rule} | {' | '.join(columns)} |")
    return 0


def _shown(accuracy: str) -> str:
    try:
        return f"{float(accuracy):.1f}"
    except ValueError:
        return "refused"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="runs in which one device of ten lies, on digits")
    run.add_argument("--methods", nargs="+", default=list(POISONED), help="names of methods")
    run.add_argument("--attacks", nargs="+", default=list(ATTACKS)[:6], choices=ATTACKS)
    run.set_defaults(command=run_command, rules=list(RULES))
    honest = commands.add_parser("honest", help="runs without an attack, with the defence and without")
    honest.add_argument("--data", nargs="+", default=list(HONEST), choices=HONEST)
    honest.add_argument("--methods", nargs="+", help="names of methods; default: fedavg")
    honest.set_defaults(command=honest_command, rules=["none", "clip"])
    table = commands.add_parser("table", help="print a file as a table")
    table.set_defaults(command=table_command)
    for command in (run, honest, table):
        command.add_argument("out", metavar="FILE", type=Path, help="CSV file")
    for command in (run, honest):
        command.add_argument("--rules", nargs="+", help=f"{', '.join(RULES)}, or any registered rule")
        command.add_argument("--seeds", nargs="+", type=int, default=[0, 2, 3])
        command.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
        command.add_argument("--minutes", type=float, default=1e6, help="start no further run after so many minutes")
        command.add_argument("--plugin", nargs="+", type=Path, default=[], help="files that register methods or rules")
        command.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE", help="of the runs")
    args = parser.parse_args()
    try:
        return int(args.command(args))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that train
    sys.exit(main())
