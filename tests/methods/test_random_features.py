"""Random features in closed form: what clients send of them, and what standardises the features they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import vitfleet
from conftest import CLASSES, context_of
from vitfleet.config.schema import ModelConfig
from vitfleet.message import Message, State
from vitfleet.methods.base import head_features
from vitfleet.methods.closed_form.closed_form import COUNTED, MEASURED, ClosedForm, ClosedFormParams
from vitfleet.methods.closed_form.solvers import solve
from vitfleet.methods.closed_form.sums import MOMENTS, SQUARES, Moments, Sums
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.variants.wide_head import SCALE, SHIFT, draw_projection, widen_head
from vitfleet.models.zoo import build_model
from vitfleet.run.records import read_records

PROJECT = 30
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
    "method.features": "both",
    "method.project": 60,
    "method.solver": "ridge",
}


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


def method_of(**keys: Any) -> ClosedForm:
    """Return the method on a model whose head has random features of 32 numbers."""
    params = ClosedFormParams(name="closed-form", features="both", project=PROJECT, solver="ridge", **keys)
    config = ModelConfig(name="vit", image_size=8, patch_size=4, dim=16, depth=1, heads=2)
    net = build_model(config, CLASSES, 1, 8, seed=0, adapt=partial(widen_head, features=head_features(params)))
    return ClosedForm(params, context_of(net))


def seen_by_clients(clients: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return what the head sees of each client's images: entries whose means and deviations differ, and labels."""
    random = torch.Generator().manual_seed(0)
    size, mean = torch.rand(32, generator=random) * 5 + 0.1, torch.randn(32, generator=random) * 20
    rows = []
    for client in range(clients):
        images = 10 + 7 * client
        labels = torch.randint(0, CLASSES, (images,), generator=random)
        rows.append((torch.randn(images, 32, generator=random) * size + mean + 0.3 * labels[:, None], labels))
    return rows


def by_hand(seen: Tensor, labels: Tensor, method: ClosedForm) -> Sums:
    """Return the sums of random features of all images in one place."""
    seen = seen.double()
    shift, scale = seen.mean(dim=0).float(), (1 / seen.std(dim=0, correction=0)).float()
    projection = draw_projection(head_features(method.params), 32).double()
    return Sums.of(((seen - shift) * scale @ projection.T).relu(), labels, CLASSES)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize("send", ["sums", "features"])
def test_the_images_of_all_clients_standardise_what_random_features_are_made_of(send: str, order: list[int]) -> None:
    method = method_of(standardize="data", send=send, dtype="fp64")
    clients = seen_by_clients()
    if send == "features":
        clients = [(seen.half(), labels) for seen, labels in clients]
    state = method.initial_state(method.context.net.initial_weights())
    aggregator = method.aggregator(state, 1)
    for client in order:
        seen, labels = clients[client]
        numbers = {"samples": len(labels)}
        moments = Message(Moments.of(seen).tensors(), numbers)
        aggregator.add(client, moments if send == "sums" else method.client_message(seen, labels, {}))
    state = aggregator.finish()
    assert state.numbers[MEASURED] == sum(len(labels) for _, labels in clients)
    if send == "sums":
        assert state.numbers[COUNTED] == []
        aggregator = method.aggregator(state, 2)
        for client in order:
            asked = method.message_to_client(state, 2, client, 1)
            assert set(asked.tensors) == {SHIFT, SCALE}
            aggregator.add(client, method.client_message(*clients[client], asked.tensors))
        state = aggregator.finish()
    assert state.numbers[COUNTED] == [0, 1, 2, 3]
    seen, labels = (torch.cat(column) for column in zip(*clients, strict=True))
    expected = by_hand(seen.float(), labels, method)
    for name, tensor in method.solve(expected).items():
        torch.testing.assert_close(state.tensors[name], tensor, rtol=1e-6, atol=1e-9)
    sums = Sums.of_tensors({name.removeprefix("sums/"): t for name, t in state.tensors.items() if name[:5] == "sums/"})
    torch.testing.assert_close(sums.class_sums, expected.class_sums, rtol=1e-9, atol=1e-9)
    solution, reference = (solve(each, method.params).head.folded() for each in (sums, expected))
    torch.testing.assert_close(solution.weight, reference.weight, rtol=1e-9, atol=1e-9)


def test_any_order_and_division_give_the_same_to_1e_9() -> None:
    """In sums and solution: the random features of an image are the same numbers wherever they are computed."""
    method = method_of(standardize="data", send="features")
    seen, labels = (torch.cat(column) for column in zip(*seen_by_clients(), strict=True))
    seen = seen.half()
    heads = []
    for parts in ([len(labels)], [20, 1, len(labels) - 21], [len(labels) - 40, 40]):
        aggregator = method.aggregator(State(), 1)
        pieces = list(zip(torch.split(seen, parts), torch.split(labels, parts), strict=True))
        for client, (rows, its) in reversed(list(enumerate(pieces))):
            aggregator.add(client, method.client_message(rows, its, {}))
        tensors = aggregator.finish().tensors
        heads.append({name: tensor for name, tensor in tensors.items() if name in (SHIFT, SCALE)})
        assert torch.equal(heads[-1][SHIFT], heads[0][SHIFT])
        assert torch.equal(heads[-1][SCALE], heads[0][SCALE])
        heads[-1]["sums"] = tensors["sums/gram"]
        torch.testing.assert_close(heads[-1]["sums"], heads[0]["sums"], rtol=1e-11, atol=1e-9)
        heads[-1] |= {name: tensors[name].double() for name in ("head.weight", "head.bias")}
        for name in ("head.weight", "head.bias"):
            torch.testing.assert_close(heads[-1][name], heads[0][name], rtol=1e-6, atol=1e-9)


def test_clients_that_come_later_are_standardised_as_the_first_ones() -> None:
    method = method_of(standardize="data", send="features")
    clients = seen_by_clients()
    state = State()
    for round, (seen, labels) in enumerate(clients, 1):
        aggregator = method.aggregator(state, round)
        aggregator.add(round, method.client_message(seen, labels, {}))
        state = aggregator.finish()
    assert state.numbers[MEASURED] == len(clients[0][1])
    assert state.numbers[COUNTED] == [1, 2, 3, 4]
    shift, scale = Moments.of(clients[0][0].half()).standardisation(len(clients[0][1]))
    assert torch.equal(state.tensors[SHIFT], shift)
    assert torch.equal(state.tensors[SCALE], scale)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({MOMENTS: torch.zeros(31, dtype=torch.float64)}, "its moments have the type"),
        ({SQUARES: torch.zeros(32)}, "its squares have the type"),
        ({SQUARES: torch.full((32,), -1.0, dtype=torch.float64)}, "smaller than its sums allow"),
        ({MOMENTS: torch.full((32,), torch.inf, dtype=torch.float64)}, "are not finite"),
        ({"more": torch.zeros(1)}, "its message has"),
    ],
)
def test_what_cannot_be_moments_is_rejected(change: dict[str, Tensor], reason: str) -> None:
    method = method_of(standardize="data")
    seen, labels = seen_by_clients()[0]
    honest = Moments.of(seen).tensors()
    method.aggregator(State(), 1).add(0, Message(honest, {"samples": len(labels)}))
    with pytest.raises(RejectedUpdateError, match=reason):
        method.aggregator(State(), 1).add(0, Message({**honest, **change}, {"samples": len(labels)}))
    with pytest.raises(RejectedUpdateError, match="it reports 0 samples"):
        method.aggregator(State(), 1).add(0, Message(honest, {"samples": 0}))


def run(out: Path, **keys: Any) -> vitfleet.Run:
    overrides = {**KEYS, **{f"method.{key}": value for key, value in keys.items() if key != "rounds"}}
    overrides["rounds"] = keys.get("rounds", 1)
    return vitfleet.train("digits", method="closed-form", overrides=overrides, out=out)


def test_features_are_sent_before_they_are_expanded(tmp_path: Path) -> None:
    """In 64 numbers of 2 bytes, and the solution is that of sums of 600 random features."""
    runs = {send: run(tmp_path / send, send=send, project=600) for send in ("sums", "features")}
    heads = {send: load_file(each.path / "model.safetensors")["head.weight"] for send, each in runs.items()}
    torch.testing.assert_close(
        heads["features"], heads["sums"], rtol=0.05, atol=0.01 * float(heads["sums"].abs().max())
    )
    (record,) = read_records(runs["features"].path)
    for client in record.clients:
        samples = int(str(client.numbers["samples"]))
        assert client.up_bytes == pytest.approx(samples * (64 * 2 + 1), abs=400)
    (record,) = read_records(runs["sums"].path)
    assert min(client.up_bytes for client in record.clients) > 600 * 601 // 2 * 4


def test_operations_of_the_sums_are_counted_by_hand(tmp_path: Path) -> None:
    records = {}
    for name, keys in {
        "features": {"send": "features"},
        "sums": {},
        "means": {"solver": "means"},
    }.items():
        (records[name],) = read_records(run(tmp_path / name, **keys).path)
    expansion, products = 2 * 64 * 60, 2 * 60 * 60
    for clients in zip(*(record.clients for record in records.values()), strict=True):
        samples = int(str(clients[0].numbers["samples"]))
        passes, sums, means = (client.gflops for client in clients)
        assert passes is not None
        assert sums is not None
        assert means is not None
        assert sums - passes == pytest.approx(samples * (expansion + products) / 1e9, rel=1e-6)
        assert means - passes == pytest.approx(samples * expansion / 1e9, rel=1e-6)


def test_a_client_passes_its_images_once_though_it_is_asked_twice(tmp_path: Path) -> None:
    first, second = read_records(run(tmp_path / "run", standardize="data", rounds=2).path)
    (once,) = read_records(run(tmp_path / "once").path)
    for moments, sums, alone in zip(first.clients, second.clients, once.clients, strict=True):
        assert moments.gflops is not None
        assert sums.gflops is not None
        assert moments.gflops + sums.gflops == pytest.approx(alone.gflops)
        assert moments.up_bytes == pytest.approx(2 * 64 * 8, abs=300)
        assert sums.up_bytes == alone.up_bytes
