"""Training on features: captured once whatever their number, and reported in the summary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import MachineConfig
from vitfleet.data.features import Features, FeatureSet
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.execution.settings import normalize_device, resolve_machine_config, set_up_execution
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import SERVER_CLIENT, ClientTraining, RngContext
from vitfleet.training.step import StepView


def server_step(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, split=1)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_servers_step_is_captured_once_whatever_the_number_of_features(
    on_device: bool,
    dropout: float,
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    tokens = tiny_net.num_patches + tiny_net.num_prefix_tokens
    server = tiny_net.parts.union(*tiny_net.parts.blocks[1:], tiny_net.parts.norm, tiny_net.parts.head)
    parts: list[Features] = []
    for round in range(1, 6):
        values = torch.randn(7 * round, tokens, tiny_net.embed_dim).bfloat16()
        parts = [*parts, Features(values, torch.randint(0, 5, (len(values),)).to(torch.int16))]
        features = FeatureSet(parts, on_device, equal_clients=True, token_dropout=dropout)
        training = LocalTraining(tiny_net.initial_weights(), server, 2, server_step, features=features)
        rng = RngContext(0, round, SERVER_CLIENT)
        result, expected = (trainer.train(training, make_shard(0, 0), rng) for trainer in (graphed, eager))
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(result.weights[name], tensor)
        torch.testing.assert_close(result.loss, expected.loss)
    assert len(captured) == 1
    summary = replace(graphed).execution_summary()
    assert (summary.clients, summary.server) == ("none", "mixed"), "both trainers share the cache"
    assert str(summary).startswith("clients none, server mixed")


def recording_step(view: StepView, batch: Samples) -> Tensors:
    """Record which samples were seen, in a tensor that is as large as the client's recording."""
    view.keep(view.map(record, view.kept, batch))
    return view.grad(cross_entropy, batch)


def record(kept: Tensors, batch: Samples) -> Tensors:
    rows = torch.where(batch.sample_weight > 0, batch.positions, kept["seen"].shape[0] - 1)
    kept["seen"].index_put_((rows,), torch.ones_like(rows, dtype=torch.float32))
    return kept


@pytest.mark.parametrize("clients", [1, 2])
def test_captured_step_serves_smaller_kept_tensors(
    clients: int, tiny_net: Net, captured: list[CudaGraphRunner], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    weights = tiny_net.initial_weights()

    def train(rows: int) -> int:
        training = LocalTraining(weights, tiny_net.parts.whole, 1, recording_step, kept={"seen": torch.zeros(rows)})
        group = [ClientTraining(training, make_shard(0, 20), RngContext(7, 1, client)) for client in range(clients)]
        for result in graphed.train_together(group):
            assert result.kept["seen"].shape == (rows,)
            assert result.kept["seen"][:20].all()
            assert not result.kept["seen"][20:-1].any(), "nothing is left of the training before"
        return len(captured)

    assert train(64) == 1
    assert train(30) == 1
    assert train(64) == 1
    assert train(65) == 2
    assert train(40) == 2


def test_a_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert normalize_device(torch.device("cuda")) == torch.device("cuda:3")
    assert normalize_device(torch.device("cuda:1")) == torch.device("cuda:1")
    assert normalize_device(torch.device("cpu")) == torch.device("cpu")


def test_a_device_that_was_chosen_without_an_index_is_recorded_without_it() -> None:
    machine = set_up_execution(MachineConfig(device="cpu"))
    gpu = replace(machine, device=torch.device("cuda:0"))
    for device, recorded in (("auto", "cuda"), ("cuda", "cuda"), ("cuda:0", "cuda:0")):
        assert resolve_machine_config(MachineConfig(device=device), gpu).device == recorded
