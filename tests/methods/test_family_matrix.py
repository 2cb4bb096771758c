"""Every model family under every method: one round on random images, stacked and one client after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import context_of
from family_configs import IMAGE_SIZE, TINY_FAMILIES, WITH_BATCH_NORM
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import State, Tensors
from vitfleet.methods.base import ClientRoundInput, ClientUpdate, Method, adapt_model, make_method
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.models.zoo import build_model
from vitfleet.training.driver import PendingUpdate, run_updates
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for
from vitfleet.wire import encode, encoded_size

CPU = torch.device("cpu")
CLASSES, SEED = 4, 3
SHARDS = ((0, 7), (5, 8))  # the last batches are not full, and one client has fewer steps
TRAIN = TrainConfig(epochs=2, batch_size=4, lr=1e-2, schedule="constant")
PARAMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "transfl": {"k": 1},
    "fed-head": {},
    "fed-bias": {},
    "fed-lora": {"rank": 1},
    "fedvit": {"stored_share": 0.5, "k": 1, "head_epochs": 0, "integrate": "all"},
    "fedknow": {"kept_share": 0.5, "k": 1},
    "bcn": {"stored_share": 0.5},
    "ewc": {"penalty_weight": 1.0},
}
CONTINUAL = ("fedvit", "fedknow", "bcn", "ewc")
INTEGRATED = ("fedvit", "fedknow")
# One method per family by default, and those whose references see running statistics; all of them with `-m long`.
DIAGONAL = {
    "vit": "fedvit",
    "deit": "transfl",
    "cait": "fed-lora",
    "cvt": "fedvit",
    "levit": "ewc",
    "pvt": "transfl",
    "pit": "fed-bias",
    "swin": "fedavg",
    "t2t": "fed-head",
}
DEFAULT = {*DIAGONAL.items(), ("levit", "fedknow"), ("levit", "bcn")}
CASES = [
    pytest.param(family, method, marks=() if (family, method) in DEFAULT else pytest.mark.long)
    for family in TINY_FAMILIES
    for method in PARAMS
]


class Fleet:
    """A method, a family and two clients with random images."""

    def __init__(self, family: str, method: str) -> None:
        values = {**PARAMS[method]}
        if (family, method) == ("levit", "fed-lora"):
            values["targets"] = ("proj", "fc1")
        params = METHODS.make_params(method, **values)
        config = TINY_FAMILIES[family]
        self.net = build_model(config, CLASSES, 1, IMAGE_SIZE, SEED, lambda vit: adapt_model(params, vit))
        self.net.module.double()
        tasks = 2 if method in CONTINUAL else 1
        context = context_of(self.net, TRAIN, num_classes=CLASSES, rounds=2, num_tasks=tasks, seed=SEED)
        self.method: Method[Any] = make_method(params, context)
        preprocess = preprocess_for(self.net, CPU)
        exact = Preprocess(preprocess.image_size, preprocess.mean.double(), preprocess.std.double())
        self.trainer = Trainer(self.net, exact, TRAIN, AugmentConfig(), 2, ExecutionSettings(CPU, False))
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randint(0, 256, (12, 1, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)
        # The second task has other labels for the same images, so that its gradients oppose those of the first.
        self.images = [ImageSet(pixels, (torch.arange(12) + task) % CLASSES) for task in range(tasks)]
        # Far from the initial weights: some of them are zero and would hide what passes through them.
        self.weights = {
            name: (tensor + 0.1 * torch.rand(tensor.shape, generator=generator)).double()
            for name, tensor in self.net.initial_weights().items()
        }

    def jobs(self, server: State, round: int, states: list[State | None], task: int) -> list[ClientRoundInput]:
        base = self.method.initial_broadcast(self.weights).tensors
        return [
            ClientRoundInput(
                round,
                client,
                self.method.message_to_client(server, round, client, None if states[client] is None else round - 1),
                base,
                states[client],
                Shard(self.images[task], torch.arange(start, stop)),
                task,
            )
            for client, (start, stop) in enumerate(SHARDS)
        ]

    def pending(self, job: ClientRoundInput) -> PendingUpdate[ClientUpdate]:
        return PendingUpdate(self.method.client_update(job), job.shard, RngContext(SEED, job.round, job.client))

    def aggregate(self, server: State, updates: list[ClientUpdate], round: int) -> State:
        aggregator = self.method.aggregator(server, round)
        for client, update in enumerate(updates):
            aggregator.add(client, update.message)
        return aggregator.finish()


def assert_close(actual: Tensors, expected: Tensors) -> None:
    """Compare tensors in float64: rounding errors are far below the tolerance, even where AdamW scales them up."""
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-8, atol=1e-9, msg=name)


def kept_tensors(update: ClientUpdate) -> Tensors:
    """Return what the client keeps: its head, stored samples or weights of earlier tasks."""
    return {} if update.client_state is None else update.client_state.tensors


def sent_selection(net: Net, method: str, update: ClientUpdate) -> Selection:
    """Return what a client must have sent, by the definition of the method."""
    parts = net.parts
    if method == "transfl":
        layers = update.message.numbers["layers"]
        assert isinstance(layers, list)
        return parts.union(parts.non_blocks, *(parts.blocks[int(layer)] for layer in layers))
    return {
        "fedavg": parts.whole,
        "fed-head": parts.head,
        "fed-bias": parts.union(parts.biases, parts.head),
        "fed-lora": parts.union(parts.lora, parts.head),
        **dict.fromkeys(CONTINUAL, parts.body),
    }[method]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_family_under_method(family: str, method: str) -> None:
    fleet = Fleet(family, method)
    net, parts = fleet.net, fleet.net.parts
    server = fleet.method.initial_state(fleet.weights)
    states: list[State | None] = [None, None]
    for round in range(1, 3 if method in CONTINUAL else 2):
        jobs = fleet.jobs(server, round, states, task=round - 1)
        together = run_updates([fleet.pending(job) for job in jobs], fleet.trainer)
        alone = [run_updates([fleet.pending(job)], fleet.trainer)[0] for job in jobs]
        for update, single in zip(together, alone, strict=True):
            assert_close(update.message.tensors, single.message.tensors)
            assert_close(update.model_weights, single.model_weights)
            assert_close(kept_tensors(update), kept_tensors(single))
            loss = update.message.numbers["loss"]
            assert isinstance(loss, float)
            assert 0 < loss < 20
        check_selection(net, fleet, method, together)
        server = fleet.aggregate(server, together, round)
        states = [update.client_state for update in together]
    if method in INTEGRATED:
        assert all(update.message.numbers["rotated"] for update in together), "references have to matter"
    assert fleet.trainer.execution_summary().largest_stack == 2
    assert all(torch.isfinite(tensor).all() for tensor in server.tensors.values())
    assert set(parts.parameters) >= set(parts.trainable(parts.whole))


def check_selection(net: Net, fleet: Fleet, method: str, updates: list[ClientUpdate]) -> None:
    """What is selected changes and is what the message holds; what is not selected stays."""
    trained = set(fleet.method.trainable)
    for update in updates:
        selection = sent_selection(net, method, update)
        message = update.message
        assert set(message.tensors) == set(selection)
        tensor_bytes = sum(8 * tensor.numel() for tensor in message.tensors.values())
        assert encoded_size(message) == len(encode(message))
        assert encoded_size(replace(message, tensors={})) + tensor_bytes <= encoded_size(message)
        for name, tensor in update.model_weights.items():
            if name not in trained:
                assert torch.equal(tensor, fleet.weights[name]), name
        changed = [name for name in trained if not torch.equal(update.model_weights[name], fleet.weights[name])]
        # A head that reads one token only, or a bias that a softmax cancels, may leave single weights without gradient.
        assert len(changed) >= 0.9 * len(trained), sorted(trained - set(changed))


@pytest.mark.parametrize("family", WITH_BATCH_NORM)
def test_running_statistics_are_averaged_by_samples(family: str) -> None:
    fleet = Fleet(family, "fedavg")
    server = fleet.method.initial_state(fleet.weights)
    updates = run_updates([fleet.pending(job) for job in fleet.jobs(server, 1, [None, None], 0)], fleet.trainer)
    after = fleet.aggregate(server, updates, 1).tensors
    statistics = [name for name in after if "running_" in name]
    assert statistics
    for name in statistics:
        first, second = (update.message.tensors[name] for update in updates)
        assert not torch.equal(first, fleet.weights[name])
        torch.testing.assert_close(after[name], (7 * first + 3 * second) / 10)


@pytest.mark.parametrize("family", WITH_BATCH_NORM)
def test_a_client_without_images_changes_no_statistics(family: str) -> None:
    fleet = Fleet(family, "fedavg")
    server = fleet.method.initial_state(fleet.weights)
    job = replace(fleet.jobs(server, 1, [None, None], 0)[0], shard=Shard(fleet.images[0], torch.arange(0)))
    update = run_updates([fleet.pending(job)], fleet.trainer)[0]
    assert not update.message.tensors
    assert all(torch.equal(tensor, fleet.weights[name]) for name, tensor in update.model_weights.items())


def test_frozen_batch_norms_use_and_keep_their_running_statistics() -> None:
    """With the body frozen, its statistics decide the features: images far from them do not change it."""
    fleet = Fleet("levit", "fed-head")
    server = fleet.method.initial_state(fleet.weights)
    updates = run_updates([fleet.pending(job) for job in fleet.jobs(server, 1, [None, None], 0)], fleet.trainer)
    for update in updates:
        head = [name for name in update.message.tensors if "running_" in name]
        assert head == ["head.bn.running_mean", "head.bn.running_var"]
        assert all(not torch.equal(update.message.tensors[name], fleet.weights[name]) for name in head)
