"""`eval.body`: clients are evaluated with the body as they trained it, or with the server's; checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitfleet.config import load_config
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

MODEL = ("model.dim=16", "model.depth=2", "model.heads=2", "model.patch_size=4", "machine.device=cpu")


def tasks(*overrides: str) -> Config:
    keys = "data.tasks.rounds_per_task=2", "data.tasks.count=2", "train.epochs=2", "fleet.clients=4", "data.limit=800"
    return load_config("fedvit-digits", [*MODEL, *keys, "fleet.per_round=2", *overrides])


def model_by_hand(context: RunContext, state: RunState, client: int) -> Tensors:
    """Return the server's tensors with the head of the client's own, or with the initial head."""
    client_state = context.fleet.client_state(client)
    head = context.net.initial_weights() if client_state is None else client_state.tensors
    return {**{name: head[name] for name in context.net.parts.head}, **state.server.tensors}


def accuracy_by_hand(context: RunContext, weights: Tensors, client: int, task_index: int) -> float:
    evaluator, correct = context.evaluator, 0
    assert evaluator.class_to_task is not None
    indices = evaluator.client_indices.for_client(client, task_index).tolist()
    for image in indices:
        pixels, label = context.data.test.images[image : image + 1], int(context.data.test.labels[image])
        logits = context.net(weights, context.trainer.preprocess(pixels))[0]
        rivals = torch.nonzero(evaluator.class_to_task == evaluator.class_to_task[label]).flatten()
        correct += int(rivals[logits[rivals].argmax()]) == label
    return correct / len(indices)


@pytest.mark.parametrize(
    "keys", [("method.name=fedvit",), ("method.name=fedper",), ("method.name=gem", "method.heads=shared")], ids=str
)
def test_after_a_task_every_client_is_evaluated_with_the_servers_body(keys: tuple[str, ...], tmp_path: Path) -> None:
    context = open_run(tasks("eval.body=aggregated", *keys), tmp_path / "aggregated")
    state = run_rounds(context).state
    for client in range(4):
        weights = model_by_hand(context, state, client)
        if "method.heads=shared" in keys:
            assert all(torch.equal(weights[name], tensor) for name, tensor in state.server.tensors.items())
        for task_index in (0, 1):
            found = state.task_records[-1].matrix[client][task_index]
            assert found == pytest.approx(accuracy_by_hand(context, weights, client, task_index))
    own_context = open_run(tasks(*keys), tmp_path / "own")
    own = run_rounds(own_context).state
    assert own.task_records[-1].matrix != state.task_records[-1].matrix
    for name, tensor in state.server.tensors.items():
        assert torch.equal(tensor, own.server.tensors[name]), "what is trained does not depend on what is evaluated"


def test_without_tasks_the_global_evaluation_uses_the_servers_body(tmp_path: Path) -> None:
    """FedPer on digits: the mean over clients of the server's body with each client's head."""
    for body in ("own", "aggregated"):
        keys = "method.name=fedper", "data.limit=300", "fleet.clients=3", "fleet.per_round=2", "rounds=2"
        context = open_run(load_config("digits", [*MODEL, *keys, f"eval.body={body}"]), tmp_path / body)
        state = load_state(context)
        for round in (1, 2):
            state, record = run_round(context, state, round)
        accuracies = []
        for client in range(3):
            client_state = context.fleet.client_state(client)
            weights = model_by_hand(context, state, client)
            if body == "own" and client_state is not None:
                weights = {name: client_state.tensors[name] for name in context.net.parts.whole}
            images, labels = context.data.test.images, context.data.test.labels
            predicted = context.net(weights, context.trainer.preprocess(images)).argmax(dim=1)
            accuracies.append(float((predicted == labels).double().mean()))
        assert record.accuracy is not None
        assert record.accuracy.global_ == pytest.approx(sum(accuracies) / 3)


@pytest.mark.parametrize("method", ["fedavg", "standalone", "transfl"])
def test_methods_without_a_shared_body_refuse_it(method: str) -> None:
    with pytest.raises(UserError, match=rf"eval\.body = 'aggregated': must be own: with {method} no client has"):
        load_config("digits", [f"method.name={method}", "eval.body=aggregated"])


def test_methods_declare_that_they_share_a_body() -> None:
    sharing = {entry.name for entry in METHODS if entry.target.shares_body}
    assert {"fedper", "fedrep", "gem", "a-gem", "fedvit"} <= sharing
    assert not sharing & {"fedavg", "fedprox", "standalone", "eftvit", "transfl"}
