"""FEDBFPT: its schedule, its shallow model, and what travels."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

from conftest import MakeConfig, context_of
from vitfleet.config.schema import ModelConfig
from vitfleet.methods.tuning.fedbfpt import FedBfpt, FedBfptParams, layer_schedule
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run


def spans(rounds: int, local_layers: int) -> list[int]:
    return [len(list(group)) for _, group in groupby(layer_schedule(rounds, local_layers))]


def test_200_rounds_over_six_layers() -> None:
    assert spans(200, 6) == [100, 50, 25, 13, 6, 6]
    assert spans(200, 8)[:7] == [100, 50, 25, 13, 6, 3, 2]  # a deeper client model goes on halving


@pytest.mark.parametrize("rounds", [1, 2, 3, 10, 77])
def test_any_number_of_rounds_goes_up_one_layer_at_a_time(rounds: int) -> None:
    layers = layer_schedule(rounds, 6)
    assert len(layers) == rounds
    assert layers[0] == 0
    assert all(after - before in (0, 1) for before, after in pairwise(layers))
    assert max(layers) <= 5


@pytest.fixture
def fedbfpt() -> FedBfpt:
    net = build_model(ModelConfig(dim=16, depth=12, heads=2, patch_size=4), 5, 1, 8, 0)
    return FedBfpt(FedBfptParams(local_layers=6), context_of(net, rounds=200))


@pytest.mark.parametrize("layer", range(6))
def test_the_local_model_is_the_first_layers_and_a_sorted_sample_of_the_deeper(fedbfpt: FedBfpt, layer: int) -> None:
    seen = set()
    for client in range(200):
        route = fedbfpt.sample_layers(layer, round=3, client=client)
        assert len(route) == 6
        assert route[: layer + 1] == tuple(range(layer + 1))
        assert list(route) == sorted(route)
        assert all(layer < one < 12 for one in route[layer + 1 :])
        seen |= set(route[layer + 1 :])
    assert seen == (set(range(layer + 1, 12)) if layer < 5 else set())
    assert fedbfpt.sample_layers(layer, 3, 7) == fedbfpt.sample_layers(layer, 3, 7)


def test_a_route_is_the_model_made_of_those_blocks() -> None:
    deep = build_model(ModelConfig(dim=16, depth=4, heads=2, patch_size=4), 5, 1, 8, 0)
    shallow = build_model(ModelConfig(dim=16, depth=3, heads=2, patch_size=4), 5, 1, 8, 1)
    weights, route = deep.initial_weights(), (0, 2, 2)
    local = {name: weights[name] for name in deep.parts.non_blocks}
    for position, layer in enumerate(route):
        names = zip(shallow.parts.blocks[position], deep.parts.blocks[layer], strict=True)
        local |= {ours: weights[theirs] for ours, theirs in names}
    images = torch.randn(3, 1, 8, 8)
    context = context_of(deep, rounds=4)
    made = FedBfpt(FedBfptParams(local_layers=3), context).shallow_weights(weights, route)
    assert made.keys() == local.keys()
    assert torch.equal(deep(made, images, depth=3), shallow(local, images))


def test_only_the_turns_layer_and_the_head_move(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("method.name=fedbfpt", "method.local_layers=2", "model.depth=3", "rounds=4")
    context = open_run(config, tmp_path)
    state, parts = load_state(context), context.net.parts
    for round, layer in ((1, 0), (2, 0), (3, 1), (4, 1)):
        before = dict(state.server.tensors)
        state, record = run_round(context, state, round)
        assert all(entry.numbers["layer"] == layer for entry in record.clients)
        moved = {name for name in before if not torch.equal(before[name], state.server.tensors[name])}
        may = {*parts.blocks[layer], *parts.head}
        assert moved <= may
        assert len(moved) >= len(may) - 1  # the keys' bias has no gradient by nature
