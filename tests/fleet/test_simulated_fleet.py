"""The simulation: order of clients and threads do not change the result; client states are staged and committed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from conftest import MakeConfig, MakeContext, MakeFleet, MakeShard, MakeTrainer
from vitfleet.fleet.base import Fleet, FleetWrapper, Reply, Request
from vitfleet.fleet.simulation import compact
from vitfleet.message import Message, State
from vitfleet.methods import ClientGenerator, ClientJob
from vitfleet.methods.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.standalone import Standalone, StandaloneParams
from vitfleet.models.net import Net
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.machine import thread_limit


@dataclass
class ShuffledFleet(FleetWrapper[Fleet]):
    """A fleet that trains clients in one random order and yields replies in another."""

    rng: random.Random
    reordered: bool = False

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        shuffled = list(requests)
        self.rng.shuffle(shuffled)
        replies = list(self.inner.train(shuffled))
        self.rng.shuffle(replies)
        clients = [reply.client for reply in replies]
        self.reordered = self.reordered or clients != sorted(clients)
        yield from replies


def assert_same_tensors(first: State, second: State) -> None:
    assert set(first.tensors) == set(second.tensors)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


THREADED_CASES = {
    "fedavg": ("fleet.clients=12", "fleet.per_round=11"),
    "transfl": ("method.k=1",),
    "fed-prompt": ("method.prompts=2", "train.mask_ratio=0.5"),
    "fedvit": (
        "method.head_epochs=1",
        "train.epochs=2",
        "data.tasks.count=3",
        "data.tasks.classes=2",
        "data.tasks.per_client=[1,2]",
        "data.tasks.rounds_per_task=1",
    ),
}


@pytest.mark.parametrize("name", THREADED_CASES)
def test_worker_threads_do_not_change_the_result(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Three workers share three CPU threads, so each computes with one, as a single worker does."""
    config = tiny_config(f"method.name={name}", *THREADED_CASES[name], "data.augment.flip=true")
    with thread_limit(1):
        runs = []
        for folder, keys in (("single", {"threads": 1}), ("threaded", {"threads": 3, "workers": 3})):
            machine = config.machine.model_copy(update=keys)
            context = open_run(config.model_copy(update={"machine": machine}), tmp_path / folder)
            runs.append((run_rounds(context).state, context.fleet))
            assert context.trainer.machine.workers == keys.get("workers", 1)
            assert torch.get_num_threads() == keys["threads"], "the number of threads is restored"
    (single, single_fleet), (threaded, threaded_fleet) = runs
    assert_same_tensors(single.server, threaded.server)
    for client in range(config.fleet.clients):
        states = (fleet.client_state(client) or State() for fleet in (single_fleet, threaded_fleet))
        assert_same_tensors(*states)
    records = [(tmp_path / folder / "records.jsonl").read_bytes() for folder in ("single", "threaded")]
    assert records[0] == records[1]


def test_exception_in_a_worker_thread_is_raised(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    class FailingFedAvg(FedAvg):
        def client_update(self, job: ClientJob) -> ClientGenerator:
            update = yield from super().client_update(job)
            if job.client == 3:
                raise ZeroDivisionError("client 3")
            return update

    trainer = make_trainer()
    trainer = replace(trainer, machine=replace(trainer.machine, workers=2))
    fleet = make_fleet(FailingFedAvg(FedAvgParams(), make_context()), trainer, lambda client: make_shard(0, 4))
    replies = fleet.train(Request(1, client, Message(tiny_net.initial_weights())) for client in range(6))
    with pytest.raises(ZeroDivisionError, match="client 3"):
        list(replies)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "standalone"])
def test_order_of_clients_does_not_change_the_result(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(f"method.name={name}", "data.augment.flip=true", "train.mask_ratio=0.25")
    ordered = open_run(config, tmp_path / "ordered")
    shuffled = open_run(config, tmp_path / "shuffled")
    fleet = ShuffledFleet(shuffled.fleet, random.Random(3))
    shuffled = replace(shuffled, fleet=fleet)
    state, shuffled_state = load_state(ordered), load_state(shuffled)
    for round in range(1, 4):
        state, record = run_round(ordered, state, round)
        shuffled_state, shuffled_record = run_round(shuffled, shuffled_state, round)
        assert record.line() == shuffled_record.line()
        assert_same_tensors(state.server, shuffled_state.server)
    for client in range(config.fleet.clients):
        states = (context.fleet.client_state(client) or State() for context in (ordered, shuffled))
        assert_same_tensors(*states)
    assert fleet.reordered


def test_clients_train_only_as_replies_are_consumed(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    requested: list[int] = []

    def requests() -> Iterator[Request]:
        for client in range(5):
            requested.append(client)
            yield Request(1, client, Message(tiny_net.initial_weights()))

    method = FedAvg(FedAvgParams(), make_context())
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 4))
    replies = fleet.train(requests())
    assert next(replies).client == 0
    assert requested == [0]


def test_changed_states_returns_each_committed_state_once(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    checkpointed = State(tiny_net.initial_weights())
    base = tiny_net.initial_weights()
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 4), base, {7: checkpointed})
    assert fleet.changed_states() == {}
    list(fleet.train(Request(1, client, Message()) for client in (3, 2, 1)))
    assert fleet.changed_states() == {}, "not committed yet"
    fleet.commit([3, 1])
    changed = fleet.changed_states()
    assert list(changed) == [1, 3]
    assert fleet.changed_states() == {}
    assert fleet.client_state(3) is None, "released: the checkpoint has it"
    stored = fleet.client_state(7)
    assert stored is not None
    assert all(torch.equal(stored.tensors[name], checkpointed.tensors[name]) for name in checkpointed.tensors)
    assert fleet.client_state(0) is None


class DropsState(Standalone):
    """Stores a state in its first round and drops it in the second."""

    def client_update(self, job: ClientJob) -> ClientGenerator:
        update = yield from super().client_update(job)
        return update if job.client_state is None else replace(update, client_state=None)


def test_changed_states_reports_a_dropped_state(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    method = DropsState(StandaloneParams(), make_context())
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 4), tiny_net.initial_weights())
    list(fleet.train([Request(1, 0, Message())]))
    fleet.commit([0])
    assert fleet.client_state(0) is not None
    list(fleet.train([Request(2, 0, Message())]))
    fleet.commit([0])
    assert fleet.changed_states() == {0: None}
    assert fleet.client_state(0) is None


def test_compact_copies_views_and_keeps_whole_tensors() -> None:
    matrix, whole = torch.rand(4, 3), torch.rand(2)
    state = compact(State({"row": matrix[1], "whole": whole}, {"seen": 2}))
    assert torch.equal(state.tensors["row"], matrix[1])
    assert state.tensors["row"].untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr()
    assert state.tensors["row"].untyped_storage().nbytes() == 256, "its own storage, with alignment"
    assert state.tensors["whole"] is whole
    assert state.numbers == {"seen": 2}
