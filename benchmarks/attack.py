"""What a device that lies can do: forged replies to every method.

A device's reply is changed in every way that its form allows, tensor by tensor and number by number, and in drawn
combinations, and each is taken through a round of a tiny run with the defence of real fleets. A reply that no honest
device sends must be refused. One that is used must not end the server, cost another device its place, move the model
further than three honest rounds do, or take more than its share of time.

Examples::

    python benchmarks/attack.py
    python benchmarks/attack.py --methods fedavg mine --plugin mine.py --drawn 500

The exit code is 1 if any reply was accepted and harmful. ``poison.py`` measures what a device that lies through a whole
run costs in accuracy, ``attack_server.py`` what a hostile server can do.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.table import Table
from torch import Tensor

from vitfleet.config import load_config
from vitfleet.config.plugins import load_plugins
from vitfleet.config.registry import METHODS
from vitfleet.errors import UserError
from vitfleet.fleet.base import Fleet, FleetWrapper, Reply, Request
from vitfleet.flower.transport.codec import pack_reply, unpack_reply
from vitfleet.flower.transport.payloads import CHUNK, HEADER
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.wire import safetensors_chunks

# Flower's processes set these; its messages cannot be created without them.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

LIAR = 1  # the client that lies

TINY = (
    *("rounds=8", "data.limit=160", "model.dim=16", "model.depth=2", "model.heads=2", "model.patch_size=4"),
    *("fleet.clients=4", "fleet.per_round=4", "fleet.devices={}", "machine.device=cpu", "machine.threads=1"),
    *("train.epochs=2", "train.batch_size=16", "eval.every=1000", "eval.clients=0", "trackers={}"),
    "aggregate.defence=clip",
)
TASKS = "data.tasks={count = 4, classes = 2, rounds_per_task = 2, per_client = [1, 2], share = [0.3, 0.5]}"
OPTIONS = {
    "transfl": ("method.k=1",),
    "fedbfpt": ("method.local_layers=2",),
    "eftvit": ("method.local_layers=1",),
    "closed-form": ("model.weights=digits", "model.dim=32", "model.depth=4", "model.heads=4", "model.patch_size=2"),
}
ROUND = 4  # the last one of a task: what it stores is sent in the next
ROUNDS = {"closed-form": 1}  # a client sends its sums once
FURTHEST = 3.0  # how far a reply may move the model, in honest rounds
MAX_SECONDS = 5.0
MAX_BYTES = 10**8


@dataclass
class Recorded(FleetWrapper[Fleet]):
    """Keeps the replies of the last round."""

    replies: list[Reply] = field(default_factory=list)

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train, and keep the replies."""
        self.replies.clear()
        for reply in self.inner.train(requests):
            self.replies.append(reply)
            yield reply


@dataclass
class Tried(FleetWrapper[Fleet]):
    """Trains for a trial: no client keeps a state. With ``replies`` it does not train, but replies these."""

    replies: Sequence[Reply] | None = None

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train, or return the given replies."""
        if self.replies is None:
            yield from self.inner.train(requests)
        else:
            list(requests)
            yield from self.replies

    def commit(self, accepted: Collection[int]) -> None:
        """Drop all new states."""
        self.inner.commit(())


class Forgery(NamedTuple):
    """A forged reply.

    ``impossible``: no honest device sends it, so it must be refused.
    """

    kind: str
    content: RecordDict
    impossible: bool


@dataclass
class Draft:
    """A reply in parts, to be changed."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    header: dict[str, Any]

    @classmethod
    def of(cls, reply: Reply, round: int) -> Draft:
        """Return the parts of a reply in a round."""
        assert reply.message is not None
        header = pack_reply(replace(reply, message=None), round).config_records[HEADER]
        return cls(dict(reply.message.tensors), dict(reply.message.numbers), dict(header))

    def content(self) -> RecordDict:
        """Return the reply as it travels."""
        encoded = b"".join(safetensors_chunks(self.tensors, {"numbers": json.dumps(self.numbers)}))
        return RecordDict({HEADER: ConfigRecord(self.header), "message/000000": ConfigRecord({CHUNK: encoded})})


def tensor_changes(name: str, tensor: Tensor) -> dict[str, tuple[Tensor | None, bool]]:
    """Return what can be made of a tensor (``None``: it is left out), and whether no honest device sends that."""
    changes: dict[str, tuple[Tensor | None, bool]] = {
        "missing": (None, True),
        "another type": (tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32), True),
        "one axis more": (tensor[None], True),
        "no elements": (tensor.flatten()[:0], tensor.numel() > 0),
    }
    if not tensor.numel():
        return changes
    one = tensor.clone().flatten()
    if tensor.is_floating_point():
        for number in (math.nan, math.inf, 1e30):
            one[0] = number
            changes[f"one {number:g}"] = one.reshape(tensor.shape).clone(), True
        changes |= {f"× {factor:g}": (tensor * factor, abs(factor) >= 1e6) for factor in (-1.0, 0.0, 10.0, 1e6, 1e30)}
        changes["noise"] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor.dtype), False
        if name.endswith("running_var"):
            changes["negative"] = -tensor.abs() - 1e-3, True
    else:
        info = torch.iinfo(tensor.dtype)
        for number in (info.min, info.max):
            one[0] = number
            changes[f"one {number}"] = one.reshape(tensor.shape).clone(), name != "features"
        if tensor.dim() and len(tensor) > 1:
            changes["reversed"] = tensor.flip(0), name.endswith("indices")
    return changes


NUMBERS: Mapping[str, Any] = {
    "negative": -3,
    "much": 10**8,
    "too much": 2**60,
    "fraction": 0.5,
    "list": [1, 2, 3],
    "empty list": [],
    "NaN": math.nan,
    "true": True,
    "null": None,
    "text": "3",
}
LEGAL_NUMBERS = {("samples", "much")}  # a device may say so: it must not gain by it


def forgeries(draft: Draft, earlier: RecordDict | None) -> Iterator[Forgery]:
    """Yield every single change of a reply, and a reply of an earlier round."""
    for name, tensor in draft.tensors.items():
        for kind, (changed, impossible) in tensor_changes(name, tensor).items():
            tensors = {**draft.tensors, **({} if changed is None else {name: changed})}
            if changed is None:
                del tensors[name]
            yield Forgery(f"tensor {name}: {kind}", replace(draft, tensors=tensors).content(), impossible)
    junk = torch.ones(10)
    for name in ("", "junk", "../x", "features", "adaptive.values", "knowledge.0000.values"):
        if name not in draft.tensors:
            yield Forgery(
                f"tensor {name!r} more", replace(draft, tensors={**draft.tensors, name: junk}).content(), True
            )
    yield Forgery("no tensors", replace(draft, tensors={}).content(), bool(draft.tensors))
    for name, value in [*draft.numbers.items(), ("undeclared", 1)]:
        changes = {"missing": None} | {kind: number for kind, number in NUMBERS.items()}
        if isinstance(value, list) and value:
            changes |= {"longer": value + value, "shorter": value[:-1], "one wild": [*value[:-1], 2**50]}
        for kind, number in changes.items():
            numbers = {**draft.numbers, name: number}
            if kind == "missing":
                del numbers[name]
            if numbers == draft.numbers and list(map(type, numbers.values())) == list(
                map(type, draft.numbers.values())
            ):
                continue
            impossible = (name, kind) not in LEGAL_NUMBERS and not plausible(name, value, number, kind)
            yield Forgery(f"number {name}: {kind}", replace(draft, numbers=numbers).content(), impossible)
    for name in draft.header:
        for value in (-1, 2**60, "x", [1, 2]):
            content = replace(draft, header={**draft.header, name: value}).content()
            yield Forgery(f"header {name} = {value!r}", content, False)
    if earlier is not None:
        yield Forgery("reply of an earlier round", earlier, True)


def plausible(name: str, honest: object, changed: object, kind: str) -> bool:
    """Whether an honest device might report a number in place of another: one of the same form.

    Of itself a device reports what it likes: how many samples it stored, how often a gradient was rotated. Such numbers
    enter statistics. Those that mean something for others are bounded, or checked against what is sent.
    """
    if kind == "missing":
        return name != "samples"
    if name == "undeclared" or type(changed) is not type(honest):
        return False
    if isinstance(changed, int):
        return changed >= 0
    if isinstance(changed, list) and isinstance(honest, list) and all(isinstance(item, int) for item in honest):
        return kind in ("shorter", "longer", "list", "empty list")
    if isinstance(changed, list) and isinstance(honest, list):
        same = len(changed) == len(honest) and all(isinstance(item, float) for item in honest)
        return (same and kind == "one wild") or kind == "shorter"
    return isinstance(changed, float) and math.isfinite(changed)


def drawn(draft: Draft, rng: random.Random) -> Forgery:
    """Return a drawn combination: some of the tensors changed at once, and perhaps bytes."""
    tensors = dict(draft.tensors)
    for name in rng.sample(sorted(tensors), min(len(tensors), rng.randint(1, 4))):
        changed, _ = rng.choice(list(tensor_changes(name, tensors[name]).values()))
        if changed is not None:
            tensors[name] = changed
    numbers = dict(draft.numbers)
    if rng.random() < 0.5:
        numbers["samples"] = rng.choice([0, 1, 10**3, 10**6, 10**8])
    content = replace(draft, tensors=tensors, numbers=numbers).content()
    if rng.random() < 0.3:
        chunk = content["message/000000"]
        encoded = bytearray(chunk[CHUNK])  # type: ignore[arg-type]
        for _ in range(rng.randint(1, 4)):
            encoded[rng.randrange(len(encoded))] ^= 1 << rng.randrange(8)
        chunk[CHUNK] = bytes(encoded)
    return Forgery("drawn", content, False)


@dataclass
class Outcome:
    """What came of the forged replies of a method."""

    refused: int = 0
    harmless: int = 0
    harmful: dict[str, str] = field(default_factory=dict)  # the harm, by kind

    @property
    def count(self) -> int:
        """Number of forged replies."""
        return self.refused + self.harmless + len(self.harmful)


@dataclass
class Target:
    """A run of a method, and one of its rounds."""

    context: RunContext
    before: RunState
    honest: list[Reply]
    earlier: RecordDict | None  # the liar's reply of the round before, as it travels
    after: RunState
    round: int

    @classmethod
    def open(cls, name: str, folder: Path, overrides: Sequence[str]) -> Target:
        """Open a tiny run and train it up to the round that is attacked."""
        tasks = [TASKS] if METHODS[name].target.needs_tasks else []
        keys = [*TINY, f"method.name={name}", *OPTIONS.get(name, ()), *tasks, *overrides]
        context = open_run(load_config("digits", keys), folder)
        recorded = Recorded(context.fleet)
        state, of_liar = load_state(context), dict[int, RecordDict]()
        for round in range(1, (last := ROUNDS.get(name, ROUND)) + 1):
            before = state
            state, _ = run_round(replace(context, fleet=recorded), state, round)
            of_liar[round] = next(pack_reply(reply, round) for reply in recorded.replies if reply.client == LIAR)
        return cls(context, before, list(recorded.replies), of_liar.get(last - 1), state, last)

    def forgeries(self, number: int, rng: random.Random, most: int | None = None) -> list[Forgery]:
        """Return all single changes of the liar's reply, or some of them, and so many drawn combinations."""
        draft = Draft.of(next(reply for reply in self.honest if reply.client == LIAR), self.round)
        singles = list(forgeries(draft, self.earlier))
        if most is not None and most < len(singles):
            singles = rng.sample(singles, most)
        return [*singles, *(drawn(draft, rng) for _ in range(number))]

    def harm(self, forgery: Forgery) -> str | None:
        """Return the harm of a forged reply; an empty text if it is used and does none, ``None`` if it is refused."""
        started = time.process_time()
        try:
            reply = unpack_reply(forgery.content, LIAR, self.round, MAX_BYTES)
            replies = [reply if other.client == LIAR else other for other in self.honest]
            after, record = self._round(self.before, self.round, replies)
            seconds = time.process_time() - started
            failures = {entry.client: entry.failure for entry in record.clients if entry.failure is not None}
            if others := [reason for client, reason in failures.items() if client != LIAR]:
                return f"another device is refused: {others[0]}"
            if seconds > MAX_SECONDS:
                return f"the round takes {seconds:.1f} s"
            json.dumps([entry.numbers for entry in record.clients], allow_nan=False)
            if LIAR in failures:
                return None
            if forgery.impossible:
                return "accepted, though no honest device sends it"
            moved, usual = self._moved(after), self._distance(self.after, self.before)
            if not moved <= FURTHEST * usual:
                return f"moves the model {moved / usual:.1f} times as far as an honest round" if usual else "moves it"
            _, record = self._round(after, self.round + 1)
            if others := [entry.failure for entry in record.clients if entry.failure and entry.client != LIAR]:
                return f"next round: another device fails: {others[0]}"
        except Exception as error:  # noqa: BLE001  (whatever it is, it ends a server)
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"ends the server: {type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        return ""

    def _round(self, state: RunState, round: int, replies: Sequence[Reply] | None = None) -> tuple[RunState, Any]:
        return run_round(replace(self.context, fleet=Tried(self.context.fleet, replies)), state, round)

    def _moved(self, after: RunState) -> float:
        return self._distance(after, self.after)

    def _distance(self, one: RunState, other: RunState) -> float:
        """Return the Euclidean distance of two servers' weights."""
        tensors, others = one.server.tensors, other.server.tensors
        if tensors.keys() != others.keys():
            return math.inf
        squares = [
            float((tensor.double() - others[name].double()).square().sum())
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        ]
        return math.sqrt(sum(squares))


def attack_method(name: str, args: argparse.Namespace, advance: Callable[[], None]) -> Outcome:
    """Send a method's server every forged reply."""
    outcome, rng = Outcome(), random.Random(name)
    with tempfile.TemporaryDirectory() as folder:
        target = Target.open(name, Path(folder), args.override)
        for forgery in target.forgeries(args.drawn, rng, args.most):
            harm = target.harm(forgery)
            if harm is None:
                outcome.refused += 1
            elif harm:
                outcome.harmful[f"{forgery.kind} ({outcome.count})"] = harm
            else:
                outcome.harmless += 1
            advance()
    return outcome


# Commands


def attack_methods(args: argparse.Namespace, console: Console) -> int:
    """Print a table of forged replies; return 1 if any did harm."""
    load_plugins(args.plugin)
    names = args.methods or [entry.name for entry in METHODS]
    table = Table("method", "forged replies", "refused", "accepted, harmless", "accepted, harmful")
    harms: dict[str, Counter[str]] = {}
    with ProgressBar(console=console, transient=True) as bar:
        for name in names:
            task = bar.add_task(name, total=None)
            outcome = attack_method(name, args, lambda task=task: bar.advance(task))
            bar.remove_task(task)
            table.add_row(name, *map(str, (outcome.count, outcome.refused, outcome.harmless, len(outcome.harmful))))
            harms[name] = Counter(f"{kind.rpartition(' (')[0]}: {harm}" for kind, harm in outcome.harmful.items())
            console.print(f"{name}: {outcome.count} forged replies, {len(outcome.harmful)} harmful", highlight=False)
    console.print(table)
    for name, counted in harms.items():
        for text, times in counted.most_common(args.shown):
            console.print(f"{name}: {text} ({times} ×)", highlight=False, markup=False, soft_wrap=True)
    return int(any(harms.values()))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="names; default: every registered method")
    parser.add_argument(
        "--drawn", type=int, default=100, help="drawn combinations per method, besides all single changes"
    )
    parser.add_argument("--most", type=int, help="single changes per method; default: all")
    parser.add_argument("--shown", type=int, default=20, help="kinds of harm that are shown per method")
    parser.add_argument("--plugin", nargs="+", type=Path, default=[], help="files that register methods or rules")
    parser.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE", help="key of the runs")
    args = parser.parse_args()
    try:
        return attack_methods(args, Console(width=160))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
