"""What the keys of FEDBFPT that are not in its paper change: head rounds, kept layers, centred features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, close
from torch import Tensor
from torch.func import functional_call

from conftest import CLASSES, SIDE, MakeConfig, MakeContext, MakeShard, MakeTrainer, context_of
from vitfleet.config import load_config
from vitfleet.config.schema import ModelConfig
from vitfleet.costs.report import cost_reports
from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.methods import ClientRoundInput
from vitfleet.methods.tuning.fedbfpt import FeatureMeanStep, FedBfpt, FedBfptParams, ShallowStep
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.wire import encoded_size

DEPTH = 4
ONE_TASK = torch.zeros(CLASSES, dtype=torch.long)
CENTERED = ("method.name=fedbfpt", "method.local_layers=2", "model.depth=3", "method.center_features=true")


def net_of(depth: int) -> Net:
    return build_model(ModelConfig(dim=16, depth=depth, heads=2, patch_size=4), CLASSES, 1, SIDE, seed=0)


@pytest.fixture
def tiny_net() -> Net:
    """Return a model with enough layers to leave some out."""
    return net_of(DEPTH)


def changed(before: Tensors, after: Tensors) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def class_tokens(net: Net, weights: Tensors, pixels: Tensor) -> Tensor:
    """Return the features that enter the head, computed by timm's own module."""
    vit = net.module.vit
    outputs: Tensor = functional_call(
        _Features(vit),
        {f"vit.{name}": tensor for name, tensor in weights.items()},
        ((pixels.float() / 255 - 0.5) / 0.5,),
    )
    return outputs.detach()


class _Features(torch.nn.Module):
    def __init__(self, vit: torch.nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        vit = self.vit
        features: Tensor = vit.forward_head(vit.forward_features(images), pre_logits=True)  # type: ignore[operator]
        return features


# head_rounds


def test_head_rounds_train_and_send_the_head_alone_then_the_layers(tiny_config: MakeConfig, tmp_path: Path) -> None:
    keys = ("method.name=fedbfpt", "method.local_layers=2", "model.depth=3", "rounds=4", "method.head_rounds=2")
    context = open_run(tiny_config(*keys, "fleet.per_round=6"), tmp_path)
    state, parts = load_state(context), context.net.parts
    head_bytes = sum(4 * parts.shapes[name].numel() for name in parts.head)
    block_bytes = sum(4 * parts.shapes[name].numel() for name in parts.blocks[0])
    for round, layer in ((1, None), (2, None), (3, 0), (4, 1)):
        before = dict(state.server.tensors)
        sent = context.method.message_to_client(state.server, round, 0, None)
        state, record = run_round(context, state, round)
        may = {*parts.head, *(() if layer is None else parts.blocks[layer])}
        moved = changed(before, state.server.tensors)
        assert moved <= may
        assert len(moved) >= len(may) - 1  # the keys' bias has no gradient by nature
        for entry in record.clients:
            assert entry.numbers.get("layer") == layer
            payload = head_bytes + (0 if layer is None else block_bytes)
            assert payload < entry.up_bytes < payload + 2500  # names and numbers
            if round > 1:  # in the first round a client also gets the initial model
                assert entry.down_bytes == encoded_size(sent)
        blocks = () if layer is None else parts.blocks[: layer + 1]
        assert set(sent.tensors) == set(parts.union(*blocks, parts.head))


def test_a_head_round_is_a_round_of_head_tuning(tiny_config: MakeConfig, tmp_path: Path) -> None:
    heads, gflops = [], []
    for keys in (("method.name=fed-head",), ("method.name=fedbfpt", "method.local_layers=2", "method.head_rounds=1")):
        context = open_run(tiny_config("model.depth=3", *keys), tmp_path / keys[0])
        state, record = run_round(context, load_state(context), 1)
        heads.append(context.net.parts.head.take(state.server.tensors))
        gflops.append([entry.gflops for entry in record.clients])
    assert not changed(*heads)
    assert gflops[0] == gflops[1]


def test_the_cost_report_states_a_round_that_trains_a_layer() -> None:
    keys = ["method.name=fedbfpt", "method.local_layers=3"]
    (plain,) = cost_reports(load_config("digits", keys), ["fedbfpt"])
    (warmed_up,) = cost_reports(load_config("digits", [*keys, "method.head_rounds=2"]), ["fedbfpt"])
    assert warmed_up == plain


# keep_last


@pytest.mark.parametrize(("local_layers", "keep_last"), [(6, 1), (6, 2), (6, 5), (12, 3)])
def test_kept_layers_end_every_route_and_are_never_trained(local_layers: int, keep_last: int) -> None:
    method = FedBfpt(FedBfptParams(local_layers=local_layers, keep_last=keep_last), context_of(net_of(12), rounds=200))
    trained = local_layers - keep_last
    layers = [layer for layer in method.schedule if layer is not None]
    assert sorted(set(layers)) == list(range(min(trained, max(layers) + 1)))
    assert max(layers) < trained
    for layer in set(layers):
        seen = set()
        for client in range(150):
            route = method.sample_layers(layer, 3, client)
            assert len(route) == local_layers
            assert route[: layer + 1] == tuple(range(layer + 1))
            assert route[-keep_last:] == tuple(range(12 - keep_last, 12))
            sampled = route[layer + 1 : local_layers - keep_last]
            assert list(sampled) == sorted(sampled)
            seen |= set(sampled)
        assert seen == (set(range(layer + 1, 12 - keep_last)) if layer < trained - 1 else set())


# center_features


def test_a_centred_round_as_by_hand(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Centre the shallow model, train it with plain SGD, centre the whole model: timm's modules, plain means."""
    keys = {"epochs": 2, **PLAIN_SGD}
    params = FedBfptParams(local_layers=3, keep_last=1, center_features=True)
    method, trainer, shard = FedBfpt(params, make_context(**keys)), make_trainer(**keys), make_shard(0, 10)
    initial = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in tiny_net.initial_weights().items()}
    state = method.initial_state(initial)
    base, down = method.initial_broadcast(initial).tensors, method.message_to_client(state, 1, 0, None)
    update = run_update(
        method.client_update(ClientRoundInput(1, 0, down, base, None, shard)), trainer, shard, RngContext(0, 1, 0)
    )

    pixels, shallow_net = shard.images.images[shard.index], net_of(3)
    route = method.sample_layers(0, 1, 0)
    local = dict(method.shallow_weights(initial, route))
    assert class_tokens(shallow_net, local, pixels).mean(0).abs().max() > 0.05
    local["norm.bias"] = initial["norm.bias"] - class_tokens(shallow_net, local, pixels).mean(0)
    assert class_tokens(shallow_net, local, pixels).mean(0).abs().max() < 1e-5
    parts = tiny_net.parts
    trained = [*parts.blocks[0], *parts.head]
    hand = Hand(shallow_net, ONE_TASK, shard, round=1, epoch=1)  # the first epoch measured the mean
    after = hand.train(local, trained, 2)
    whole = {**initial, **{name: after[name] for name in trained}}
    whole["norm.bias"] = initial["norm.bias"] - class_tokens(tiny_net, whole, pixels).mean(0)
    assert set(update.message.tensors) == {*trained, "norm.bias"}
    close(update.model_weights, whole)
    assert (update.message.tensors["norm.bias"] - local["norm.bias"]).abs().max() > 1e-3  # two models, two means


def test_the_servers_model_is_centred_on_the_images_of_the_rounds_clients(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    context = open_run(tiny_config(*CENTERED, "rounds=2", "method.head_rounds=1", "fleet.per_round=6"), tmp_path)
    state, _ = run_round(context, load_state(context), 1)
    # All clients took part, so the mean over all training images is zero in the model that is evaluated.
    features = class_tokens(context.net, state.server.tensors, context.data.train.images)
    assert features.mean(0).abs().max() < 1e-4
    assert changed(context.net.initial_weights(), state.server.tensors) == {*context.net.parts.head, "norm.bias"}


def test_centred_clients_have_the_same_result_stacked_and_the_predicted_cost(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    outcomes = []
    for stack_size in (1, 4):
        sgd = ("fleet.per_round=6", "train.optimizer=sgd", "train.lr=0.05")
        context = open_run(tiny_config(*CENTERED, *sgd, f"machine.stack_size={stack_size}"), tmp_path / str(stack_size))
        state, record = run_round(context, load_state(context), 1)
        assert not [entry.failure for entry in record.clients if entry.failure]
        outcomes.append(state.server.tensors)
    close(outcomes[1], outcomes[0])
    for entry in record.clients:
        labels = context.labels(entry.client, 1)
        dry_run = context.cost_model.dry_run(1, entry.client, labels)
        steps = [training.step for training in dry_run.trainings]
        assert steps == [FeatureMeanStep(2), ShallowStep(2), FeatureMeanStep(None)]
        assert entry.gflops == context.cost_model.round_flops(dry_run, len(labels)) / 1e9
        assert context.cost_model.up_bytes(dry_run) == pytest.approx(entry.up_bytes, abs=1000)


# Errors


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("keep_last=2", r"method\.keep_last = 2: must be below method\.local_layers = 2"),
        ("head_rounds=3", r"method\.head_rounds = 3: must be below rounds = 3"),
        ("keep_last=-1", r"method\.keep_last"),
    ],
)
def test_impossible_values_are_one_clear_sentence(key: str, message: str, tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config("method.name=fedbfpt", "method.local_layers=2", f"method.{key}")


def test_off_by_default() -> None:
    params = FedBfptParams()
    assert (params.head_rounds, params.keep_last, params.center_features) == (0, 0, False)
