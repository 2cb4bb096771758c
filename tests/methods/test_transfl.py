"""TransFL against autograd and means by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import MakeConfig, MakeContext, MakeFleet, MakeShard, MakeTrainer
from vitfleet.config import load_config
from vitfleet.config.schema import ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.errors import ConfigError
from vitfleet.fleet.base import Request
from vitfleet.message import Message, State
from vitfleet.methods import ClientRoundInput, MethodContext
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.averaging.layer_sharing import GradientMagnitude, MeasuredStep, head_magnitudes, top_k
from vitfleet.methods.averaging.transfl import TransFL, TransFLParams
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.randomness import Address, Purpose
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.driver import run_update
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for
from vitfleet.wire import encode

CPU = torch.device("cpu")


@pytest.fixture
def transfl(make_context: MakeContext) -> TransFL:
    return TransFL(TransFLParams(k=1), make_context(epochs=1, batch_size=8))


def test_g_is_the_mean_absolute_gradient_of_each_layer_averaged_over_the_steps(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    # A learning rate so small that every step's gradient is taken at (all but) the same weights.
    trainer = make_trainer(epochs=1, batch_size=10, optimizer="sgd", lr=1e-12, momentum=0.0, schedule="constant")
    shard = make_shard(0, 30)
    magnitude, weights = GradientMagnitude.of_model(tiny_net.parts), tiny_net.initial_weights()
    step, kept = MeasuredStep(magnitude), magnitude.zeros(CPU)
    training = LocalTraining(weights, tiny_net.parts.whole, 1, step, kept=kept)
    result = trainer.train(training, shard, RngContext(0, 1, 0))
    measured = result.kept["layers"] / result.steps

    order = Address(0, Purpose.ORDER, 1, 0, 0).generator().permutation(30)
    vit = tiny_net.module.vit
    expected = torch.zeros(2)
    for start in range(0, 30, 10):
        index = shard.index[order[start : start + 10]]
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        images = (shard.images.images[index].float() / 255 - 0.5) / 0.5
        logits = torch.func.functional_call(vit, leaves, images)
        F.cross_entropy(logits, shard.images.labels[index]).backward()  # type: ignore[no-untyped-call]
        for layer in range(2):
            gradient = torch.cat(
                [
                    leaf.grad.flatten()
                    for name, leaf in leaves.items()
                    if f"blocks.{layer}." in name and leaf.grad is not None
                ]
            )
            assert gradient.numel() == tiny_net.parts.count_parameters(tiny_net.parts.blocks[layer])
            expected[layer] += gradient.abs().mean() / 3
    torch.testing.assert_close(measured, expected, rtol=1e-5, atol=0)


def test_a_heads_gradient_is_that_of_its_rows_of_qkv_and_its_columns_of_the_projection() -> None:
    random = torch.Generator().manual_seed(0)
    qkv, projection = torch.randn(24, 8, generator=random), torch.randn(8, 8, generator=random)
    measured = head_magnitudes(qkv, projection, heads=4)
    for head in range(4):
        own = slice(2 * head, 2 * head + 2)  # two of the eight channels are this head's
        entries = [qkv[0:8][own], qkv[8:16][own], qkv[16:24][own], projection[:, own]]
        assert measured[head].item() == pytest.approx(torch.cat([e.flatten() for e in entries]).abs().mean().item())


def test_top_k_in_the_models_order() -> None:
    assert top_k([0.1, 0.9, 0.5, 0.7], 2) == [1, 3]
    assert top_k([1.0, 1.0, 1.0], 2) == [0, 1]
    assert top_k([0.3, 0.1], 2) == [0, 1]


def _message(net: Net, layers: list[int], value: float, samples: int) -> Message:
    chosen = net.parts.union(net.parts.non_blocks, *(net.parts.blocks[layer] for layer in layers))
    tensors = {name: torch.full(net.parts.shapes[name], value) for name in chosen}
    return Message(tensors, {"samples": samples, "loss": 1.0, "layers": layers})


def test_each_layer_is_averaged_over_those_who_sent_it(transfl: TransFL, tiny_net: Net) -> None:
    initial = tiny_net.initial_weights()
    server = transfl.initial_state(initial)
    gathering = transfl.aggregator(server, round=4)
    gathering.add(0, _message(tiny_net, [0], 1.0, samples=10))
    gathering.add(1, _message(tiny_net, [0], 4.0, samples=20))
    after = gathering.finish()
    for name in (*tiny_net.parts.non_blocks, *tiny_net.parts.blocks[0]):
        assert torch.equal(after.tensors[name], torch.full_like(initial[name], 3.0)), name
    for name in tiny_net.parts.blocks[1]:
        assert torch.equal(after.tensors[name], initial[name]), "nobody sent it"
    assert after.numbers["updated"] == [4, 0]

    gathering = transfl.aggregator(server, round=5)
    gathering.add(0, _message(tiny_net, [0], 1.0, samples=10))
    gathering.add(1, _message(tiny_net, [1], 4.0, samples=30))
    after = gathering.finish()
    for name, weight in after.tensors.items():
        wanted = 1.0 if name in tiny_net.parts.blocks[0] else 4.0 if name in tiny_net.parts.blocks[1] else 3.25
        assert torch.equal(weight, torch.full_like(weight, wanted)), name


def test_only_what_was_updated_since_goes_down(transfl: TransFL, tiny_net: Net) -> None:
    parts = tiny_net.parts
    server = State(tiny_net.initial_weights(), {"updated": [3, 5]})
    assert set(transfl.message_to_client(server, 6, 0, last_round=None).tensors) == set(parts.whole)
    assert set(transfl.message_to_client(server, 6, 0, last_round=5).tensors) == {*parts.non_blocks, *parts.blocks[1]}
    assert set(transfl.message_to_client(server, 6, 0, last_round=3).tensors) == set(parts.whole)
    assert set(transfl.message_to_client(server, 7, 0, last_round=6).tensors) == set(parts.non_blocks)


def _play(
    method: TransFL, net: Net, fleet_of: MakeFleet, trainer: object, shards: MakeShard
) -> tuple[Mapping[str, Tensor], list[State]]:
    fleet = fleet_of(method, trainer, lambda client: shards(20 * client, 20 * client + 20))
    server = method.initial_state(net.initial_weights())
    for round in (1, 2):
        gathering = method.aggregator(server, round)
        last_round = None if round == 1 else 1
        requests = [
            Request(round, client, method.message_to_client(server, round, client, last_round)) for client in (0, 1)
        ]
        for reply in fleet.train(requests):
            assert reply.message is not None
            gathering.add(reply.client, reply.message)
        server = gathering.finish()
        fleet.commit([0, 1])
    states = [fleet.client_state(client) for client in (0, 1)]
    assert states[0] is not None
    assert states[1] is not None
    return server.tensors, [states[0], states[1]]


def test_clients_that_never_select_a_layer_keep_their_own(
    make_context: MakeContext,
    tiny_net: Net,
    make_fleet: MakeFleet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitfleet.methods.averaging.layer_sharing.top_k", lambda magnitudes, k: [0])
    method = TransFL(TransFLParams(k=1), make_context(epochs=1, batch_size=8))
    server, (first, second) = _play(
        method, tiny_net, make_fleet, make_trainer(epochs=1, batch_size=8, lr=1e-2), make_shard
    )
    initial = tiny_net.initial_weights()
    matrices = [name for name in tiny_net.parts.blocks[1] if "weight" in name]
    for name in matrices:
        assert not torch.equal(first.tensors[name], second.tensors[name])
        assert not torch.equal(first.tensors[name], initial[name])
        assert torch.equal(server[name], initial[name])
    # and they are what a client's model is made of
    model = method.model_weights(State(server, {"updated": [2, 0]}), {}, first)
    assert torch.equal(model[matrices[0]], first.tensors[matrices[0]])
    assert torch.equal(model["head.weight"], server["head.weight"])


def test_k_of_all_layers_sends_what_fedavg_sends(
    make_context: MakeContext, tiny_net: Net, make_fleet: MakeFleet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    context = make_context(epochs=1, batch_size=8)
    weights = tiny_net.initial_weights()
    ups = []
    for method in (TransFL(TransFLParams(k=2), context), FedAvg(FedAvgParams(), context)):
        fleet = make_fleet(method, make_trainer(epochs=1, batch_size=8), lambda client: make_shard(0, 20))
        request = Request(1, 0, method.message_to_client(method.initial_state(weights), 1, 0, None))
        ups.append(next(fleet.train([request])).message)
    assert ups[0] is not None
    assert ups[1] is not None
    assert set(ups[0].tensors) == set(ups[1].tensors)
    for name, tensor in ups[0].tensors.items():
        assert torch.equal(tensor, ups[1].tensors[name]), name


def test_what_always_travels_is_a_choice(make_context: MakeContext, tiny_net: Net) -> None:
    method = TransFL(TransFLParams(k=1, always_send=("norm",)), make_context())
    assert method.sharing.always_sent == tiny_net.parts.norm


def test_a_client_without_images_sends_nothing(
    transfl: TransFL, tiny_net: Net, make_fleet: MakeFleet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    fleet = make_fleet(transfl, make_trainer(), lambda client: make_shard(0, 0))
    server = transfl.initial_state(tiny_net.initial_weights())
    reply = next(fleet.train([Request(1, 0, transfl.message_to_client(server, 1, 0, None))]))
    assert reply.message is not None
    assert not reply.message.tensors
    assert reply.message.numbers["samples"] == 0


def test_k_beyond_the_models_layers_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(ConfigError, match=r"method\.k = 3: must be between 1 and 2"):
        TransFL(TransFLParams(k=3), make_context())


def test_the_papers_message_sizes() -> None:
    config = load_config("transfl-cifar10")
    net = build_model(config.model, 10, 3, 32, seed=0)
    cpu = torch.device("cpu")
    context = MethodContext(config, net, 10, cpu)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    shard = Shard(ImageSet(pixels, torch.arange(4)), torch.arange(4))
    trainer = Trainer(
        net, preprocess_for(net, cpu), config.train, config.data.augment, 70, ExecutionSettings(cpu, bf16=False)
    )
    assert isinstance(config.method, TransFLParams)
    methods = (FedAvg(FedAvgParams(), context), 18.2002), (TransFL(config.method, context), 9.1621)
    for method, mebibytes in methods:
        down = method.message_to_client(method.initial_state(net.initial_weights()), 1, 0, None)
        answer = run_update(
            method.client_update(ClientRoundInput(1, 0, down, {}, None, shard)), trainer, shard, RngContext(0, 1, 0)
        )
        sent = encode(answer.message)
        payload = answer.message.num_bytes
        assert round(payload / 2**20, 4) == mebibytes
        assert payload < len(sent) < 1.001 * payload


def test_records_hold_g_and_the_selection(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(tiny_config("method.name=transfl", "method.k=1"), tmp_path)
    _, record = run_round(context, load_state(context), 1)
    for entry in record.clients:
        gradients, layers = entry.numbers["gradients"], entry.numbers["layers"]
        assert isinstance(gradients, list)
        assert isinstance(layers, list)
        assert len(gradients) == 2
        assert layers == [int(np.argmax(gradients))]
        heads = entry.numbers["head_gradients"]
        assert isinstance(heads, list)
        assert len(heads) == 2 * 2


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pit_ti_224", "levit_128s", "pvt_v2_b0"])
def test_g_is_measured_in_other_families_too(name: str) -> None:
    net = build_model(ModelConfig(name=name), 5, 3, 224, 0)
    gradients = {key: torch.ones(net.parts.shapes[key]) for key in net.parts.parameters}
    magnitude = GradientMagnitude.of_model(net.parts)
    seen = magnitude(gradients)
    torch.testing.assert_close(seen["layers"], torch.ones(net.parts.depth))
    # Their layers differ in heads, or keep them otherwise.
    assert seen.keys() == magnitude.zeros(CPU).keys() == {"layers"}
