"""The server of FedWEIT: the sparse adaptive weights that it keeps, sends and rejects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fedweit_clients import SETTINGS, make_fedweit, random_sparse

from conftest import MakeContext, context_of
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.continual.fedweit import FedWeit, read_knowledge
from vitfleet.methods.continual.sparse_weights import check_sparse
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.net import Net


@pytest.fixture
def method(make_context: MakeContext) -> FedWeit:
    return make_fedweit(make_context)


def updates(method: FedWeit, body: Tensors, kept: Sequence[int], task_index: int) -> list[Message]:
    """Return an update of every client with adaptive weights of its own."""
    numbers = {"samples": 1, "loss": 1.0, "latest_task": task_index, "past_tasks": 0, "adaptive_received": 0}
    return [
        Message(
            {**body, **random_sparse(method, 100 * task_index + client, count).tensors("adaptive.")},
            {**numbers, "adaptive_kept": count},
        )
        for client, count in enumerate(kept)
    ]


@pytest.mark.parametrize(("clients", "tasks"), [(2, 2), (3, 5), (7, 2), (7, 5)])
def test_downloads_grow_with_clients_times_tasks(
    clients: int, tasks: int, method: FedWeit, tiny_net: Net, make_context: MakeContext
) -> None:
    """Every client receives the adaptive weights of every other client once per task, eight bytes per number."""
    body = tiny_net.parts.body.take(tiny_net.initial_weights())
    kept, size = 50, Message(body).num_bytes
    state, last_round, downloaded = State(body), dict.fromkeys(range(clients)), 0
    for round in range(1, 2 * tasks + 1):
        messages = [method.message_to_client(state, round, client, last_round[client]) for client in range(clients)]
        downloaded += sum(message.num_bytes - size for message in messages)
        aggregator = method.aggregator(state, round)
        for client, message in enumerate(updates(method, body, [kept] * clients, method.task_of(round))):
            aggregator.add(client, message)
            last_round[client] = round
        state = aggregator.finish()
        assert len(state.parts) <= 2 * clients
    assert downloaded == (tasks - 1) * clients * (clients - 1) * 8 * kept


def test_the_server_keeps_the_adaptive_weights_of_every_client(method: FedWeit, tiny_net: Net) -> None:
    body = tiny_net.parts.body.take(tiny_net.initial_weights())
    state = State(body)
    first, second = (updates(method, body, (10, 20, 30, 40), task_index) for task_index in (0, 1))
    for round, senders, sent in ((1, (0, 1), first), (2, (3,), first), (3, (0,), second)):
        aggregator = method.aggregator(state, round)
        for client in senders:
            aggregator.add(client, sent[client])
        state = aggregator.finish()
    stored = [first[0], first[1], first[3], second[0]]
    assert len(state.parts) == 4
    for part, message in zip(sorted(state.parts.items()), [first[0], second[0], first[1], first[3]], strict=True):
        assert torch.equal(part[1].tensors["values"], message.tensors["adaptive.values"])
    assert {len(part.tensors["values"]) for part in state.parts.values()} == {10, 20, 40}

    def received(round: int, client: int, last_round: int | None) -> list[list[float]]:
        message = method.message_to_client(state, round, client, last_round)
        return [vector.values.tolist() for vector in read_knowledge(message.tensors)]

    values = [message.tensors["adaptive.values"].tolist() for message in stored]
    assert received(2, 2, None) == [], "a task is not over while it lasts"
    assert received(4, 2, None) == values[:3], "all clients' weights, from the task before"
    assert received(4, 1, 2) == [values[0], values[2]], "not its own"
    assert received(4, 0, 3) == [], "once per task"
    assert received(5, 2, 3) == [values[3], values[1], values[2]], "of a client's latest task before this one"


def test_unusable_updates_are_rejected_and_change_nothing(method: FedWeit, tiny_net: Net) -> None:
    body = tiny_net.parts.body.take(tiny_net.initial_weights())
    (good,) = updates(method, body, (5,), 0)
    indices, values = good.tensors["adaptive.indices"], good.tensors["adaptive.values"]
    length = sum(shape.numel() for shape in method.shapes.values())
    changes: dict[str, tuple[Tensors, dict[str, int]]] = {
        "no adaptive weights": ({"adaptive.other": values}, {}),
        "not a vector of float32": ({"adaptive.values": values.double()}, {}),
        "5 values and": ({"adaptive.values": values[:4]}, {}),
        "not finite": ({"adaptive.values": values * torch.inf}, {}),
        "have the size 1": ({"adaptive.values": torch.full_like(values, 1e10)}, {}),
        "do not rise": ({"adaptive.indices": indices.flip(0)}, {}),
        "within 0 …": ({"adaptive.indices": indices + length}, {}),
        "are of task -1; expected: 0": ({}, {"latest_task": -1}),
        "'latest_task' is 3": ({}, {"latest_task": 3}),
        "'adaptive_received' is 9": ({}, {"adaptive_received": 9}),
        "'adaptive_kept' is 100000000": ({}, {"adaptive_kept": 10**8}),
        "not part of the model": ({"unknown": values}, {}),
    }
    for reason, (tensors, numbers) in changes.items():
        aggregator = method.aggregator(State(body), 1)
        expected = reason.replace("5 values", r"\(4,\) values")
        with pytest.raises(RejectedUpdateError, match=expected):
            aggregator.add(0, Message({**good.tensors, **tensors}, {**good.numbers, **numbers}))
        after = aggregator.finish()
        assert not after.parts
        assert all(torch.equal(after.tensors[name], body[name]) for name in body)
    with pytest.raises(RejectedUpdateError, match="not values and indices alone"):
        check_sparse({}, 10)


def test_an_outlier_does_not_replace_what_is_stored(tiny_net: Net) -> None:
    context = context_of(tiny_net, num_tasks=5, aggregate={"norm_factor": 2.0})
    method, body = FedWeit(SETTINGS, context), tiny_net.parts.body.take(tiny_net.initial_weights())
    aggregator = method.aggregator(State(body), 1)
    for client, message in enumerate(updates(method, body, (5, 6, 7), 0)):
        shift = 100.0 if client == 1 else 0.01
        aggregator.add(client, replace(message, tensors={**message.tensors, **{n: t + shift for n, t in body.items()}}))
    state = aggregator.finish()
    assert set(aggregator.rejected) == {1}
    assert sorted(len(part.tensors["values"]) for part in state.parts.values()) == [5, 7]
