"""FedRep and FedPer: body shared, heads local; held against a loop by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, close

from conftest import NO_IMAGES, MakeContext, MakeShard, MakeTrainer
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.message import Message, State
from vitfleet.methods import ClientJob
from vitfleet.methods.personal.fedper import FedPer, FedPerParams
from vitfleet.methods.personal.fedrep import FedRep, FedRepParams
from vitfleet.models.net import Net
from vitfleet.training.driver import run_update
from vitfleet.training.stack_inputs import RngContext
from vitfleet.training.trainer import Trainer

ONE_TASK = torch.zeros(5, dtype=torch.long)


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return make_trainer(epochs=5, **PLAIN_SGD)


@pytest.fixture
def fedrep(make_context: MakeContext) -> FedRep:
    return FedRep(FedRepParams(head_epochs=2), make_context(epochs=5, **PLAIN_SGD))


def test_fedreps_round_as_by_hand(fedrep: FedRep, trainer: Trainer, tiny_net: Net, make_shard: MakeShard) -> None:
    initial, shard = tiny_net.initial_weights(), make_shard(0, 10)
    base, down = fedrep.base_message(initial).tensors, Message(fedrep.initial_state(initial).tensors)
    own_head = {name: tensor + 0.3 for name, tensor in base.items()}
    own = State({**initial, **own_head})
    answer = run_update(
        fedrep.client_update(ClientJob(4, 0, down, base, own, shard)), trainer, shard, RngContext(0, 4, 0)
    )
    hand = Hand(tiny_net, ONE_TASK, shard, round=4)
    weights = hand.train({**initial, **own_head}, list(tiny_net.anatomy.head), 2)
    weights = hand.train(weights, list(tiny_net.anatomy.body), 3)
    close(answer.model_weights, weights)
    assert set(answer.message.tensors) == set(tiny_net.anatomy.body)
    assert answer.client_state is not None
    assert set(answer.client_state.tensors) == set(tiny_net.anatomy.whole)


def test_fedpers_round_as_by_hand(
    make_context: MakeContext, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = FedPer(FedPerParams(), make_context(epochs=5, **PLAIN_SGD))
    initial, shard = tiny_net.initial_weights(), make_shard(0, 10)
    base, down = method.base_message(initial).tensors, Message(method.initial_state(initial).tensors)
    answer = run_update(
        method.client_update(ClientJob(1, 0, down, base, None, shard)), trainer, shard, RngContext(0, 1, 0)
    )
    close(
        answer.model_weights, Hand(tiny_net, ONE_TASK, shard, round=1).train(initial, list(tiny_net.anatomy.whole), 5)
    )
    assert set(answer.message.tensors) == set(tiny_net.anatomy.body)


def test_bodies_are_averaged_by_samples(fedrep: FedRep, tiny_net: Net) -> None:
    server = fedrep.initial_state(tiny_net.initial_weights())
    assert set(server.tensors) == set(tiny_net.anatomy.body)
    gathering = fedrep.aggregator(server, 1)
    for client, (value, samples) in enumerate([(1.0, 3), (5.0, 1)]):
        body = {name: torch.full_like(tensor, value) for name, tensor in server.tensors.items()}
        gathering.add(client, Message(body, {"samples": samples, "loss": 1.0}))
    assert all(bool((tensor == 2).all()) for tensor in gathering.finish().tensors.values())


def test_without_head_epochs_only_the_body_trains(
    make_context: MakeContext, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = FedRep(FedRepParams(head_epochs=0), make_context(epochs=1, **PLAIN_SGD))
    initial, shard = tiny_net.initial_weights(), make_shard(0, 10)
    job = ClientJob(
        1, 0, Message(method.initial_state(initial).tensors), method.base_message(initial).tensors, None, shard
    )
    answer = run_update(method.client_update(job), trainer, shard, RngContext(0, 1, 0))
    assert all(torch.equal(answer.model_weights[name], initial[name]) for name in tiny_net.anatomy.head)


def test_who_has_no_images_sends_nothing(fedrep: FedRep, trainer: Trainer, tiny_net: Net) -> None:
    initial = tiny_net.initial_weights()
    job = ClientJob(
        1, 0, Message(fedrep.initial_state(initial).tensors), fedrep.base_message(initial).tensors, None, NO_IMAGES
    )
    answer = run_update(fedrep.client_update(job), replace(trainer), NO_IMAGES, RngContext(0, 1, 0))
    assert answer.message.tensors == {}
    assert answer.message.numbers["samples"] == 0
    assert all(torch.equal(answer.model_weights[name], one) for name, one in initial.items())


def test_head_epochs_must_leave_some_for_the_body() -> None:
    with pytest.raises(UserError, match=r"method\.head_epochs = 3: must be below train\.epochs = 3"):
        load_config("digits", ["method.name=fedrep", "method.head_epochs=3"])
