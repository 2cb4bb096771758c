"""`method.heads = "shared"`: heads are sent and averaged with the body; for whom the key exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import MakeContext
from vitfleet.config import load_config
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import make_method
from vitfleet.methods.personal.shared_body import HeadsParams, SharedBody
from vitfleet.models.net import Net
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.wire import encoded_size

WITH_HEADS = sorted(entry.name for entry in METHODS if issubclass(entry.params, HeadsParams))


def tiny(method: str, *overrides: str) -> Config:
    return load_config(
        "fedvit-digits",
        [
            f"method.name={method}",
            "data.limit=500",
            "data.tasks.rounds_per_task=1",
            "data.tasks.count=2",
            "model.dim=16",
            "model.depth=2",
            "model.heads=2",
            "model.patch_size=4",
            "train.epochs=2",
            "fleet.clients=3",
            "fleet.per_round=3",
            "machine.device=cpu",
            "aggregate.clip_factor=null",
            *overrides,
        ],
    )


def test_the_key_exists_where_a_method_is_not_defined_by_its_local_head() -> None:
    assert {"a-gem", "fedvit", "gem"} <= set(WITH_HEADS)
    for method in ("fedper", "fedrep"):
        with pytest.raises(UserError, match="heads"):
            tiny(method, "method.heads=shared")


@pytest.mark.parametrize("method", WITH_HEADS)
def test_the_servers_head_is_the_weighted_mean_of_the_clients_heads(method: str, tmp_path: Path) -> None:
    context = open_run(tiny(method, "method.heads=shared"), tmp_path)
    assert context.method.has_global_model
    assert context.base.tensors == {}
    state = load_state(context)
    for round in (1, 2):
        state, record = run_round(context, state, round)
        samples = [entry.numbers["samples"] for entry in record.clients]
        models = [context.fleet.client_state(entry.client) for entry in record.clients]
        for name in context.net.parts.whole:
            values = torch.stack([model.tensors[name].double() for model in models if model is not None])
            weights = torch.tensor(samples, dtype=torch.float64)
            mean = torch.einsum("c...,c->...", values, weights) / weights.sum()
            torch.testing.assert_close(state.server.tensors[name], mean.float(), rtol=1e-6, atol=1e-7)
        heads = [model.tensors["head.weight"] for model in models if model is not None]
        assert not torch.equal(heads[0], heads[1]), "each client trained the head it received"


@pytest.mark.parametrize("method", WITH_HEADS)
def test_bytes_of_a_round_are_those_of_the_whole_model(method: str, tmp_path: Path) -> None:
    sent = {}
    for heads in ("local", "shared"):
        context = open_run(tiny(method, f"method.heads={heads}"), tmp_path / heads)
        _, record = run_round(context, load_state(context), 1)
        down = context.method.message_to_client(context.initial_server_state(), 1, 0, None)
        parts = context.net.parts
        selection = parts.whole if heads == "shared" else parts.body
        assert sum(tensor.nbytes for tensor in down.tensors.values()) == 4 * parts.count_parameters(selection)
        first = encoded_size(context.base) if context.base.tensors else 0
        assert [entry.down_bytes for entry in record.clients] == [encoded_size(down) + first] * 3
        for entry in record.clients:
            update = context.fleet.client_state(entry.client)
            assert update is not None
            expected = encoded_size(Message(selection.take(update.tensors), entry.numbers))
            assert entry.up_bytes == expected
        sent[heads] = parts.count_parameters(selection)
    classifiers = 2 if method == "lvt" else 1
    assert sent["shared"] - sent["local"] == classifiers * (16 * 10 + 10)


@pytest.mark.parametrize("method", WITH_HEADS)
def test_what_is_shared_and_what_a_client_keeps(method: str, make_context: MakeContext, tiny_net: Net) -> None:
    for heads in ("local", "shared"):
        params = METHODS.make_params(method).model_copy(update={"heads": heads})
        tried = make_method(params, make_context(num_tasks=2, epochs=2))
        assert isinstance(tried, SharedBody)
        assert tried.shared == (tiny_net.parts.whole if heads == "shared" else tiny_net.parts.body)
        server = tried.initial_state(tiny_net.initial_weights())
        own: Tensors = {name: tensor + 1 for name, tensor in tiny_net.initial_weights().items()}
        model = tried.model_weights(server, {}, State(own))
        assert all(torch.equal(model[name], own[name]) for name in own), "as trained, by default"
