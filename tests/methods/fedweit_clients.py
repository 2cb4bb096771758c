"""A client of FedWEIT that takes part in rounds, for the tests of its two halves."""

from __future__ import annotations

import torch
from by_hand import PLAIN_SGD
from torch import Tensor

from conftest import MakeContext
from vitfleet.data.images import Shard
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.fedweit import ClientTasks, FedWeit, FedWeitParams
from vitfleet.methods.continual.sparse_weights import SparseVector
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

CLASS_TASKS = torch.tensor([0, 0, 1, 1, 1])
SETTINGS = FedWeitParams(sparsity_weight=0.01, drift_weight=0.5)


def make_fedweit(make_context: MakeContext) -> FedWeit:
    """Return FedWEIT in a run of five tasks of two rounds."""
    return FedWeit(SETTINGS, make_context(num_tasks=5, epochs=2, **PLAIN_SGD))


def update_of(
    method: FedWeit,
    trainer: Trainer,
    shard: Shard,
    message: Message,
    base: Tensors,
    state: State | None = None,
    round: int = 1,
) -> ClientUpdate:
    """Run a client's round."""
    job = ClientRoundInput(round, 0, message, base, state, shard, method.task_of(round))
    return run_update(method.client_update(job), trainer, shard, RngContext(0, round, 0))


def tasks_of(method: FedWeit, update: ClientUpdate) -> ClientTasks:
    assert update.client_state is not None
    return ClientTasks.of_state(update.client_state, method.parts.whole)


def random_sparse(method: FedWeit, seed: int, kept: int = 300) -> SparseVector:
    random = torch.Generator().manual_seed(seed)
    length = sum(shape.numel() for shape in method.shapes.values())
    indices = torch.randperm(length, generator=random)[:kept].sort().values
    return SparseVector(torch.randn(kept, generator=random), indices.int())


def sigmoid(value: Tensor) -> Tensor:
    return 1 / (1 + (-value).exp())
