"""Whoever is trained first or answers first: the result is the same, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeConfig, MakeContext, MakeFleet, MakeShard, MakeTrainer
from vitfleet.fleet.base import ClientTask, EvalResult, Fleet, FleetWrapper, Reply, Request, in_request_order
from vitfleet.fleet.inline import compact
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientGenerator, ClientJob, ClientUpdate
from vitfleet.methods.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.standalone import Standalone, StandaloneParams
from vitfleet.models.net import Net
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.cohort_inputs import ClientFit, RngContext
from vitfleet.training.machine import thread_limit
from vitfleet.training.objective import Fit, FitResult, Objective
from vitfleet.training.trainer import Trainer


@dataclass
class Shuffled(FleetWrapper[Fleet]):
    """A fleet whose clients are trained in one random order and answer in another."""

    chance: random.Random
    moved: bool = False

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        asked = list(requests)
        self.chance.shuffle(asked)
        replies = list(self.inner.train(asked))
        self.chance.shuffle(replies)
        clients = [reply.client for reply in replies]
        self.moved = self.moved or clients != sorted(clients)
        yield from replies


SIDE_BY_SIDE = {
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


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_clients_that_are_trained_side_by_side_are_as_if_alone(
    name: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """With three threads for three of them, each has one."""
    config = tiny_config(f"method.name={name}", *SIDE_BY_SIDE[name], "data.augment.flip=true")
    with thread_limit(1):
        runs = []
        for where, how in (("alone", {"threads": 1}), ("beside", {"threads": 3, "workers": 3})):
            machine = config.machine.model_copy(update=how)
            context = open_run(config.model_copy(update={"machine": machine}), tmp_path / where)
            runs.append((run_rounds(context).state, context.fleet))
            assert context.trainer.machine.workers == how.get("workers", 1)
            assert torch.get_num_threads() == how["threads"], "as many as before"
    (alone, alone_fleet), (beside, beside_fleet) = runs
    same(alone.server, beside.server)
    for client in range(config.fleet.clients):
        same(alone_fleet.client_state(client) or State(), beside_fleet.client_state(client) or State())
    lines = [(tmp_path / where / "records.jsonl").read_bytes() for where in ("alone", "beside")]
    assert lines[0] == lines[1]


def test_a_training_that_fails_beside_others_is_heard_of(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    class Broken(FedAvg):
        def client_update(self, job: ClientJob) -> ClientGenerator:
            answer = yield from super().client_update(job)
            if job.client == 3:
                raise ZeroDivisionError("in the middle")
            return answer

    trainer = make_trainer()
    trainer = replace(trainer, machine=replace(trainer.machine, workers=2))
    fleet = make_fleet(Broken(FedAvgParams(), make_context()), trainer, lambda client: make_shard(0, 4))
    replies = fleet.train(Request(1, client, Message(tiny_net.initial_weights())) for client in range(6))
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        list(replies)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "standalone"])
def test_a_fleet_that_answers_in_any_order_gives_the_same_bits(
    name: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config(f"method.name={name}", "data.augment.flip=true", "train.mask_ratio=0.25")
    (tmp_path / "straight").mkdir()
    (tmp_path / "shuffled").mkdir()
    straight = open_run(config, tmp_path / "straight")
    shuffled = open_run(config, tmp_path / "shuffled")
    fleet = Shuffled(shuffled.fleet, random.Random(3))
    shuffled = replace(shuffled, fleet=fleet)
    state, other = load_state(straight), load_state(shuffled)
    for round in range(1, 4):
        state, record = run_round(straight, state, round)
        other, other_record = run_round(shuffled, other, round)
        assert record.line() == other_record.line()
        same(state.server, other.server)
    for client in range(config.fleet.clients):
        same(straight.fleet.client_state(client) or State(), shuffled.fleet.client_state(client) or State())
    assert fleet.moved


def same(left: State, correct: State) -> None:
    assert set(left.tensors) == set(correct.tensors)
    assert all(torch.equal(left.tensors[name], correct.tensors[name]) for name in left.tensors)


@given(st.data())
def test_replies_pass_once_each_in_the_order_of_the_requests(data: st.DataObject) -> None:
    clients = data.draw(st.lists(st.integers(0, 10_000), unique=True, max_size=30))
    arrival = data.draw(st.permutations(clients))
    replies = {client: Reply(client, Message(numbers={"loss": float(client)})) for client in clients}
    passed = list(in_request_order((replies[client] for client in arrival), clients))
    assert [reply.client for reply in passed] == clients
    assert all(reply is replies[reply.client] for reply in passed)


def test_a_reply_whose_turn_it_is_does_not_wait() -> None:
    pulled: list[int] = []

    def replies() -> Iterator[Reply]:
        for client in (0, 2, 1, 3):
            pulled.append(client)
            yield Reply(client, Message())

    ordered = in_request_order(replies(), [0, 1, 2, 3])
    assert (next(ordered).client, pulled) == (0, [0])
    assert (next(ordered).client, pulled) == (1, [0, 2, 1])
    assert (next(ordered).client, pulled) == (2, [0, 2, 1])
    assert (next(ordered).client, pulled) == (3, [0, 2, 1, 3])


class Thrice(FedAvg):
    """Trains three times in one job."""

    def client_update(self, job: ClientJob) -> ClientGenerator:
        weights = job.message.tensors
        for epochs in (2, 1, 3):
            fitted = yield Fit(weights, Objective(self.trainable), epochs)
            weights = fitted.weights
        return ClientUpdate(
            message=Message(weights, {"samples": fitted.samples, "loss": float(fitted.loss)}), model_weights=weights
        )


def test_later_trainings_of_a_job_have_later_addresses(
    tiny_net: Net,
    make_context: MakeContext,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    make_fleet: MakeFleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[RngContext] = []
    fit = Trainer.fit_cohort

    def note(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        places.extend(one.rng for one in group)
        return fit(self, group)

    monkeypatch.setattr(Trainer, "fit_cohort", note)
    method = Thrice(FedAvgParams(), make_context())
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 10), seed=5)
    down = Message(tiny_net.initial_weights())
    list(fleet.train([Request(4, 1, down), Request(4, 2, down)]))
    assert places == [RngContext(5, 4, client, first_epoch=first) for client in (1, 2) for first in (0, 2, 3)]


def test_clients_are_trained_only_as_their_replies_are_wanted(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    asked: list[int] = []

    def requests() -> Iterator[Request]:
        for client in range(5):
            asked.append(client)
            yield Request(1, client, Message(tiny_net.initial_weights()))

    method = FedAvg(FedAvgParams(), make_context())
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 4))
    replies = fleet.train(requests())
    assert next(replies).client == 0
    assert asked == [0]


def test_models_are_tried_out_where_that_is_asked_for(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    tried: dict[int, Tensors] = {}

    def evaluate_tasks(weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
        tried.update({client: weights for client, _ in tasks})
        return [EvalResult(3, 4)] * len(tasks)

    fleet = make_fleet(FedAvg(FedAvgParams(), make_context()), make_trainer(), lambda client: make_shard(0, 4))
    fleet.runtime = replace(fleet.runtime, evaluate_tasks=evaluate_tasks)
    down = Message(tiny_net.initial_weights())
    asked, silent = fleet.train([Request(1, 5, down, evaluate=True), Request(1, 6, down)])
    assert (asked.evaluation, silent.evaluation) == (EvalResult(3, 4), None)
    assert list(tried) == [5]
    assert asked.message is not None
    # What the client has just trained, not what the server makes of it.
    assert all(torch.equal(tried[5][name], asked.message.tensors[name]) for name in tiny_net.anatomy.shapes)


def test_what_changed_is_told_once(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    kept = State(tiny_net.initial_weights())
    base = tiny_net.initial_weights()
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 4), base, {7: kept})
    assert fleet.changed_states() == {}
    list(fleet.train(Request(1, client, Message()) for client in (3, 2, 1)))
    assert fleet.changed_states() == {}, "nobody has heard yet whose replies count"
    fleet.commit([3, 1])
    changed = fleet.changed_states()
    assert list(changed) == [1, 3]
    assert fleet.changed_states() == {}
    assert fleet.client_state(3) is None, "handed over, to be read back from where it was stored"
    stored = fleet.client_state(7)
    assert stored is not None
    assert all(torch.equal(stored.tensors[name], kept.tensors[name]) for name in kept.tensors)
    assert fleet.client_state(0) is None


class Forgetful(Standalone):
    """Keeps its state for one round only."""

    def client_update(self, job: ClientJob) -> ClientGenerator:
        answer = yield from super().client_update(job)
        return answer if job.client_state is None else replace(answer, client_state=None)


def test_a_state_that_is_dropped_is_told_as_dropped(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    method = Forgetful(StandaloneParams(), make_context())
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 4), tiny_net.initial_weights())
    list(fleet.train([Request(1, 0, Message())]))
    fleet.commit([0])
    assert fleet.client_state(0) is not None
    list(fleet.train([Request(2, 0, Message())]))
    fleet.commit([0])
    assert fleet.changed_states() == {0: None}
    assert fleet.client_state(0) is None


def test_what_a_client_keeps_keeps_no_others_memory() -> None:
    together, whole = torch.rand(4, 3), torch.rand(2)
    kept = compact(State({"row": together[1], "whole": whole}, {"seen": 2}))
    assert torch.equal(kept.tensors["row"], together[1])
    assert kept.tensors["row"].untyped_storage().data_ptr() != together.untyped_storage().data_ptr()
    assert kept.tensors["row"].untyped_storage().nbytes() == 256, "its own, as far as it is aligned"
    assert kept.tensors["whole"] is whole
    assert kept.numbers == {"seen": 2}
