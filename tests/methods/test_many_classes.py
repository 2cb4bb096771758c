"""Classes beyond 32,767 are stored and sent as they are: int16 would turn them into negative numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vitfleet.config.schema import AugmentConfig, Config, ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import State, label_dtype
from vitfleet.methods import ClientRoundInput, ClientUpdate, Method, MethodContext, make_method
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.driver import run_update
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.stacking.inputs import SERVER_CLIENT, RngContext
from vitfleet.training.trainer import Trainer, preprocess_for

CLASSES = 40_000
LABELS = (32_767, 32_768, 39_999, 5)
CPU = torch.device("cpu")
TASKS = {"count": 2, "classes": 2, "per_client": [2, 2], "rounds_per_task": 1, "scenario": "class"}


@pytest.fixture(scope="module")
def net() -> Net:
    return build_model(ModelConfig(dim=8, depth=2, heads=2, patch_size=4), CLASSES, 1, 8, seed=0)


@pytest.fixture(scope="module")
def shard() -> Shard:
    pixels = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Shard(ImageSet(pixels, torch.tensor(LABELS * 2)), torch.arange(8))


def method_of(net: Net, **table: Any) -> tuple[Method[Any], Trainer]:
    data = {} if table["name"] == "eftvit" else {"data": {"tasks": TASKS}}
    train = {"epochs": 2, "batch_size": 4}
    config = Config.model_validate({"method": table, "train": train, **data})
    trainer = Trainer(
        net, preprocess_for(net, CPU), config.train, AugmentConfig(), 2, ExecutionSettings(CPU, bf16=False)
    )
    return make_method(config.method, MethodContext(config, net, CLASSES, CPU)), trainer


def client_round(
    method: Method[Any], trainer: Trainer, shard: Shard, state: State | None = None, task_index: int = 0
) -> ClientUpdate:
    initial, round = trainer.net.initial_weights(), task_index + 1
    message = method.message_to_client(method.initial_state(initial), round, 0, None)
    job = ClientRoundInput(round, 0, message, method.initial_broadcast(initial).tensors, state, shard, task_index)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, round, 0))


def test_the_smallest_type_that_holds_every_class() -> None:
    assert label_dtype(10) == label_dtype(32_768) == torch.int16
    assert label_dtype(32_769) == torch.int32


@pytest.mark.parametrize("name", ["gem", "fedvit", "er", "der++"])
def test_stored_samples_keep_their_classes(name: str, net: Net, shard: Shard) -> None:
    """And the next task's steps compute losses of them."""
    method, trainer = method_of(net, name=name, stored_share=1.0)
    first = client_round(method, trainer, shard)
    assert first.client_state is not None
    stored = [tensor for key, tensor in first.client_state.tensors.items() if key.endswith("0000.labels")]
    assert len(stored) == 1
    assert sorted(stored[0].tolist()) == sorted(LABELS * 2)
    second = client_round(method, trainer, shard, first.client_state, task_index=1)
    loss = second.message.numbers["loss"]
    assert isinstance(loss, float)
    assert 0 < loss < 100


def test_knowledge_of_a_task_keeps_its_class(net: Net, shard: Shard) -> None:
    method, trainer = method_of(net, name="fedknow")
    highest = Shard(shard.images, torch.tensor([2, 6]))
    first = client_round(method, trainer, highest)
    assert first.client_state is not None
    (label,) = (tensor for key, tensor in first.client_state.tensors.items() if key.endswith(".label"))
    assert int(label) == 39_999
    assert client_round(method, trainer, shard, first.client_state, task_index=1).model_weights


def test_features_are_sent_with_their_classes_and_the_server_accepts_them(net: Net, shard: Shard) -> None:
    method, trainer = method_of(net, name="eftvit", local_layers=1)
    update = client_round(method, trainer, shard)
    assert sorted(set(update.message.tensors["labels"].tolist())) == sorted(LABELS)
    server = method.initial_state(net.initial_weights())
    aggregator = method.aggregator(server, 1)
    aggregator.add(0, update.message)
    state = aggregator.finish()
    (part,) = state.parts.values()
    assert torch.equal(part.tensors["labels"], update.message.tensors["labels"])
    no_images = Shard(shard.images, torch.empty(0, dtype=torch.long))
    trained = run_update(method.server_update(state, 1), trainer, no_images, RngContext(0, 1, SERVER_CLIENT))
    assert not torch.equal(trained.tensors["head.weight"], state.tensors["head.weight"])
    wrong = {**update.message.tensors, "labels": update.message.tensors["labels"].to(torch.int16)}
    with pytest.raises(RejectedUpdateError, match=r"type torch\.int16 and .*; expected: torch\.int32, \(8,\)"):
        method.aggregator(server, 1).add(0, replace(update.message, tensors=wrong))
