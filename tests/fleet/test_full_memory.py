"""A method's own tensors that do not fit in a GPU's memory: fewer clients at a time, without captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import MakeTrainer
from vitfleet.data.images import ImageSet, Shard
from vitfleet.fleet import client_runtime
from vitfleet.fleet.base import Request
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.message import Message
from vitfleet.methods.base import ClientUpdate
from vitfleet.training.capture.cache import RunnerCache
from vitfleet.training.driver import PendingUpdate
from vitfleet.training.stacking.inputs import RngContext


class LimitedMemory:
    """Replaces the training of clients together: more than ``fitting`` clients do not fit in memory."""

    def __init__(self, fitting: int, error: Exception | None = None) -> None:
        self.fitting = fitting
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.sizes: list[int] = []

    def run(self, updates: Sequence[PendingUpdate[ClientUpdate]], trainer: object) -> list[ClientUpdate]:
        self.sizes.append(len(updates))
        if len(updates) > self.fitting:
            raise self.error
        return [next(pending.update) for pending in updates]  # type: ignore[misc]


@pytest.fixture
def runtime(make_trainer: MakeTrainer) -> ClientRuntime:
    method: Any = SimpleNamespace(to_wire=lambda message: message)
    return ClientRuntime(method, make_trainer(), 0, lambda weights, tasks: [])


def train(runtime: ClientRuntime, images: ImageSet, num_clients: int) -> list[int]:
    """Train some clients; return the client of each reply."""

    def pending_update(request: Request) -> PendingUpdate[Any]:
        update = ClientUpdate(Message(numbers={"loss": 0.5, "client": request.client}), {}, None)
        shard = Shard(images, torch.arange(2))
        return PendingUpdate(iter([update]), shard, RngContext(0, request.round, request.client))  # type: ignore[arg-type]

    requests = [Request(1, client, Message()) for client in range(num_clients)]
    replies = [reply for reply, _ in runtime.train(requests, pending_update)]
    assert all(reply.message is not None and reply.message.numbers["client"] == reply.client for reply in replies)
    return [reply.client for reply in replies]


def test_half_of_the_clients_are_trained_at_a_time(
    runtime: ClientRuntime, tiny_images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = LimitedMemory(fitting=2)
    monkeypatch.setattr(client_runtime, "run_updates", memory.run)
    assert train(runtime, tiny_images, 7) == list(range(7))
    assert memory.sizes == [7, 4, 2, 2, 2, 1], "the number that fits is remembered"
    assert train(runtime, tiny_images, 5) == list(range(5))
    assert memory.sizes[6:] == [2, 2, 1], "in later rounds too"


def test_captured_steps_are_dropped_before_a_single_client_fails(
    runtime: ClientRuntime, tiny_images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[RunnerCache] = []
    monkeypatch.setattr(RunnerCache, "num_graphs", property(lambda self: 0 if dropped else 3))
    monkeypatch.setattr(RunnerCache, "clear", lambda self: dropped.append(self))
    memory = LimitedMemory(fitting=0)
    monkeypatch.setattr(client_runtime, "run_updates", memory.run)
    with pytest.raises(torch.OutOfMemoryError):
        train(runtime, tiny_images, 1)
    assert memory.sizes == [1, 1], "with captured steps, and without them"
    assert len(dropped) == 1


def test_other_errors_are_raised_at_once(
    runtime: ClientRuntime, tiny_images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = LimitedMemory(fitting=0, error=RuntimeError("shape mismatch"))
    monkeypatch.setattr(client_runtime, "run_updates", memory.run)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        train(runtime, tiny_images, 4)
    assert memory.sizes == [4]
