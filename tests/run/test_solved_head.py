"""The table ``[head]``: a run that starts with a solved head, and one whose head is solved again on its own body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LocalClients, defended, export_images
from safetensors.torch import load_file
from torch import Tensor

import vitfleet
from conftest import InterruptAfter, long_but
from digests import digest
from vitfleet.config import load_config
from vitfleet.errors import ConfigError
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.message import with_prefix
from vitfleet.methods.personal.shared_body import SOLVED, solved_head
from vitfleet.report.console.costs import head_lines
from vitfleet.run.callbacks import Callback
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.round import run_next
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

PRESET = "start-fedavg"  # the shipped weights
TINY: Mapping[str, Any] = {
    "rounds": 2,
    "data.limit": 200,
    "fleet.clients": 4,
    "fleet.per_round": 2,
    "fleet.devices": {},
    "train.epochs": 1,
    "machine.device": "cpu",
    "machine.precision": "fp32",
    "machine.workers": 1,
}
START = {"head.start": "closed-form"}
AGAIN = {"head.solve_every": 1}
#: Each method that can take a head, with keys that it needs.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedprox": {},
    "transfl": {"method.k": 1},
    "apfl": {},
    "fed-full": {},
    "fed-head": {},
    "fed-bias": {},
    "fed-prompt": {},
    "fed-lora": {},
    "fedbfpt": {"method.local_layers": 2},
    "eftvit": {"method.local_layers": 1, "train.mask_ratio": 0.5},
    "eftvit, frozen": {"method.local_layers": 1, "method.local_rounds": 0, "method.train_head": False},
    "eftvit, averaged": {"method.local_layers": 1, "method.average_local": 1, "method.server_ema": 0.5},
    "fedper": {},
    "fedrep": {"train.epochs": 2},
}
HEAD = ("head.weight", "head.bias")


def keys_of(name: str, *more: Mapping[str, Any]) -> dict[str, Any]:
    tables = (TINY, METHODS.get(name, {}), *more)
    return {key: value for table in tables for key, value in table.items()}


def train(name: str, out: Path, *more: Mapping[str, Any], **options: Any) -> vitfleet.Run:
    method = name.split(",")[0]
    return vitfleet.train(PRESET, method=method, overrides=keys_of(name, *more), out=out, **options)


def records_of(run: vitfleet.Run) -> list[RoundRecord]:
    return list(read_records(run.path))


def head_in_file(path: Path) -> dict[str, Tensor]:
    weights = load_file(path)
    return {name: weights[name] for name in HEAD}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class KeepServer(Callback):
    """Keeps the server's tensors after every round."""

    def __init__(self) -> None:
        self.tensors: dict[int, Mapping[str, Tensor]] = {}

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.tensors[record.round] = dict(state.server.tensors)


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


@pytest.fixture(scope="module")
def solved_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the head that the method closed-form solves with all clients in one round."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run = vitfleet.train(
        PRESET, method="closed-form", overrides=keys_of("", {"rounds": 1, "fleet.per_round": 4}), out=out
    )
    return head_in_file(run.path / "model.safetensors")


@pytest.mark.parametrize(
    "name", long_but(METHODS, "transfl", "apfl", "fed-lora", "fedbfpt", "eftvit", "eftvit, averaged", "fedrep")
)
def test_every_method_starts_with_the_head_that_the_method_closed_form_solves(
    name: str, tmp_path: Path, solved_alone: dict[str, Tensor]
) -> None:
    servers = KeepServer()
    run = train(name, tmp_path / "run", START, callbacks=[servers])
    first, second, third = records_of(run)
    assert (first.round, second.round, third.round) == (0, 1, 2)
    assert first.head is not None
    assert [client.client for client in first.head.clients] == [0, 1, 2, 3]
    assert all(client.failure is None and client.gflops and client.up_bytes for client in first.head.clients)
    assert first.total_up_bytes == sum(client.up_bytes for client in first.head.clients)
    assert first.accuracy is not None
    assert second.head is None
    assert all(client.failure is None for record in (second, third) for client in record.clients)
    start = servers.tensors[0]
    head = with_prefix(start, SOLVED) or {name: start[name] for name in HEAD}
    if name != "fed-prompt":  # prompts change the features, also untrained ones
        assert equal(head, solved_alone)
    if first.accuracy.global_ is not None:
        assert first.accuracy.global_ > 0.6, "a random head of ten classes has 0.1"


def test_no_client_receives_the_base_message_twice(tmp_path: Path) -> None:
    random, solved = (
        records_of(train("fed-lora", tmp_path / name, keys)) for name, keys in (("random", {}), ("solved", START))
    )
    assert solved[0].head is not None
    base = solved[0].head.clients[0].down_bytes
    first = random[0].clients[0].down_bytes
    assert base > 0.9 * first, "nearly all weights are frozen"
    assert all(client.down_bytes < 0.1 * base for record in solved[1:] for client in record.clients)


@pytest.mark.parametrize("name", ["fedavg", "eftvit", "fedbfpt", "fedper"])
def test_a_head_that_is_solved_last_is_that_of_the_method_closed_form_on_the_trained_body(
    name: str, tmp_path: Path
) -> None:
    before, after = train(name, tmp_path / "before"), train(name, tmp_path / "after", {"head.solve_last": True})
    record, earlier = records_of(after)[-1], records_of(before)[-1]
    assert record.head is not None
    assert record.head.accuracy_before == earlier.accuracy
    assert record.accuracy != earlier.accuracy
    assert after.summary["head"]["times"] == 1
    if name not in ("fedavg", "fedbfpt"):  # others have bodies of their own on the clients
        return
    weights = {"model.weights": str(before.path / "model.safetensors"), "rounds": 1, "fleet.per_round": 4}
    alone = vitfleet.train(PRESET, method="closed-form", overrides=keys_of("", weights), out=tmp_path / "alone")
    assert equal(head_in_file(after.path / "model.safetensors"), head_in_file(alone.path / "model.safetensors"))


@pytest.mark.parametrize("name", long_but(["fedavg", "eftvit", "eftvit, averaged", "fedper"], "eftvit", "fedper"))
@pytest.mark.parametrize("interrupted", [0, 2])
def test_an_interrupted_run_ends_with_the_same_bits(name: str, interrupted: int, tmp_path: Path) -> None:
    keys = {**START, "head.solve_every": 2, "rounds": 3, "machine.checkpoint_every": 3}
    whole = train(name, tmp_path / "whole", keys)
    with pytest.raises(KeyboardInterrupt):
        train(name, tmp_path / "interrupted", keys, callbacks=[InterruptAfter(interrupted)])
    resumed = vitfleet.load_run(tmp_path / "interrupted").resume()
    assert digest(resumed.path) == digest(whole.path)
    assert [record.head is not None for record in records_of(whole)] == [True, False, True, False]


@pytest.mark.parametrize("name", ["fed-lora", "eftvit"])
def test_stacked_clients_send_what_single_ones_do(name: str, tmp_path: Path) -> None:
    alone, stacked = KeepServer(), KeepServer()
    train(name, tmp_path / "alone", START, {"rounds": 1}, callbacks=[alone])
    train(name, tmp_path / "stacked", START, {"rounds": 1, "machine.stack_size": 4}, callbacks=[stacked])
    for key in HEAD:
        torch.testing.assert_close(stacked.tensors[0][key], alone.tensors[0][key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["fed-lora", "eftvit", "fedper"])
def test_flowers_clients_send_the_same_bits(name: str, tmp_path: Path) -> None:
    keys = {**keys_of(name, START, AGAIN), "method.name": name, "eval.clients": 0}
    config = load_config(PRESET, keys)
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(defended(config), tmp_path / "simulation")).state.server
    fleet = config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})
    remote = config.model_copy(update={"fleet": fleet})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    flower = run_rounds(open_run(remote, tmp_path / "flower", make_fleet=fleet_factory(clients.grid()))).state.server
    assert equal(flower.tensors, simulation.tensors)
    first, second = ((tmp_path / way / "records.jsonl").read_text() for way in ("simulation", "flower"))
    assert first == second
    assert '"failure":"' not in first


def test_a_device_that_is_away_at_the_start_is_left_out_and_takes_part_later(tmp_path: Path) -> None:
    keys = {**keys_of("fed-lora", START, {"fleet.per_round": 4}), "method.name": "fed-lora", "eval.clients": 0}
    config = load_config(PRESET, {**keys, "fleet.min_replies": 1})
    export_images(config, tmp_path / "data")
    fleet = config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0, "rejoin_s": 0.0})
    remote = config.model_copy(update={"fleet": fleet})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    grid = clients.grid()
    grid.disconnected.add(remote.fleet.name_of(2))
    context = open_run(remote, tmp_path / "run", make_fleet=fleet_factory(grid))
    state, start = run_next(context, load_state(context))
    assert start.head is not None
    assert [client.failure for client in start.head.clients] == [None, None, "not connected", None]
    assert start.head.clients[2].down_bytes == 0
    assert sorted(state.last_seen) == [0, 1, 3]
    grid.disconnected.clear()
    state, first = run_next(context, state)
    assert [client.failure for client in first.clients] == [None] * 4
    assert first.clients[2].down_bytes > 5 * first.clients[1].down_bytes, "only this one needs the frozen weights"
    assert state.last_seen == dict.fromkeys(range(4), 1)


def test_a_head_request_leaves_the_states_of_clients_as_they_are(tmp_path: Path) -> None:
    context = open_run(load_config(PRESET, {**keys_of("fedper", AGAIN), "method.name": "fedper"}), tmp_path / "run")
    state, record = run_next(context, load_state(context))
    trained = [client.client for client in record.clients]
    assert all(context.fleet.client_state(client) is not None for client in trained)
    others = sorted(set(range(4)) - set(trained))
    assert all(context.fleet.client_state(client) is None for client in others)
    assert state.last_seen == {**dict.fromkeys(others, 0), **dict.fromkeys(trained, 1)}


def test_local_heads_go_on_from_the_solved_one_once(tmp_path: Path) -> None:
    context = open_run(load_config(PRESET, {**keys_of("fedper", START), "method.name": "fedper"}), tmp_path / "run")
    state, _ = run_next(context, load_state(context))
    solved = with_prefix(state.server.tensors, SOLVED)
    message = context.method.message_to_client(state.server, 1, 0, 0)
    assert equal({name: message.tensors[name] for name in HEAD}, solved)
    later = context.method.message_to_client(state.server, 3, 0, 1)
    assert not set(HEAD) & later.tensors.keys(), "its own head has been trained since"
    assert not any(name.startswith(SOLVED) for name in {**message.tensors, **later.tensors})


@pytest.mark.parametrize("name", ["fed-lora", "eftvit", "fedper"])
def test_a_wide_head_is_that_of_the_method_closed_form(name: str, tmp_path: Path) -> None:
    """Random features are standardised by tensors of the head, which clients are sent with the body."""
    wide = {"features": "both", "blocks": 2, "project": 40}
    servers = KeepServer()
    run = train(
        name, tmp_path / "run", START, {f"head.{key}": value for key, value in wide.items()}, callbacks=[servers]
    )
    keys = {"rounds": 1, "fleet.per_round": 4, **{f"method.{key}": value for key, value in wide.items()}}
    alone = vitfleet.train(PRESET, method="closed-form", overrides=keys_of("", keys), out=tmp_path / "alone")
    start = servers.tensors[0]
    head = with_prefix(start, SOLVED) or {key: start[key] for key in (*HEAD, "head.shift", "head.scale")}
    stored = load_file(alone.path / "model.safetensors")
    assert equal(head, {key: stored[key] for key in head})
    assert head["head.weight"].shape == (10, 40)
    assert vitfleet.load_run(run.path).model() is not None, "the folder says what the head sees"


def test_a_client_whose_own_images_count_more_has_a_head_of_its_own(tmp_path: Path) -> None:
    keys = {**keys_of("fedper", START, {"head.solve_last": True, "head.own_weight": 20.0}), "method.name": "fedper"}
    context = open_run(load_config(PRESET, keys), tmp_path / "run")
    state, _ = run_next(context, load_state(context))
    heads = [context.method.message_to_client(state.server, 1, client, 0).tensors["head.weight"] for client in range(4)]
    common = with_prefix(state.server.tensors, SOLVED)["head.weight"]
    assert all(not torch.equal(head, other) for head, other in zip(heads, [*heads[1:], common], strict=True))
    state = run_rounds(context, state).state
    client = next(client for client, last in state.last_seen.items() if last)
    stored = context.fleet.client_state(client)
    assert stored is not None
    solved = solved_head(state.server, client)
    model = context.method.model_weights(state.server, context.base.tensors, stored)
    assert equal({name: model[name] for name in HEAD}, solved), "it was solved since the client trained its own"
    assert not equal(solved, solved_head(state.server, None))


@pytest.mark.parametrize("name", ["fed-full", "eftvit", "eftvit, frozen", "fedper"])
def test_a_frozen_head_stays_as_it_is(name: str, tmp_path: Path) -> None:
    servers = KeepServer()
    train(name, tmp_path / "run", START, {"head.freeze_rounds": 1}, callbacks=[servers])

    def head(round: int) -> dict[str, Tensor]:
        return {key: servers.tensors[round][key] for key in HEAD}

    if name == "fedper":
        return
    assert equal(head(0), head(1))
    assert not equal(head(1), head(2))


def test_a_run_that_is_stopped_early_solves_its_last_head(tmp_path: Path) -> None:
    stop = {"callbacks.early_stopping": {"patience": 1, "min_delta": 1.0}, "rounds": 5}
    run = train("fedavg", tmp_path / "run", {"head.solve_last": True}, stop)
    first, record = records_of(run)
    assert first.head is None
    assert record.head is not None
    assert run.summary["accuracy"]["global"] == record.accuracy.global_ if record.accuracy else None


def test_devices_take_time_for_the_head(tmp_path: Path) -> None:
    run = train("fedavg", tmp_path / "run", START, {"fleet.devices": {"agx": 1, "nano": 1}})
    first, second, _ = records_of(run)
    assert first.head is not None
    assert first.virtual_seconds is not None
    assert second.virtual_seconds is not None
    assert 0 < first.virtual_seconds < second.virtual_seconds
    assert max(client.ended or 0 for client in first.head.clients) == first.virtual_seconds


def test_clients_that_are_too_late_for_the_head_do_not_count(tmp_path: Path) -> None:
    late = {"fleet.devices": {"nano": 1}, "fleet.schedule.kind": "deadline", "fleet.schedule.seconds": 1e-6}
    first, *_ = records_of(train("fedavg", tmp_path / "run", START, late))
    assert first.head is not None
    assert first.virtual_seconds == 1e-6
    assert not first.head.solution
    for client in first.head.clients:
        assert client.failure is not None
        assert re.match(r"too late: computing features takes .* virtual seconds, the round ended", client.failure)
        assert (client.began, client.ended) == (0.0, 1e-6)


def test_costs_count_the_head() -> None:
    keys = keys_of("fedavg", START, AGAIN)
    (report,) = vitfleet.cost(PRESET, method="fedavg", methods=["fedavg"], overrides=keys)
    assert report.head is not None
    assert report.head.times == 3
    assert 0 < report.head.gflops < report.round_gflops
    assert 0 < report.head.peak_memory_bytes < report.peak_memory_bytes
    (line,) = head_lines([report])
    assert "the head is solved 3 times in a run" in line
    (line,) = head_lines([replace(report, head=replace(report.head, times=1))])
    assert "the head is solved once in a run" in line


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method.name": "standalone", **START}, "head.start"),
        ({"method.name": "closed-form", **AGAIN}, "head.solve_every"),
        ({"data.tasks.count": 2, "data.tasks.classes": 5, "data.tasks.rounds_per_task": 1, **START}, "data.tasks"),
        ({"method.name": "fed-head", "head.freeze_rounds": 1}, "nothing but the head"),
        ({"model.weights": None, **START}, "pretrained"),
        ({"head.regularization": "held-out", **START}, "head.regularization"),
        ({"method.name": "fedavg", **START, "head.own_weight": 2.0}, "head.own_weight"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(keys: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        open_run(load_config(PRESET, {**TINY, **keys}), tmp_path / "run")
