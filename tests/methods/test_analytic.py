"""The method analytic: after the last task its head is that of all images at once, in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import vitfleet
from conftest import CLASSES, InterruptAfter, context_of
from digests import digest
from vitfleet.config.load import from_tree
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, with_prefix
from vitfleet.methods.closed_form.closed_form import SUMS
from vitfleet.methods.closed_form.solvers import solve
from vitfleet.methods.closed_form.sums import Sums
from vitfleet.methods.continual.analytic import Analytic, AnalyticParams
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.net import Net
from vitfleet.run.records import read_records

#: A stream on the shipped body: five tasks of two classes, a partition that leaves clients without images of a task.
KEYS: dict[str, Any] = {
    "model.weights": "digits",
    "model.patch_size": 2,
    "data.limit": 300,
    "data.tasks.count": 5,
    "data.tasks.classes": 2,
    "data.tasks.order": "common",
    "data.tasks.partitioned": True,
    "data.tasks.scenario": "class",
    "data.tasks.rounds_per_task": 1,
    "data.partition": {"kind": "dirichlet", "beta": 0.1},
    "fleet.clients": 5,
    "fleet.per_round": 5,
    "fleet.devices": {},
    "machine.device": "cpu",
    "machine.precision": "fp32",
    "machine.workers": 1,
}


def without_rounds(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not key.startswith("data.tasks")}


def train(out: Path, method: str, keys: dict[str, Any], **options: Any) -> vitfleet.Run:
    preset = {"data": {"name": "digits"}, "model": {"name": "vit", "dim": 32, "depth": 4, "heads": 4}}
    return vitfleet.train(preset, method=method, overrides=keys, out=out, **options)


def head_of(run: vitfleet.Run) -> dict[str, Tensor]:
    assert run.summary["total"]["failures"] == 0
    return {name: tensor for name, tensor in load_file(run.path / "model.safetensors").items() if name[:5] == "head."}


# The server's side, on features that are given


def method_of(net: Net, tasks: int, **keys: Any) -> Analytic:
    context = context_of(net)
    table = {"count": tasks, "classes": 1, "rounds_per_task": 2, "order": "common", "partitioned": True}
    data = {"data": {"name": "digits", "tasks": table}}
    config = from_tree({**data, "method": {"name": "analytic", **keys}, "model": {"weights": "digits"}})
    return Analytic(
        AnalyticParams(name="analytic", dtype="fp64", **keys),
        context.__class__(config, context.net, context.num_classes, context.device),
    )


@pytest.mark.parametrize("solver", ["ridge", "lda"])
@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("order", [[*range(CLASSES)], [*reversed(range(CLASSES))]], ids=["listed", "reversed"])
def test_the_head_after_all_tasks_is_that_of_all_images_at_once(
    order: list[int], clients: int, solver: str, tiny_net: Net
) -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(120, 16, generator=random, dtype=torch.float64) * 3 + 1
    labels, owners = (torch.randint(0, most, (120,), generator=random) for most in (CLASSES, clients))
    method = method_of(tiny_net, CLASSES, solver=solver)
    state = method.initial_state(tiny_net.initial_weights())
    for position, label in enumerate(order):
        for round in (2 * position + 1, 2 * position + 2):  # in the second one nobody has anything new
            aggregator = method.aggregator(state, round)
            for client in range(clients):
                if method.message_to_client(state, round, client, None) == Message():
                    own = (labels == label) & (owners == client)
                    aggregator.add(client, method.client_message(features[own], labels[own], {}))
            state = aggregator.finish()
    at_once = Sums.of(features, labels, CLASSES)
    stored = Sums.of_tensors(with_prefix(state.tensors, SUMS))
    for mine, theirs in zip(stored.tensors().values(), at_once.tensors().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    head, expected_head = (solve(sums, method.params).head.folded() for sums in (stored, at_once))
    torch.testing.assert_close(head.weight, expected_head.weight, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(head.bias, expected_head.bias, rtol=1e-9, atol=1e-9)
    expected = method.solve(at_once)
    for name, tensor in expected.items():
        torch.testing.assert_close(state.tensors[name], tensor)


def test_a_client_is_asked_once_in_every_task(tiny_net: Net) -> None:
    method = method_of(tiny_net, 2)
    features, labels = torch.randn(20, 16), torch.zeros(20, dtype=torch.long)
    sent = method.client_message(features, labels, {})

    def after(state: State, round: int) -> State:
        aggregator = method.aggregator(state, round)
        aggregator.add(0, sent)
        return aggregator.finish()

    first = after(method.initial_state(tiny_net.initial_weights()), 1)
    assert method.message_to_client(first, 2, 0, 1) != Message()
    with pytest.raises(RejectedUpdateError, match="were added before"):
        after(first, 2)
    assert method.message_to_client(first, 3, 0, 2) == Message(), "in the next task it is asked again"
    second = after(first, 3)
    assert float(with_prefix(second.tensors, SUMS)["counts"].sum()) == 40


# Runs


@pytest.mark.parametrize("solver", ["lda", "ridge"])
@pytest.mark.parametrize("partition", [{"kind": "dirichlet", "beta": 0.1}, {"kind": "iid"}], ids=["skewed", "iid"])
def test_a_run_ends_with_the_head_of_closed_form(partition: dict[str, Any], solver: str, tmp_path: Path) -> None:
    keys = {
        **KEYS,
        "data.partition": partition,
        "method.solver": solver,
        "method.features": "both",
        "method.dtype": "fp64",
    }
    run = train(tmp_path / "tasks", "analytic", {**keys, "seed": 3})
    at_once = train(tmp_path / "at once", "closed-form", {**without_rounds(keys), "rounds": 1})
    mine, theirs = head_of(run), head_of(at_once)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)  # a batch of other images: other last digits
    assert run.summary["continual"]["average_accuracy"] == pytest.approx(
        at_once.summary["accuracy"]["global"], abs=0.04
    )
    records = list(read_records(run.path))
    assert any(client.numbers["samples"] == 0 for client in records[0].clients) == (partition["kind"] != "iid")


def test_stacked_clients_and_a_resumed_run_end_with_the_same_head(tmp_path: Path) -> None:
    keys = {**KEYS, "data.tasks.rounds_per_task": 2, "fleet.per_round": 4}
    whole = train(tmp_path / "whole", "analytic", keys)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "interrupted", "analytic", keys, callbacks=[InterruptAfter(5)])
    resumed = vitfleet.load_run(tmp_path / "interrupted").resume()
    assert digest(resumed.path) == digest(whole.path)
    stacked = train(tmp_path / "stacked", "analytic", {**keys, "machine.stack_size": 3})
    torch.testing.assert_close(head_of(stacked), head_of(whole), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "reason"),
    [({"regularization": "held-out"}, "asks clients twice"), ({"name": "closed-form"}, "choose analytic")],
)
def test_what_cannot_be_solved_on_tasks_is_refused(method: dict[str, Any], reason: str) -> None:
    table = {"count": 5, "classes": 2, "order": "common", "partitioned": True}
    tree = {"data": {"name": "digits", "tasks": table}, "model": {"weights": "digits"}}
    with pytest.raises(ConfigError, match=reason):
        from_tree({**tree, "method": {"name": "analytic", **method}})
