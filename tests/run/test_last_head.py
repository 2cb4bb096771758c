"""The table ``[head.last]``: a run that ends with a head that sees more than the one that trained."""

from __future__ import annotations

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
from conftest import InterruptAfter
from digests import digest
from vitfleet.config import load_config
from vitfleet.costs.report import cost_reports
from vitfleet.errors import ConfigError, UserError
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.methods.closed_form.closed_form import ClosedForm
from vitfleet.methods.closed_form.sums import Sums
from vitfleet.run.checkpoints.store import StoredStates
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run

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
EFTVIT = {"method.local_layers": 1, "train.mask_ratio": 0.5}
PLUS = {**EFTVIT, "method.local_rounds": 0, "method.train_head": False}
#: What the last head sees and how it is solved.
LAST: Mapping[str, Mapping[str, Any]] = {
    "tokens of three blocks": {"features": "both", "blocks": 3},
    "random features": {"features": "both", "blocks": 2, "project": 40, "solver": "ridge"},
}
WIDE = LAST["tokens of three blocks"]


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


def last(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"head.start": "closed-form", **{f"head.last.{key}": keys[key] for key in keys}}


def keys_of(*tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for table in (TINY, *tables) for key, value in table.items()}


def train(method: str, out: Path, *tables: Mapping[str, Any], **options: Any) -> vitfleet.Run:
    return vitfleet.train(PRESET, method=method, overrides=keys_of(*tables), out=out, **options)


def last_record(run: vitfleet.Run) -> RoundRecord:
    *_, record = read_records(run.path)
    return record


def accuracy_of(record: RoundRecord) -> float:
    assert record.accuracy is not None
    assert record.accuracy.global_ is not None
    return record.accuracy.global_


def weights_of(run: vitfleet.Run) -> dict[str, Tensor]:
    return load_file(run.path / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "keys"), [("fed-full", {}), ("fedbfpt", {"method.local_layers": 2}), ("eftvit", PLUS)]
)
@pytest.mark.parametrize("kind", LAST)
def test_one_run_ends_with_what_closed_form_solves_of_the_model_of_another(
    method: str, keys: Mapping[str, Any], kind: str, tmp_path: Path
) -> None:
    run = train(method, tmp_path / "one", keys, last(LAST[kind]))
    trained = train(method, tmp_path / "trained", keys, {"head.start": "closed-form"})
    solver = {f"method.{key}": value for key, value in LAST[kind].items()}
    of_file = {"model.weights": str(trained.path / "model.safetensors"), "rounds": 1, "fleet.per_round": 4}
    solved = train("closed-form", tmp_path / "solved", solver, of_file)
    torch.testing.assert_close(weights_of(run), weights_of(solved), rtol=1e-9, atol=1e-9)
    record = last_record(run)
    assert record.head is not None
    assert record.head.accuracy_before == last_record(trained).accuracy
    assert accuracy_of(record) == accuracy_of(last_record(solved))
    up = sum(client.up_bytes for client in record.head.clients)
    assert up == sum(client.up_bytes for client in last_record(solved).clients)
    gflops = [client.gflops for client in record.head.clients]
    assert gflops == [client.gflops for client in last_record(solved).clients]


def test_local_modules_of_clients_give_the_features_of_their_own_images(tmp_path: Path) -> None:
    config = load_config(PRESET, keys_of(EFTVIT, last(WIDE), {"method.name": "eftvit"}))
    context = open_run(config, tmp_path)
    state = run_rounds(context).state
    assert context.last is not None
    assert context.last.head is not None
    solver, method = context.last.head.solver, context.method
    assert isinstance(solver, ClosedForm)
    sums = []
    for client in range(4):
        own = context.fleet.client_state(client) if client in state.last_seen else None
        body = method.model_weights(state.server, context.base.tensors, own)
        shard = context.images.shard(client, 0)
        images = context.trainer.preprocess(shard.images.images[shard.index])
        sums.append(Sums.of(context.last.net.representation(body, images, None), shard.labels, 10))
    by_hand = solver.solve(sums[0] + sums[1] + sums[2] + sums[3])
    torch.testing.assert_close(dict(state.last_head.tensors), by_hand, rtol=1e-3, atol=1e-3)
    clients = [state.last_seen[client] for client in sorted(state.last_seen)]
    assert max(clients) == 2, "some clients have local modules of their own"


@pytest.mark.parametrize(("method", "keys"), [("fed-full", {}), ("eftvit", EFTVIT)])
def test_an_interrupted_run_ends_with_the_same_bits(method: str, keys: Mapping[str, Any], tmp_path: Path) -> None:
    tables = keys, last(WIDE), {"rounds": 3, "metrics.local_accuracy": {}}
    whole = train(method, tmp_path / "whole", *tables)
    with pytest.raises(KeyboardInterrupt):
        train(method, tmp_path / "interrupted", *tables, callbacks=[InterruptAfter(2)])
    resumed = vitfleet.load_run(tmp_path / "interrupted").resume()
    assert digest(resumed.path) == digest(whole.path)
    again = vitfleet.load_run(tmp_path / "whole").resume()
    assert digest(again.path) == digest(whole.path)


def test_a_run_that_goes_on_does_so_with_the_head_that_trained(tmp_path: Path) -> None:
    runs = {}
    for name, keys in {"with": last(WIDE), "without": {"head.start": "closed-form"}}.items():
        train("fed-full", tmp_path / name, keys)
        runs[name] = vitfleet.load_run(tmp_path / name).resume(rounds=3)
    servers = [StoredStates.of_run(run.path).server().tensors for run in runs.values()]
    torch.testing.assert_close(*(dict(tensors) for tensors in servers), rtol=0, atol=0)
    assert weights_of(runs["with"])["head.weight"].shape == (10, 192)


@pytest.mark.parametrize(("method", "keys"), [("fed-lora", {}), ("eftvit", PLUS)])
def test_flowers_clients_send_the_same_bits(method: str, keys: Mapping[str, Any], tmp_path: Path) -> None:
    metrics = {"metrics.local_accuracy": {}, "metrics.per_class": {}, "eval.clients": 0}
    config = defended(
        load_config(PRESET, keys_of(keys, last(LAST["random features"]), metrics, {"method.name": method}))
    )
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(config, tmp_path / "simulation")).state
    remote = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    flower = run_rounds(open_run(remote, tmp_path / "flower", make_fleet=fleet_factory(clients.grid()))).state
    for ours, theirs in ((flower.last_head, simulation.last_head), (flower.server, simulation.server)):
        torch.testing.assert_close(dict(ours.tensors), dict(theirs.tensors), rtol=0, atol=0)
    first, second = ((tmp_path / way / "records.jsonl").read_text() for way in ("simulation", "flower"))
    assert first == second
    assert '"failure":"' not in first


def test_the_model_of_the_run_has_the_last_head(tmp_path: Path) -> None:
    best: dict[str, Any] = {"callbacks.best_model": {}}
    run = train("fed-full", tmp_path / "run", last(WIDE), best, {"metrics.local_accuracy": {}})
    record = last_record(run)
    assert record.head is not None
    assert record.head.accuracy_before != record.accuracy
    (evaluation,), _ = vitfleet.evaluate(run)
    assert evaluation.accuracy == pytest.approx(accuracy_of(record))
    of_folder, of_file = run.model(), vitfleet.load_model(run.path / "model.safetensors")
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(of_folder(images), of_file(images))
    vit: Any = of_folder.vit
    assert vit.head.in_features == 192
    exported = vitfleet.export(run, "torch-export", tmp_path / "exported")
    assert exported.max_difference < 1e-3
    with pytest.raises(UserError, match="--to timm: its head sees features that timm's model does not have"):
        vitfleet.export(run, "timm", tmp_path / "timm")
    assert record.metrics["local_accuracy"], "clients are evaluated with it too"


def test_a_run_that_is_stopped_early_solves_its_last_head(tmp_path: Path) -> None:
    stop = {"callbacks.early_stopping": {"patience": 1, "min_delta": 1.0}, "rounds": 5, "head.solve_every": 1}
    run = train("fed-full", tmp_path / "run", last(WIDE), stop)
    assert run.summary["stopped"]["round"] == 1
    assert weights_of(run)["head.weight"].shape == (10, 192)
    records = list(read_records(run.path))
    assert sum(len(record.head.clients) for record in records if record.head) == 12, "start, round 1, and the last"
    sent = sum(client.up_bytes for record in records for client in record.asked_clients)
    assert sent == records[-1].total_up_bytes == run.summary["total"]["up_bytes"]


def test_a_run_that_is_stopped_in_its_last_round_solves_its_last_head_once(tmp_path: Path) -> None:
    stop = {"callbacks.early_stopping": {"patience": 1, "min_delta": 1.0}, "rounds": 1}
    run = train("fed-full", tmp_path / "run", last(WIDE), stop)
    assert run.summary["stopped"]["round"] == 1
    record = last_record(run)
    assert record.head is not None
    assert [client.client for client in record.head.clients] == [0, 1, 2, 3]


def test_too_few_replies_leave_the_head_that_trained(tmp_path: Path) -> None:
    config = load_config(PRESET, keys_of(last(WIDE), {"method.name": "fed-full", "fleet.min_replies": 2}))
    context = open_run(config, tmp_path)
    assert context.last is not None
    more = config.fleet.model_copy(update={"min_replies": 5})
    strict = context.last.config.model_copy(update={"fleet": more})
    context = replace(context, last=replace(context.last, config=strict))
    state = run_rounds(context, load_state(context)).state
    assert not state.last_head.tensors
    assert load_file(tmp_path / "model.safetensors")["head.weight"].shape == (10, 32)


def test_costs_have_both_heads(tmp_path: Path) -> None:
    config = load_config(PRESET, keys_of(last(WIDE), {"method.name": "fed-full", "head.solve_every": 2, "rounds": 4}))
    report = next(iter(cost_reports(config, ["fed-full"])))
    assert report.head is not None
    assert report.last_head is not None
    assert (report.head.times, report.last_head.times) == (2, 1)
    assert report.last_head.up_bytes > 10 * report.head.up_bytes


@pytest.mark.parametrize(
    ("method", "keys", "key", "reason"),
    [
        ("fedper", {}, "head.last.features", "clients have heads of their own"),
        ("apfl", {}, "head.last.features", "clients have heads of their own"),
        ("fed-full", {"head.solve_last": False}, "head.solve_last", "must be true with head.last"),
        ("fed-full", {"head.last.regularization": "held-out"}, "head.last.regularization", "asks clients twice"),
        ("fed-full", {"head.last.blocks": 9}, "method.blocks", "must be at most 4"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    method: str, keys: Mapping[str, Any], key: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        open_run(load_config(PRESET, keys_of(last(WIDE), keys, {"method.name": method})), tmp_path)
    assert error.value.key == key


def test_what_the_table_leaves_out_is_as_in_the_table_head() -> None:
    config = load_config(PRESET, keys_of({"head.solver": "ridge", "head.send": "features"}, last(WIDE)))
    assert config.head.last is not None
    assert (config.head.last.solver, config.head.last.send, config.head.last.blocks) == ("ridge", "features", 3)
