"""Which captured steps are kept; CUDA graphs are emulated on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from conftest import MakeShard, MakeTrainer
from vitfleet.models.net import Net
from vitfleet.training.capture import cache as runner_cache
from vitfleet.training.capture.cache import RunnerCache
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.inputs import ClientTraining, RngContext


@pytest.fixture
def runners() -> RunnerCache:
    return RunnerCache()


@pytest.fixture
def train(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, runners: RunnerCache
) -> Callable[[int], None]:
    """Train a number of clients with captured steps: one step, of a shape of its own for every number."""
    trainer = make_trainer(batch_size=8)
    graphed = replace(trainer, runners=runners, machine=replace(trainer.machine, graphs=True))
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1)

    def train_clients(num_clients: int) -> None:
        group = [ClientTraining(training, make_shard(0, 8), RngContext(0, 1, client)) for client in range(num_clients)]
        graphed.train_together(group)

    return train_clients


def test_graphs_of_one_stream_are_destroyed_together(
    captured: list[CudaGraphRunner],
    train: Callable[[int], None],
    runners: RunnerCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Destroying one frees the cuBLAS workspace of the others that were captured on its stream."""
    monkeypatch.setattr(runner_cache, "MAX_RUNNERS", 2)
    monkeypatch.setattr(runner_cache, "MAX_GRAPHS", 4)
    graphs: list[weakref.ref[object]] = []

    def existing_graphs(num_clients: int) -> list[bool]:
        """Capture a step of so many clients; return which of all graphs exist."""
        train(num_clients)
        (graph,) = captured.pop().graphs.values()
        graphs.append(weakref.ref(graph))
        del graph
        gc.collect()  # an emulated graph refers to its runner
        return [graph() is not None for graph in graphs]

    assert [existing_graphs(clients) for clients in (2, 3, 4, 5)][-1] == [True] * 4, "those of dropped runners are kept"
    assert runners.num_graphs == 4
    assert existing_graphs(6) == [False] * 4 + [True]
    assert runners.num_graphs == 1


def test_captured_steps_take_a_limited_part_of_the_memory(
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    train: Callable[[int], None],
    runners: RunnerCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors of the least recently used ones are freed; those of the group in training never are."""
    weight_bytes = sum(tensor.nbytes for tensor in tiny_net.initial_weights().values())
    train(2)
    assert runners.num_bytes >= 2 * 3 * weight_bytes, "weights and two moments of two clients"
    assert runners.num_bytes == pytest.approx(2 * 3 * weight_bytes, rel=0.1)
    of_two = runners.num_bytes
    monkeypatch.setattr(runner_cache, "captured_bytes_limit", lambda device: 3.1 * of_two)
    train(3)
    assert runners.num_bytes == pytest.approx(2.5 * of_two, rel=0.1)
    train(2)  # used again: now three clients are the least recently used
    train(4)
    assert runners.num_bytes == pytest.approx(3 * of_two, rel=0.1), "of two and of four clients"
    assert len(captured) == 3
    train(2)
    assert len(captured) == 3, "still there"
    monkeypatch.setattr(runner_cache, "captured_bytes_limit", lambda device: 1.0)
    train(5)
    assert runners.num_bytes == pytest.approx(2.5 * of_two, rel=0.1)
    assert runners.num_graphs == 4, "graphs are kept"
