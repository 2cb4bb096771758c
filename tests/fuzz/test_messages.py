"""Whatever a client replies: the round goes on, names why a reply was refused, and nothing wild enters the model."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from case_limits import ALLOWANCE, LARGE_INPUT, MIB, MemoryUse, case_limits, settled_memory
from flwr.app import RecordDict
from forged import forged_reply
from mutations import content_bytes, mutated_reply

from conftest import DIGITS_BODY, RecordProperty
from vitfleet.config import load_config
from vitfleet.config.registry import METHODS
from vitfleet.fleet.base import Fleet, FleetWrapper, Reply, Request
from vitfleet.flower.transport.codec import unpack_reply
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.records import RoundRecord
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.wire import encoded_size

ROUND = 3
SETTINGS: tuple[str, ...] = (
    *("rounds=6", "data.limit=120", "model.dim=16", "model.depth=2", "model.heads=2", "model.patch_size=4"),
    *("fleet.clients=4", "fleet.per_round=4", "fleet.devices={nano = 1}", "machine.device=cpu", "machine.threads=1"),
    *("train.epochs=2", "train.batch_size=16", "eval.every=1000", "trackers={}"),
)
TASKS = "data.tasks={count = 3, classes = 3, rounds_per_task = 2, per_client = [1, 3], share = [0.2, 0.4]}"
OPTIONS = {
    "transfl": ["method.k=1"],
    "fedbfpt": ["method.local_layers=2"],
    "eftvit": ["method.local_layers=1"],
    "closed-form": [*DIGITS_BODY],
    "analytic": [*DIGITS_BODY],
}
#: Sums are sent once: those of a round in which all clients still have to send them.
ROUNDS = {"closed-form": 1}
#: Whatever a client sends, a server that solves needs several matrices of the size of one message.
NOT_WIDE = {"closed-form", "analytic"}
WIDE = "model.dim=256"  # the whole model is 6 MB: ten times a message is what a round may take, and no constant
WIDE_SHARE = 5  # one of so many messages is for a wide model
FORGED_SHARE = 8  # one of so many messages is made to grow when it is parsed
LARGEST = 1e3  # honest weights of these small models are below 10
MAX_COSTED = 10  # the memory of a round takes a second to compute
MUTATED = 1  # the client whose reply is changed


@dataclass
class RecordedReplies(FleetWrapper[Fleet]):
    """Keeps the replies of the last round."""

    replies: list[Reply]

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        self.replies.clear()
        for reply in self.inner.train(requests):
            self.replies.append(reply)
            yield reply


@dataclass
class GivenReplies(FleetWrapper[Fleet]):
    """Replies what it was given."""

    replies: list[Reply]

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        list(requests)
        yield from self.replies

    def commit(self, accepted: object) -> None:
        """Keep no states."""


def all_methods() -> list[str]:
    return [entry.name for entry in METHODS if entry.origin.built_in]


def opened(name: str, folder: Path, *overrides: str) -> tuple[RunContext, RunState, list[Reply]]:
    """Return a run, its state before a round, and the honest replies of that round."""
    tasks = [TASKS] if METHODS[name].target.needs_tasks else []
    config = load_config("digits", [*SETTINGS, f"method.name={name}", *OPTIONS.get(name, []), *tasks, *overrides])
    context = open_run(config, folder)
    recorder = RecordedReplies(context.fleet, [])
    context = replace(context, fleet=recorder)
    state = load_state(context)
    last = ROUNDS.get(name, ROUND)
    for round in range(1, last):
        state, _ = run_round(context, state, round)
    run_round(context, state, last)
    return replace(context, fleet=recorder.inner), state, list(recorder.replies)


def hostile_reply(honest: Reply, size: int, rng: random.Random) -> RecordDict:
    """Return a mutated reply, or one that is made to grow when it is parsed."""
    if rng.randrange(FORGED_SHARE):
        return mutated_reply(honest, ROUND, rng)
    length = rng.randint(size, 2 * size) if size >= LARGE_INPUT else rng.choice([1000, 50_000, 250_000, 3 * MIB])
    return forged_reply(rng, ROUND, length, rng.choice([1.0, 1.0, 0.06]))


def check_method(name: str, folder: Path, examples: int, counts: Counter[str], wide: bool = False) -> MemoryUse:
    context, state, honest = opened(name, folder, *([WIDE] if wide else []))
    rng, costed, use = random.Random(f"{name} {wide}"), 0, MemoryUse()
    message = next(reply.message for reply in honest if reply.client == MUTATED and reply.message)
    round = state.round + 1
    size = encoded_size(message)
    # The other clients' replies take memory too: a reply is large if it is about as large as theirs.
    large = max(LARGE_INPUT, size // 2)
    with settled_memory():
        allowance = ALLOWANCE + own_memory(context, state, honest)
        for _ in range(examples):
            content = hostile_reply(honest[MUTATED], size, rng)
            with case_limits(content_bytes(content), allowance, use, large):
                changed = unpack_reply(content, MUTATED, ROUND, 10**8)
                replies = [changed if reply.client == MUTATED else reply for reply in honest]
                after, record = run_round(replace(context, fleet=GivenReplies(context.fleet, replies)), state, round)
            refused = check_round(name, after, record)
            context.planner.plan(after, round + 1)
            reported = dict(after.client_metrics[MUTATED]) if MUTATED in after.client_metrics else {}
            if costed < MAX_COSTED and not refused and reported.get("stored") != message.numbers.get("stored"):
                costed += 1
                context.client_costs(after.client_metrics)
            counts["refused" if refused else "used"] += 1
    return use


def check_round(name: str, after: RunState, record: RoundRecord) -> bool:
    """Check what a round made of the replies; return whether it refused the hostile one."""
    failures = {entry.client: entry.failure for entry in record.clients if entry.failure is not None}
    assert set(failures) <= {MUTATED}, f"{name}: honest replies were refused: {failures}"
    assert all(failure.strip() for failure in failures.values())
    for tensor_name, tensor in after.server.tensors.items():
        if tensor.dtype == torch.float64 or not len(tensor):  # sums grow with the images, and may be of none
            continue
        assert float(tensor.abs().max()) < LARGEST, f"{name}: {tensor_name} has {float(tensor.abs().max()):g}"
    json.dumps([entry.numbers for entry in record.clients], allow_nan=False)
    return bool(failures)


def own_memory(context: RunContext, state: RunState, honest: list[Reply]) -> int:
    """Return the bytes that a round takes whose replies are all honest; the second one, when caches are filled."""
    use = MemoryUse()
    for _ in range(2):
        with case_limits(0, 2**40, use):
            run_round(replace(context, fleet=GivenReplies(context.fleet, honest)), state, state.round + 1)
    return use.last


@pytest.mark.parametrize("name", ["fedavg", "transfl", "eftvit", "fedvit", "closed-form"])
def test_mutated_messages(name: str, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    check_method(name, tmp_path, 30, counts)
    assert min(counts["refused"], counts["used"]) > 1


def test_mutated_messages_of_a_wide_model(tmp_path: Path) -> None:
    use = check_method("fedavg", tmp_path, 12, Counter(), wide=True)
    assert use.large_cases > 3 or not use.measured


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_mutated_messages(tmp_path: Path, record_property: RecordProperty) -> None:
    counts, methods = Counter[str](), all_methods()
    each = -(-10_000 // (len(methods) - 1))  # one of them has no wide model
    for wide, examples in ((False, each - each // WIDE_SHARE), (True, each // WIDE_SHARE)):
        folder = tmp_path / ("wide" if wide else "tiny")
        named = [name for name in methods if not (wide and name in NOT_WIDE)]
        use = MemoryUse.most(check_method(name, folder / name, examples, counts, wide) for name in named)
        record_property(f"memory of mutated messages of {folder.name} models", str(use))
    record_property("mutated messages", f"{dict(counts)}, of {len(methods)} methods")
    assert sum(counts.values()) >= 10_000
