"""EFTViT's parameters that the paper does not have, and the settings of the server's training."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import InterruptAfter, MakeConfig
from emulated_graphs import set_up_with_graphs
from vitfleet.costs.cost_model import message_size
from vitfleet.data.features import dequantize
from vitfleet.data.images import Shard
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State
from vitfleet.methods.split.eftvit import EftVit
from vitfleet.methods.split.median_sampling import draw_sampling_plan
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Samples
from vitfleet.training.stacking.inputs import SERVER_CLIENT, ClientTraining, RngContext


@pytest.fixture
def eftvit_config(tiny_config: MakeConfig) -> MakeConfig:
    common = ("method.name=eftvit", "method.local_layers=1", "model.patch_size=2", "train.mask_ratio=0.5")
    return partial(tiny_config, *common)


def method_of(context: RunContext) -> EftVit:
    assert isinstance(context.method, EftVit)
    return context.method


def run_to(context: RunContext, rounds: int) -> RunState:
    state = load_state(context)
    for round in range(1, rounds + 1):
        state, _ = run_round(context, state, round)
    return state


def server_training(
    method: EftVit, state: State, round: int
) -> tuple[LocalTraining, Generator[LocalTraining, LocalResult, State]]:
    update = method.server_update(state, round)
    return next(update), update


def on_server(context: RunContext, training: LocalTraining) -> ClientTraining:
    no_images = Shard(context.data.train, torch.empty(0, dtype=torch.long))
    return ClientTraining(training, no_images, RngContext(0, 2, SERVER_CLIENT))


def equal_states(first: State, second: State) -> bool:
    """Whether tensors and parts are equal, bit for bit."""
    return (
        first.tensors.keys() == second.tensors.keys()
        and first.parts.keys() == second.parts.keys()
        and all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
        and all(equal_states(part, second.parts[name]) for name, part in first.parts.items())
    )


def number(value: object) -> int:
    assert isinstance(value, int)
    return value


def test_the_servers_training_has_settings_of_its_own(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    keys = ("method.server_lr=0.5", "method.server_batch_size=7", "method.server_weight_decay=0.25")
    context = open_run(eftvit_config(*keys), tmp_path)
    training, _ = server_training(method_of(context), run_to(context, 1).server, 2)
    assert training.train == context.config.train.model_copy(update={"lr": 0.5, "batch_size": 7, "weight_decay": 0.25})
    assert training.features is not None
    (result,) = context.trainer.train_together([on_server(context, training)])
    assert result.steps == 2 * -(-len(training.features) // 7)


def test_token_dropout_keeps_the_prefix_and_drops_patches(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(eftvit_config("method.token_dropout=0.5"), tmp_path)
    training, _ = server_training(method_of(context), run_to(context, 1).server, 2)
    assert training.features is not None
    part = training.features.parts[0]
    tokens = dequantize(part.values, part.scales)
    patches = tokens.shape[1] - 1
    keep = torch.stack([torch.randperm(patches)[: patches // 2] for _ in range(len(tokens))])
    weights = {**context.base.tensors, **training.weights}
    samples = Samples(part.labels, torch.ones(len(tokens)), torch.arange(len(tokens)), features=tokens, keep=keep)
    logits = context.trainer.engine.forward(weights, samples, split=1).logits
    by_hand = [
        context.net.forward_from(weights, torch.cat([sample[:1], sample[1:][kept]])[None], 1)[0]
        for sample, kept in zip(tokens, keep, strict=True)
    ]
    torch.testing.assert_close(logits, torch.stack(by_hand))
    batches = context.trainer._epoch_batches([on_server(context, training)], 0, context.config.train, width_multiple=1)
    assert batches.stacked.keep is not None
    assert batches.stacked.keep.shape[-1] == patches // 2
    assert all(len(set(row.tolist())) == patches // 2 for row in batches.stacked.keep.flatten(0, -2))


def test_only_features_of_the_last_rounds_are_trained_on(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(eftvit_config("method.max_age=2", "fleet.per_round=2", "fleet.clients=8"), tmp_path)
    state = run_to(context, 4).server
    sent_in = {name: number(part.numbers["round"]) for name, part in state.parts.items()}
    assert min(sent_in.values()) < 3, "some features are older"
    training, _ = server_training(method_of(context), state, 4)
    assert training.features is not None
    young = [part.tensors["features"] for name, part in state.parts.items() if sent_in[name] in (3, 4)]
    assert [id(part.values) for part in training.features.parts] == [id(values) for values in young]


@pytest.mark.parametrize("views", [1, 2, 5])
def test_views_of_an_image_come_from_different_epochs(views: int) -> None:
    counts, epochs = (2, 4, 8), 5
    labels = np.repeat(np.arange(3, dtype=np.int64), counts)
    plan = draw_sampling_plan(labels, epochs, 0.5, np.random.default_rng(0), views)
    assert np.bincount(plan.sent_labels).tolist() == [4 * views] * 3
    pairs = {int(plan.rows[e, s]): (e, s) for e in range(epochs) for s in range(sum(counts))}
    majority = [pairs[int(row)] for row, label in zip(plan.sent_rows, plan.sent_labels, strict=True) if label > 0]
    assert len(set(majority)) == len(majority), "no view is sent twice"
    assert {epoch for epoch, _ in majority} <= set(range(epochs - views, epochs))


def test_more_views_than_epochs_are_rejected(eftvit_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"method\.views = 4: must be at most train\.epochs = 3"):
        eftvit_config("method.views=4", "train.epochs=3")


def test_the_moving_average_is_sent_and_training_continues_from_the_last_weights(
    eftvit_config: MakeConfig, tmp_path: Path
) -> None:
    context = open_run(eftvit_config("method.server_ema=0.5"), tmp_path)
    method, state = method_of(context), run_to(context, 1).server
    name = "head.weight"
    trained = {key: torch.randn_like(state.tensors[key]) for key in method.server_module}
    training, update = server_training(method, state, 20)
    assert torch.equal(training.weights[name], state.tensors["last." + name]), "as trained in the first round"
    with pytest.raises(StopIteration) as end:
        update.send(LocalResult(trained, torch.zeros(()), 1, 1, {}, torch.empty(0), torch.ones(())))
    after = end.value.value
    torch.testing.assert_close(after.tensors[name], 0.5 * state.tensors[name] + 0.5 * trained[name])
    assert torch.equal(after.tensors["last." + name], trained[name])
    sent = method.message_to_client(after, 21, 0, None)
    assert set(sent.tensors) == set(method.server_module)
    assert torch.equal(sent.tensors[name], after.tensors[name])


def up_bytes(context: RunContext, with_local_module: bool, features: int) -> int:
    """Return the bytes of a client's message by its shapes."""
    method = method_of(context)
    shapes = {
        "features": torch.empty(features, method.context.num_tokens, method.context.embed_dim, dtype=torch.bfloat16),
        "labels": torch.empty(features, dtype=torch.int16),
    }
    local = method.local_module.take(context.base.tensors) if with_local_module else {}
    return message_size(Message({**shapes, **local}, {"samples": 1, "loss": 1.0}))


def test_local_modules_are_averaged_every_few_rounds(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    config = eftvit_config("method.average_local=2", "fleet.clients=4", "fleet.per_round=4", "rounds=4")
    context = open_run(config, tmp_path)
    method, state = method_of(context), load_state(context)
    assert method.has_global_model
    for round in (1, 2, 3):
        for client in range(4):
            sent = method.message_to_client(state.server, round, client, round - 1 or None)
            assert (set(sent.tensors) >= set(method.local_module)) == (round == 3)
        state, record = run_round(context, state, round)
        for entry in record.clients:
            part = state.server.parts.get(f"features-{entry.client:06d}")
            if part is not None:
                expected = up_bytes(context, round == 2, len(part.tensors["labels"]))
                assert abs(entry.up_bytes - expected) <= 64, "but for the digits of the loss"
        if round == 2:
            states = {entry.client: context.fleet.client_state(entry.client) for entry in record.clients}
            weights = torch.tensor([number(entry.numbers["samples"]) for entry in record.clients]).double()
            for name in method.local_module:
                own = torch.stack([one.tensors[name] for one in states.values() if one is not None]).double()
                mean = torch.einsum("c,c...->...", weights / weights.sum(), own)
                torch.testing.assert_close(state.server.tensors[name], mean.float())
    model = method.model_weights(state.server, context.base.tensors, None)
    assert all(torch.equal(model[name], state.server.tensors[name]) for name in model)


def test_local_modules_that_never_train_are_shared_and_not_stored(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(eftvit_config("method.local_rounds=0", "rounds=2"), tmp_path)
    method, state = method_of(context), run_to(context, 2)
    assert all(context.fleet.client_state(client) is None for client in state.last_seen)
    for name in method.local_module:
        assert torch.equal(state.server.tensors[name], context.base.tensors[name])
    assert set(method.message_to_client(state.server, 3, 0, 2).tensors) == set(method.server_module)
    after, record = run_round(context, state, 3)
    assert record.accuracy is not None
    assert record.accuracy.models == 1
    correct, _ = context.evaluator.evaluate(after.server.tensors)
    assert record.accuracy.global_ == pytest.approx(float(correct.mean()))


def test_frozen_local_modules_do_not_change(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(eftvit_config("method.local_rounds=1", "fleet.clients=4", "fleet.per_round=4"), tmp_path)
    state, names = load_state(context), list(method_of(context).local_module)
    before: dict[int, Any] = {}
    for round in (1, 2):
        state, record = run_round(context, state, round)
        for entry in record.clients:
            own = context.fleet.client_state(entry.client)
            if own is None or not entry.numbers["samples"]:
                continue
            tensors = [own.tensors[name].clone() for name in names]
            if round == 1:
                assert any(not torch.equal(t, context.base.tensors[n]) for n, t in zip(names, tensors, strict=True))
                before[entry.client] = tensors
            elif entry.client in before:
                assert all(torch.equal(*pair) for pair in zip(tensors, before[entry.client], strict=True))
    assert before


@pytest.mark.parametrize(
    "keys",
    [
        ("method.average_local=1", "method.server_ema=0.8"),
        ("method.max_age=2", "method.token_dropout=0.5", "method.views=2", "train.epochs=2"),
        ("method.local_rounds=2", "method.server_batch_size=5"),
        ("method.local_rounds=1", "method.train_head=false"),
    ],
    ids=str,
)
def test_a_stopped_run_resumes_bit_for_bit(keys: Sequence[str], eftvit_config: MakeConfig, tmp_path: Path) -> None:
    config = eftvit_config(*keys, "rounds=4")
    for folder in ("whole", "parted"):
        (tmp_path / folder).mkdir()
    whole = run_rounds(open_run(config, tmp_path / "whole")).state.server
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run_rounds(open_run(config, tmp_path / "parted"), callbacks=[InterruptAfter(stop)])
    parted = run_rounds(open_run(config, tmp_path / "parted")).state.server
    left, right = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "parted"))
    assert left == right
    assert all(torch.equal(whole.tensors[name], parted.tensors[name]) for name in whole.tensors)


def test_clients_that_only_compute_features_send_the_same_and_receive_no_model(
    eftvit_config: MakeConfig, tmp_path: Path
) -> None:
    """A head of its own changes nothing that a client with a frozen local module sends."""
    keys = "method.local_rounds=1", "rounds=4", "eval.every=3", "fleet.clients=4", "fleet.per_round=4"
    states, records = [], []
    for train_head in (True, False):
        folder = tmp_path / str(train_head)
        folder.mkdir()
        context = open_run(eftvit_config(*keys, f"method.train_head={str(train_head).lower()}"), folder)
        states.append(run_rounds(context).state)
        records.append(list(read_records(folder)))
    whole, features = states
    assert equal_states(whole.server, features.server)
    assert [record.accuracy and record.accuracy.global_ for record in records[0]] == [
        record.accuracy and record.accuracy.global_ for record in records[1]
    ]
    server_bytes = message_size(method_of(context).evaluation_message(features.server, 4))
    for trained, computed in zip(*records, strict=True):
        trains = computed.round == 1
        assert (computed.loss is None) == (not trains)
        for with_head, entry in zip(trained.clients, computed.clients, strict=True):
            evaluates = computed.round in (3, 4)  # the last round is evaluated too
            assert entry.failure is None
            assert entry.numbers["samples"] == with_head.numbers["samples"]
            assert ("loss" in entry.numbers) == trains
            assert (entry.tested is not None) == evaluates
            assert trains or entry.down_bytes == (server_bytes if evaluates else 0)
            assert trains or not entry.numbers["samples"] or (entry.gflops or 0) < (with_head.gflops or 0)


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize("graphs", [False, True])
def test_features_alone_are_the_same_stacked_and_captured(
    stack_size: int,
    graphs: bool,
    captured: list[CudaGraphRunner],
    monkeypatch: pytest.MonkeyPatch,
    eftvit_config: MakeConfig,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("vitfleet.run.setup.set_up_execution", partial(set_up_with_graphs, graphs))
    keys = (
        "method.local_rounds=0",
        "rounds=1",
        "fleet.clients=3",
        "fleet.per_round=3",
        f"machine.stack_size={stack_size}",
    )
    parts = []
    for train_head in ("true", "false"):
        context = open_run(eftvit_config(*keys, f"method.train_head={train_head}"), tmp_path / train_head)
        state = run_to(context, 1).server
        parts.append({name: part.tensors["features"] for name, part in state.parts.items()})
    assert bool(captured) == graphs
    with_head, without = parts
    assert with_head.keys() == without.keys()
    assert all(torch.equal(with_head[name], without[name]) for name in with_head)


def test_what_trains_is_counted_where_local_modules_are_frozen(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    counts = []
    for keys in ([], ["method.local_rounds=0"], ["method.local_rounds=0", "method.train_head=false"]):
        context = open_run(eftvit_config(*keys), tmp_path / str(len(keys)))
        counts.append(len(method_of(context).trainable))
    assert counts == [len(method_of(context).local_module) + 2, 2, 0]


@pytest.mark.parametrize("keys", [(), ("method.local_rounds=2", "method.average_local=1")], ids=str)
def test_only_clients_with_frozen_local_modules_can_do_without_a_head(
    keys: Sequence[str], eftvit_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=r"method.train_head = False: only for local modules that are frozen"):
        eftvit_config("method.train_head=false", *keys)
