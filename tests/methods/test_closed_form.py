"""The method closed-form in runs: the head of all images in one round, however and wherever clients run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LocalClients, export_images
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import vitfleet
from conftest import CLASSES, Command, InterruptAfter, MakeShard, context_of, long_but
from digests import digest
from emulated_graphs import set_up_with_graphs
from vitfleet.config import load_config
from vitfleet.config.load import from_tree
from vitfleet.errors import ConfigError, UserError
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.message import Message, State, Tensors, with_prefix
from vitfleet.methods.base import ClientRoundInput, ClientUpdate
from vitfleet.methods.closed_form.closed_form import (
    ANSWERED,
    ANSWERS,
    CLIENT_MEANS,
    COUNTED,
    HEADS,
    SUMS,
    ClosedForm,
    ClosedFormParams,
    SumsUpdate,
)
from vitfleet.methods.closed_form.held_out import (
    CORRECT,
    LOSSES,
    TEMPERATURES,
    WEIGHTS,
    compare_heads,
    regularizations,
    solved_with,
    split_images,
)
from vitfleet.methods.closed_form.solvers import solve
from vitfleet.methods.closed_form.sums import FEATURES, Sums
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.net import Net
from vitfleet.run import setup
from vitfleet.run.checkpoints.store import StoredStates
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.wire import encode

#: A round of all clients, of unequal size, on the shipped body.
KEYS: Mapping[str, Any] = {
    "rounds": 1,
    "model.weights": "digits",
    "model.patch_size": 2,
    "data.limit": 300,
    "fleet.clients": 5,
    "fleet.per_round": 5,
    "fleet.devices": {},
    "machine.device": "cpu",
    "machine.precision": "fp32",
    "machine.workers": 1,
}
OF_DATA = {
    "method.solver": "ridge",
    "method.features": "both",
    "method.project": 60,
    "method.standardize": "data",
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "lda": {},
    "ridge of all tokens": {"method.solver": "ridge", "method.features": "both", "method.blocks": 3},
    "random features": {"method.solver": "ridge", "method.features": "both", "method.project": 60},
    "random features of data": {**OF_DATA, "rounds": 2},
    "random features of data, sent": {**OF_DATA, "method.send": "features"},
    "means": {"method.solver": "means"},
    "means-covariance": {"method.solver": "means-covariance"},
    "features": {"method.send": "features"},
    "masked": {"train.mask_ratio": 0.5},
    "held-out": {"method.regularization": "held-out", "method.held_out": 0.3, "method.features": "both", "rounds": 2},
}
#: What depends on who has which images, or on draws.
UNLIKE_CENTRAL = {"means-covariance", "masked", "held-out"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "alone": {},
    "stacked": {"machine.stack_size": 3},
    "captured": {},
    "captured, stacked": {"machine.stack_size": 3},
}


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


@pytest.fixture(name="vitfleet_command")
def _vitfleet_command(request: pytest.FixtureRequest) -> Command:
    """Return the fixture ``vitfleet``, whose name is that of the package here."""
    command: Command = request.getfixturevalue("vitfleet")
    return command


def train(out: Path, *keys: Mapping[str, Any], **options: Any) -> vitfleet.Run:
    overrides = {key: value for changes in (KEYS, *keys) for key, value in changes.items()}
    return vitfleet.train("digits", method="closed-form", overrides=overrides, out=out, **options)


def head_of(run: vitfleet.Run) -> dict[str, Tensor]:
    assert run.summary["total"]["failures"] == 0
    return head_of_file(run)


def head_of_file(run: vitfleet.Run) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_file(run.path / "model.safetensors").items() if name[:5] == "head."}


def accuracy_of(run: vitfleet.Run) -> float:
    *_, last = read_records(run.path)
    assert last.accuracy is not None
    assert last.accuracy.global_ is not None
    return last.accuracy.global_


def assert_close(left: Tensors, right: Tensors, atol: float = 1e-3) -> None:
    """Compare heads: features differ in their last digits with the images of a batch."""
    torch.testing.assert_close(dict(left), dict(right), rtol=1e-3, atol=atol)


# The same in every way


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNLIKE_CENTRAL])
def test_any_partition_gives_the_head_of_all_images(kind: str, tmp_path: Path) -> None:
    partitions: Mapping[str, Mapping[str, Any]] = {
        "one client": {"fleet.clients": 1, "fleet.per_round": 1},
        "skewed": {"data.partition.beta": 0.1},
        "iid": {"data.partition.kind": "iid", "fleet.clients": 8, "fleet.per_round": 8},
    }
    runs = {name: train(tmp_path / name, KINDS[kind], keys) for name, keys in partitions.items()}
    heads = {name: head_of(run) for name, run in runs.items()}
    for name in partitions:
        assert_close(heads[name], heads["one client"])
    assert accuracy_of(runs["skewed"]) > 0.8


@pytest.mark.parametrize("kind", long_but(KINDS, "lda", "random features", "masked", "held-out"))
def test_stacked_and_captured_steps_record_what_single_ones_do(
    kind: str, tmp_path: Path, captured: list[CudaGraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {}
    for way, keys in WAYS.items():
        monkeypatch.setattr(setup, "gpu_memory_bytes", lambda device: 1 << 30)
        monkeypatch.setattr(setup, "set_up_execution", partial(set_up_with_graphs, "captured" in way))
        run = train(tmp_path / way, KINDS[kind], keys)
        execution = run.summary["execution"]
        assert execution["clients"] == ("cuda graph" if "captured" in way else "eager")
        assert execution["largest_stack"] == (3 if "stacked" in way else 1)
        heads[way] = head_of(run)
        assert_close(heads[way], heads["alone"])
    assert captured


@pytest.mark.parametrize("kind", ["lda", "means-covariance", "features"])
def test_clients_that_come_later_add_their_sums(kind: str, tmp_path: Path) -> None:
    """Two of five clients in each of several rounds: in the end the head is that of all, asked in one round."""
    several = train(tmp_path / "several", KINDS[kind], {"rounds": 12, "fleet.per_round": 2})
    at_once = train(tmp_path / "at once", KINDS[kind])
    assert_close(head_of(several), head_of(at_once))
    records = list(read_records(several.path))
    sent = [client.up_bytes > 1000 for record in records for client in record.clients]
    assert sum(sent) == 5, "every client sends its sums once"
    assert not any(client.down_bytes > 1000 for record in records[6:] for client in record.clients)


@pytest.mark.parametrize("kind", ["lda", "held-out", "random features of data", "random features of data, sent"])
def test_an_interrupted_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    keys = {**KINDS[kind], "rounds": 4, "fleet.per_round": 3}
    whole = train(tmp_path / "whole", keys)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "interrupted", keys, callbacks=[InterruptAfter(2)])
    resumed = vitfleet.load_run(tmp_path / "interrupted").resume()
    assert digest(resumed.path) == digest(whole.path)


@pytest.mark.parametrize(
    "kind",
    [
        "ridge of all tokens",
        "random features",
        "random features of data",
        "random features of data, sent",
        "features",
        "held-out",
    ],
)
def test_flowers_clients_send_the_same_bits(kind: str, tmp_path: Path) -> None:
    overrides = {**KEYS, "method.name": "closed-form", **KINDS[kind], "rounds": 2, "fleet.per_round": 4}
    config = load_config("digits", overrides)
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(config, tmp_path / "simulation")).state.server
    remote = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    flower = run_rounds(open_run(remote, tmp_path / "flower", make_fleet=fleet_factory(clients.grid()))).state.server
    assert flower.numbers == simulation.numbers
    assert encode(flower) == encode(simulation)
    records = (tmp_path / "flower" / "records.jsonl").read_bytes()
    assert records == (tmp_path / "simulation" / "records.jsonl").read_bytes()
    assert b'"failure":"' not in records


@pytest.mark.parametrize("kind", ["lda", "random features"])
def test_a_stored_model_predicts_as_the_run_measured(kind: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", KINDS[kind])
    (evaluation,), _ = vitfleet.evaluate(run)
    assert evaluation.accuracy == pytest.approx(accuracy_of(run))
    exported = vitfleet.export(run, "torch-export", tmp_path / "exported")
    assert exported.max_difference < 1e-3


@pytest.mark.parametrize("send", ["sums", "features"])
def test_held_out_images_choose_by_hand(send: str, tmp_path: Path) -> None:
    """Each client's images are divided by an address; the heads are those of the others; the last one is of all."""
    keys = {**KEYS, "method.name": "closed-form", **KINDS["held-out"], "method.send": send, "method.dtype": "fp64"}
    context = open_run(load_config("digits", keys), tmp_path)
    method, weights = context.method, context.net.initial_weights()
    assert isinstance(method, ClosedForm)
    after_one, _ = run_round(context, load_state(context), 1)
    server = run_round(context, after_one, 2)[0].server
    first, second = [], []
    for client in range(5):
        shard = context.images.shard(client, 0)
        images = context.trainer.preprocess(shard.images.images[shard.index])
        features = context.net.representation(weights, images, None)
        kept, held_out = split_images(len(shard), 0.3, 0, client)
        first.append((features[kept], shard.labels[kept]))
        second.append((features[held_out], shard.labels[held_out]))
    (known, its_labels), (new, labels) = (
        [torch.cat(column) for column in zip(*rows, strict=True)] for rows in (first, second)
    )
    assert abs(len(new) - 0.3 * 300) < 3
    sums, params = Sums.of(known, its_labels, 10), method.params
    heads = [solved_with(sums, params, value) for value in regularizations(params)]
    correct = [int((head.logits(new).argmax(dim=1) == labels).sum()) for head in heads]
    answers = with_prefix(server.tensors, ANSWERS)
    assert answers[CORRECT].tolist() == pytest.approx(correct, abs=1)
    order = [(-float(count), float(losses.min())) for count, losses in zip(*answers.values(), strict=True)]
    best = order.index(min(order))
    chosen = int(answers[LOSSES][best].argmin())
    expected = solved_with(sums + Sums.of(new, labels, 10), params, regularizations(params)[best])
    tensors = method.head_tensors(expected.divided_by(TEMPERATURES[chosen]))
    if send == "sums":
        assert_close({name: server.tensors[name] for name in tensors}, tensors)
    own, by_hand = (context.net({**weights, **head}, images) for head in (server.tensors, tensors))
    torch.testing.assert_close(own, by_hand, rtol=0, atol=0.1 if send == "features" else 0.01)
    loss = F.cross_entropy(heads[best].logits(new) / TEMPERATURES[chosen], labels, reduction="sum")
    assert float(answers[LOSSES][best, chosen]) == pytest.approx(float(loss), rel=1e-2)
    assert with_prefix(after_one.server.tensors, HEADS)[WEIGHTS].shape == (6, 10, 64)
    assert not with_prefix(server.tensors, HEADS), "all have answered"
    assert server.numbers[ANSWERED] == [0, 1, 2, 3, 4]


def test_a_client_that_lost_its_features_computes_them_again(
    tiny_net: Net, make_shard: MakeShard, make_trainer: Any
) -> None:
    method, trainer, shard = (
        method_of(tiny_net, regularization="held-out"),
        make_trainer(batch_size=8),
        make_shard(3, 25),
    )
    base = method.initial_broadcast(tiny_net.initial_weights()).tensors
    aggregator = method.aggregator(State(), 1)

    def update(state: State, own: State | None) -> ClientUpdate:
        job = ClientRoundInput(2, 0, method.message_to_client(state, 1, 0, None), base, own, shard)
        return run_update(method.client_update(job), trainer, shard, RngContext(0, 2, 0))

    first = update(State(), None)
    aggregator.add(0, first.message)
    state = aggregator.finish()
    kept, lost = update(state, first.client_state), update(state, None)
    assert kept.message.numbers == lost.message.numbers == {"samples": 2}
    assert_close(kept.message.tensors, lost.message.tensors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({CORRECT: torch.full((6,), 3, dtype=torch.int32)}, "not between 0 and 2"),
        ({CORRECT: torch.zeros(5, dtype=torch.int32)}, "its answer has no correct"),
        ({LOSSES: torch.full((6, 7), -1.0)}, "its answer has losses"),
        ({LOSSES: torch.full((6, 7), torch.nan)}, "its answer has losses"),
        ({LOSSES: torch.zeros(6, 7, dtype=torch.float64)}, "its answer has no losses"),
        ({"more": torch.zeros(1)}, "its message has"),
    ],
)
def test_what_cannot_be_an_answer_is_rejected(tiny_net: Net, changes: dict[str, Tensor], reason: str) -> None:
    method = method_of(tiny_net, regularization="held-out")
    aggregator = method.aggregator(State(), 1)
    aggregator.add(0, message_of(*random_features()))
    state = aggregator.finish()
    heads = method.message_to_client(state, 2, 0, 1).tensors
    features, labels = random_features(2, seed=1)
    honest = {**message_of(features, labels).tensors, **compare_heads(heads, features, labels)}
    method.aggregator(state, 2).add(0, Message(honest, {"samples": 2}))
    with pytest.raises(RejectedUpdateError, match=reason):
        method.aggregator(state, 2).add(0, Message({**honest, **changes}, {"samples": 2}))


# Without a client


@pytest.mark.parametrize("kind", ["lda", "ridge of all tokens", "means", "means-covariance", "features"])
def test_a_forgotten_client_is_as_if_it_had_never_taken_part(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KINDS[kind], "rounds": 3, "fleet.per_round": 3, "method.dtype": "fp32"}
    run = train(tmp_path / "run", keys)
    forgotten = run.forget([2, 4])
    assert forgotten.path == tmp_path / "run-without-2-4"
    add = SumsUpdate.add
    monkeypatch.setattr(
        SumsUpdate, "add", lambda self, client, message: None if client in (2, 4) else add(self, client, message)
    )
    without = train(tmp_path / "without", keys)
    states = [StoredStates.of_run(each.path).server() for each in (forgotten, without)]
    sums = [with_prefix(state.tensors, SUMS) or with_prefix(state.tensors, CLIENT_MEANS) for state in states]
    torch.testing.assert_close(*sums, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(head_of_file(forgotten), head_of_file(without), rtol=1e-5, atol=1e-6)
    assert not torch.equal(head_of_file(forgotten)["head.weight"], head_of_file(run)["head.weight"])
    assert forgotten.summary["forgotten"]["clients"] == [2, 4]
    assert forgotten.summary["forgotten"]["accuracy"] == pytest.approx(accuracy_of(without))
    assert forgotten.resume(rounds=4).summary["rounds"] == 4
    assert_close(head_of_file(forgotten), head_of_file(without))


@pytest.mark.parametrize(
    ("keys", "clients", "reason"),
    [
        ({"method.regularization": "held-out", "rounds": 2}, [0], "have chosen the head"),
        ({**OF_DATA, "rounds": 2}, [0], "are in what all sums are of"),
        ({}, [7], "has sent nothing"),
        ({}, [0, 1, 2, 3, 4], "no images remain"),
    ],
)
def test_what_cannot_be_forgotten_is_said(
    keys: dict[str, Any], clients: list[int], reason: str, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", keys)
    with pytest.raises(UserError, match=reason):
        run.forget(clients)
    assert not list(tmp_path.glob("run-without*"))


def test_a_client_is_forgotten_once(tmp_path: Path) -> None:
    """Its sums would be subtracted twice, also where the run went on after it was forgotten."""
    run = train(tmp_path / "run")
    with pytest.raises(UserError, match="--client 2: is given twice"):
        run.forget([2, 2])
    forgotten = run.forget([2])
    forgotten.resume(rounds=2)
    with pytest.raises(UserError, match="--client 2: is forgotten already in"):
        forgotten.forget([2])
    both = forgotten.forget([4])
    assert both.summary["forgotten"]["clients"] == [2, 4]
    together = run.forget([2, 4])
    torch.testing.assert_close(head_of_file(both), head_of_file(together), rtol=1e-4, atol=1e-6)


def test_what_was_averaged_cannot_be_forgotten(tmp_path: Path, vitfleet_command: Command) -> None:
    run = vitfleet.train("digits", overrides={**KEYS, "data.limit": 100}, out=tmp_path / "run")
    done = vitfleet_command(tmp_path, "forget", "run", "--client", "3")
    assert done.returncode == 2
    assert "with fedavg, what clients sent cannot be subtracted" in " ".join(done.stderr.split())
    assert not list(tmp_path.glob("run-without*"))
    assert run.finished


def test_the_command_says_what_remains(tmp_path: Path, vitfleet_command: Command) -> None:
    train(tmp_path / "run")
    done = vitfleet_command(tmp_path, "forget", "run", "--client", "3", "--out", "less")
    assert done.returncode == 0, done.stderr
    assert "without 3" in done.stdout + done.stderr
    assert (tmp_path / "less" / "model.safetensors").exists()


# What is sent


def test_bytes_are_those_of_a_triangle_and_of_the_classes_that_a_client_has(tmp_path: Path) -> None:
    for dtype, size in (("fp64", 8), ("fp32", 4), ("bf16", 2)):
        run = train(tmp_path / dtype, {"method.dtype": dtype})
        (record,) = read_records(run.path)
        for client in record.clients:
            samples = client.numbers["samples"]
            assert isinstance(samples, int)
            overhead = client.up_bytes - 32 * 33 // 2 * size
            assert 0 < overhead < 10 * (32 * max(4, size) + 6) + 400, "of ten classes at most"


def test_costs_count_one_forward_pass() -> None:
    def costs(**keys: Any) -> Any:
        overrides = {**KEYS, **{key.replace("__", "."): value for key, value in keys.items()}}
        (report,) = vitfleet.cost("digits", method="closed-form", methods=["closed-form"], overrides=overrides)
        return report

    (fedavg,) = vitfleet.cost("digits", method="fedavg", methods=["fedavg"], overrides=KEYS)
    # But for the head, which no client computes.
    assert costs().train_gflops == pytest.approx(2 * fedavg.forward_gmac, rel=0.01)
    assert costs(method__project=2000).train_gflops > 1.05 * costs().train_gflops
    assert costs().up_bytes < costs(method__features="both").up_bytes


# On the server


def method_of(net: Net, **keys: Any) -> ClosedForm:
    return ClosedForm(ClosedFormParams(name="closed-form", **keys), context_of(net))


def message_of(features: Tensor, labels: Tensor, dtype: str = "fp32") -> Message:
    sums = Sums.of(features, labels, CLASSES)
    return Message(sums.message(torch.unique(labels), dtype), {"samples": len(labels)})


def random_features(images: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(images, 16, generator=random), torch.randint(0, CLASSES, (images,), generator=random)


def test_the_server_keeps_float64_sums_and_whom_it_has_asked(tiny_net: Net) -> None:
    method = method_of(tiny_net)
    state = method.initial_state(tiny_net.initial_weights())
    assert method.message_to_client(state, 1, 7, None) == Message()
    aggregator = method.aggregator(state, 1)
    features, labels = random_features()
    aggregator.add(7, message_of(features, labels))
    aggregator.add(3, Message(numbers={"samples": 0}))
    state = aggregator.finish()
    assert state.numbers[COUNTED] == [3, 7]
    assert {tensor.dtype for tensor in with_prefix(state.tensors, SUMS).values()} == {torch.float64}
    assert method.message_to_client(state, 2, 7, 1).numbers == {COUNTED: 1}
    assert set(method.model_weights(state, method.initial_broadcast(tiny_net.initial_weights()).tensors, None)) == set(
        tiny_net.parts.shapes
    )


def test_sums_are_added_once(tiny_net: Net) -> None:
    method, message = method_of(tiny_net), message_of(*random_features())
    aggregator = method.aggregator(State(), 1)
    aggregator.add(0, message)
    with pytest.raises(RejectedUpdateError, match="added before"):
        aggregator.add(0, message)
    state = aggregator.finish()
    aggregator = method.aggregator(state, 2)
    aggregator.add(0, Message(numbers={"samples": 0}))
    with pytest.raises(RejectedUpdateError, match="added before"):
        aggregator.add(0, message)
    after = aggregator.finish()
    for name, tensor in state.tensors.items():
        assert torch.equal(after.tensors[name], tensor)


def test_a_round_without_images_changes_nothing(tiny_net: Net) -> None:
    method = method_of(tiny_net)
    state = method.initial_state(tiny_net.initial_weights())
    aggregator = method.aggregator(state, 1)
    aggregator.add(0, Message(numbers={"samples": 0}))
    assert aggregator.finish().tensors == state.tensors


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [({"samples": 3}, "it has images and sends nothing"), ({"samples": 51}, "it reports 51 samples, and sums of 50")],
)
def test_what_does_not_fit_the_reported_samples_is_rejected(
    tiny_net: Net, numbers: dict[str, int], reason: str
) -> None:
    tensors = {} if numbers["samples"] == 3 else message_of(*random_features()).tensors
    with pytest.raises(RejectedUpdateError, match=reason):
        method_of(tiny_net).aggregator(State(), 1).add(0, Message(tensors, numbers))


def test_features_far_larger_than_those_of_others_are_rejected(tiny_net: Net) -> None:
    aggregator = method_of(tiny_net).aggregator(State(), 1)
    features, labels = random_features(seed=3)
    with pytest.raises(RejectedUpdateError, match=r"aggregate\.max_change"):
        aggregator.add(3, message_of(1000 * features, labels))
    for client in range(3):
        small, its_labels = random_features(seed=client)
        aggregator.add(client, message_of(0.01 * small, its_labels))
    with pytest.raises(RejectedUpdateError, match=r"aggregate\.max_ratio"):
        aggregator.add(3, message_of(5 * features, labels))


@pytest.mark.parametrize("send", ["sums", "features"])
def test_what_a_client_sends_by_hand(tiny_net: Net, make_shard: MakeShard, make_trainer: Any, send: str) -> None:
    """Of images in two batches, the last of which has padding where clients are stacked."""
    method, trainer, shard = method_of(tiny_net, send=send, dtype="fp64"), make_trainer(batch_size=8), make_shard(3, 15)
    weights = tiny_net.initial_weights()
    base = method.initial_broadcast(weights).tensors
    job = ClientRoundInput(1, 0, Message(), base, None, shard)
    message = run_update(method.client_update(job), trainer, shard, RngContext(0, 1, 0)).message
    images = trainer.preprocess(shard.images.images[shard.index])
    features = tiny_net.outputs_and_representation(weights, images, None, None)[1]
    if send == "features":
        torch.testing.assert_close(message.tensors[FEATURES], features.half(), rtol=1e-3, atol=1e-3)
    (received, _), expected = method.received(message, {}), Sums.of(features, shard.labels, CLASSES)
    torch.testing.assert_close(
        received.tensors(), expected.tensors(), rtol=1e-3, atol=1e-2 if send == "features" else 1e-5
    )
    head = method.solve(received)
    reference = solve(expected, method.params).head.folded()
    scale = float(reference.weight.norm() / head["head.weight"].double().norm())
    torch.testing.assert_close(head["head.weight"].double() * scale, reference.weight, rtol=0.2, atol=0.2)


def test_a_temperature_divides_the_logits(tiny_net: Net) -> None:
    sums = Sums.of(*random_features(), CLASSES)
    once, half = (method_of(tiny_net, temperature=value).solve(sums) for value in (1.0, 2.0))
    torch.testing.assert_close(once["head.weight"], 2 * half["head.weight"])
    torch.testing.assert_close(once["head.bias"], 2 * half["head.bias"])


def test_a_class_without_images_has_a_bias_that_is_finite_in_every_type(tiny_net: Net) -> None:
    features, labels = random_features()
    head = method_of(tiny_net, temperature=0.01).solve(Sums.of(features, labels.clamp(min=1), CLASSES))
    assert float(head["head.bias"][0]) == -1e4
    assert bool(head["head.bias"].half().isfinite().all())


# Configurations


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({}, "needs a pretrained body"),
        ({"data": {"tasks": {"count": 5, "classes": 2, "per_client": [1, 2]}}}, "one round for all classes"),
        ({"aggregate": {"rule": "median"}}, "must be mean"),
        ({"aggregate": {"norm_factor": 3.0}}, "not to sums"),
        ({"server": {"lr": 0.5}}, "has no effect"),
        ({"rounds": 1, "method": {"name": "closed-form", "regularization": "held-out"}}, "clients are asked twice"),
        (
            {"rounds": 1, "method": {"name": "closed-form", "project": 9, "standardize": "data"}},
            "standardize = data: clients are asked twice",
        ),
    ],
)
def test_what_cannot_be_solved_is_refused(tables: dict[str, Any], reason: str) -> None:
    model = {"model": {"weights": "digits"}} if tables else {}
    with pytest.raises(ConfigError, match=reason):
        from_tree({"method": {"name": "closed-form"}, **model, **tables})


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"method": {"name": "closed-form", "standardize": "data"}}, "is for random features"),
        (
            {"method": {"name": "closed-form", "project": 9, "standardize": "data", "regularization": "held-out"}},
            "cannot be with regularization",
        ),
        ({"head": {"start": "closed-form", "project": 9, "standardize": "data"}}, "head.send = features"),
        ({"head": {"last": {"project": 9, "standardize": "data"}}}, "head.last.send = features"),
    ],
)
def test_what_cannot_standardise_is_refused(table: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        from_tree({"model": {"weights": "digits"}, **table})
