"""Standalone: every client goes its own way from one start, and nothing but that start travels."""

from __future__ import annotations

import pytest
import torch

from conftest import NO_IMAGES, MakeContext, MakeFleet, MakeShard, MakeTrainer
from vitfleet.data.images import Shard
from vitfleet.fleet.base import Request
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, MethodContext
from vitfleet.methods.personal.standalone import Standalone, StandaloneParams
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.inputs import RngContext


@pytest.fixture
def method(make_context: MakeContext) -> Standalone:
    context: MethodContext = make_context(epochs=2)
    return Standalone(StandaloneParams(), context)


def same(left: Tensors, correct: Tensors) -> bool:
    return set(left) == set(correct) and all(torch.equal(left[name], correct[name]) for name in left)


def test_nothing_travels_but_the_first_model(method: Standalone, tiny_net: Net) -> None:
    initial = tiny_net.initial_weights()
    assert same(method.initial_broadcast(initial).tensors, initial)
    server = method.initial_state(initial)
    assert (server.tensors, server.numbers) == ({}, {})
    assert method.message_to_client(server, round=1, client=0, last_round=None) == Message()
    assert method.message_to_client(server, round=9, client=0, last_round=8) == Message()


def test_replies_change_nothing(method: Standalone) -> None:
    server = State({"w": torch.ones(2)})
    gathering = method.aggregator(server, round=1)
    gathering.add(0, Message({"w": torch.zeros(2)}, {"samples": 5, "loss": 1.0}))
    assert gathering.finish() is server


def test_a_client_goes_on_from_its_own_weights(method: Standalone, tiny_net: Net) -> None:
    initial = tiny_net.initial_weights()
    own = State({name: weight + 1 for name, weight in initial.items()})
    first = next(method.client_update(ClientRoundInput(1, 0, Message(), initial, None, NO_IMAGES)))
    later = next(method.client_update(ClientRoundInput(2, 0, Message(), initial, own, NO_IMAGES)))
    assert same(first.weights, initial)
    assert same(later.weights, own.tensors)
    assert (first.epochs, tuple(first.trainable)) == (2, tuple(tiny_net.parts.shapes))
    assert same(method.model_weights(State(), initial, None), initial)
    assert same(method.model_weights(State(), initial, own), own.tensors)


def test_a_fleet_of_loners_is_so_many_trainings_by_hand(
    method: Standalone, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    trainer = make_trainer(epochs=2, batch_size=4)
    shards: dict[int, Shard] = {0: make_shard(0, 10), 1: make_shard(10, 30)}
    initial = tiny_net.initial_weights()
    fleet = make_fleet(method, trainer, shards.__getitem__, initial)
    plan = {1: [0, 1], 2: [1], 3: [0, 1]}
    for round, clients in plan.items():
        for reply in fleet.train([Request(round, client, Message()) for client in clients]):
            assert reply.message is not None
            assert not reply.message.tensors
            assert set(reply.message.numbers) == {"samples", "loss"}
        fleet.commit(clients)
    for client, shard in shards.items():
        weights: Tensors = initial
        for round in (round for round, clients in plan.items() if client in clients):
            training = LocalTraining(weights, tiny_net.parts.whole, epochs=2)
            weights = trainer.train(training, shard, RngContext(0, round, client)).weights
        own = fleet.client_state(client)
        assert own is not None
        assert same(own.tensors, weights)
    assert same(initial, tiny_net.initial_weights())


def test_there_is_no_global_model() -> None:
    assert not Standalone.has_global_model
