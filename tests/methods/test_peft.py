"""The tuning baselines: what trains, how much it is, and that only it moves and travels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import MakeConfig, context_of
from vitfleet.config.base import MethodParams
from vitfleet.config.schema import Config, ModelConfig
from vitfleet.errors import UserError
from vitfleet.methods import adapt_model, make_method
from vitfleet.methods.tuning.peft import FedLoraParams, FedPromptParams
from vitfleet.models.adapters import LowRankLinear
from vitfleet.models.net import Net
from vitfleet.models.parts import LoraTarget
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run

CLASSES = 100
HEAD = 768 * CLASSES + CLASSES
DEPTH, WIDTH = 12, 768


def params_of(**table: object) -> MethodParams:
    return Config.model_validate({"method": table}).method


def counted(params: MethodParams) -> int:
    """Count what trains in a ViT-B/16, without making its weights."""
    with torch.device("meta"):
        net = build_model(ModelConfig(name="vit_base_patch16_224"), CLASSES, 3, 224, 0, partial(adapt_model, params))
    method = make_method(params, context_of(net, num_classes=CLASSES, rounds=1))
    return net.parts.count_parameters(method.trainable)


@pytest.mark.parametrize(
    ("table", "count"),
    [
        ({"name": "fed-full"}, 85_798_656 + HEAD),
        ({"name": "fed-head"}, HEAD),
        ({"name": "fed-bias"}, 102_912 + HEAD),
        ({"name": "fed-prompt", "prompts": 10, "deep": False}, 10 * WIDTH + HEAD),
        ({"name": "fed-prompt", "prompts": 10, "deep": True}, DEPTH * 10 * WIDTH + HEAD),
        ({"name": "fed-lora", "rank": 4}, DEPTH * 2 * (4 * WIDTH + WIDTH * 4) + HEAD),
        ({"name": "fed-lora", "rank": 16}, DEPTH * 2 * (16 * WIDTH + WIDTH * 16) + HEAD),
        (
            {"name": "fed-lora", "rank": 2, "targets": ["q", "proj", "fc1"]},
            DEPTH * 2 * (2 * WIDTH + 2 * WIDTH + (WIDTH + 4 * WIDTH)) + HEAD,
        ),
        ({"name": "fedbfpt"}, 7_087_872 + HEAD),
    ],
)
def test_trainable_parameters_of_vit_b_16_equal_the_formula(table: dict[str, object], count: int) -> None:
    assert counted(params_of(**table)) == count


@pytest.mark.parametrize(
    "name", ["fed-full", "fed-head", "fed-bias", "fed-prompt", "fed-prompt method.deep=false", "fed-lora"]
)
def test_only_what_is_tuned_moves_and_travels(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(tiny_config(*f"method.name={name}".split()), tmp_path)
    trains = set(context.method.trainable)
    state = load_state(context)
    before = dict(context.method.model_weights(state.server, context.base.tensors, None))
    state, first = run_round(context, state, 1)
    after = context.method.model_weights(state.server, context.base.tensors, None)
    assert set(after) == set(context.net.parts.whole)
    for weight in after:
        if weight not in trains:
            assert torch.equal(after[weight], before[weight]), f"{weight} is frozen"
    moved = [weight for weight in trains if not torch.equal(after[weight], before[weight])]
    # Biases of the keys get no gradient by nature; everything else that trains has moved.
    assert len(moved) >= len(trains) - 1
    assert set(state.server.tensors) == trains

    # A client seen before is sent what is tuned and nothing else.
    seen = {entry.client: entry for entry in first.clients}
    for round in (2, 3):
        state, record = run_round(context, state, round)
        for entry in record.clients:
            if entry.client in seen and name != "fed-full":
                assert entry.down_bytes < seen[entry.client].down_bytes
                assert entry.down_bytes == pytest.approx(entry.up_bytes, abs=200)


def build_net(params: MethodParams | None) -> Net:
    config = ModelConfig(dim=16, depth=2, heads=2, patch_size=4)
    return build_model(config, 5, 1, 8, 3, None if params is None else partial(adapt_model, params))


@pytest.mark.parametrize("params", [FedPromptParams(), FedLoraParams()])
def test_what_is_added_leaves_the_models_own_initial_weights_alone(params: MethodParams) -> None:
    plain, adapted = build_net(None).initial_weights(), build_net(params).initial_weights()
    assert set(plain) < set(adapted)
    for name, weight in plain.items():
        assert torch.equal(weight, adapted[name])


def test_low_rank_factors_start_as_the_model_they_are_added_to() -> None:
    plain, adapted = build_net(None), build_net(FedLoraParams(rank=2))
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(
        plain(plain.initial_weights(), images), adapted(adapted.initial_weights(), images), rtol=0, atol=0
    )


def test_a_low_rank_layer_is_the_linear_layer_with_its_weights_updated() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 12)
    targets = {"q": LoraTarget("", 0, 3), "v": LoraTarget("", 2, 3)}
    layer = LowRankLinear(linear, rank=2, scale=0.5, targets=targets)
    factors = dict(layer.named_parameters())
    for name in ("q", "v"):
        torch.nn.init.normal_(factors[f"lora_b_{name}"])
    update = torch.zeros(12, 6)
    update[0:4] = 0.5 * factors["lora_b_q"] @ factors["lora_a_q"]
    update[8:12] = 0.5 * factors["lora_b_v"] @ factors["lora_a_v"]
    x = torch.randn(3, 5, 6)
    expected = torch.nn.functional.linear(x, linear.weight + update, linear.bias)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("deep", [False, True])
def test_prompts_stand_after_the_class_token_and_are_gone_before_the_head(deep: bool) -> None:
    net = build_net(FedPromptParams(prompts=3, deep=deep))
    weights = net.initial_weights()
    images = torch.randn(2, 1, 8, 8)
    vit = net.module.vit
    with torch.no_grad():
        tokens = vit.embed(images)  # type: ignore[operator]
        for layer, block in enumerate(vit.blocks):  # type: ignore[arg-type]
            prompts = weights["prompts"][layer if deep else 0].expand(2, -1, -1)
            if layer == 0:
                tokens = torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], dim=1)
            elif deep:
                tokens = torch.cat([tokens[:, :1], prompts, tokens[:, 4:]], dim=1)
            tokens = block(tokens)
        expected = vit.head(vit.norm(tokens)[:, 0])  # type: ignore[operator]
    torch.testing.assert_close(net(weights, images), expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.name=fed-lora", 'method.targets=["q", "gate"]'], r"method\.targets = 'gate': is not in this model"),
        (["method.name=fed-prompt", "model.name=pvt_v2_b0"], "cannot take prompts; choose a plain ViT"),
        (["method.name=fedbfpt", "method.local_layers=9"], r"method\.local_layers = 9: must be between 2 and 2"),
        (["method.name=transfl", "method.k=9"], r"method\.k = 9: must be between 1 and 2"),
    ],
)
def test_what_the_model_cannot_have_is_one_clear_sentence(
    overrides: list[str], message: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    sizes = ["model.depth=null", "model.patch_size=null"] if "model.name=pvt_v2_b0" in overrides else []
    with pytest.raises(UserError, match=message):
        open_run(tiny_config(*overrides, *sizes), tmp_path)
