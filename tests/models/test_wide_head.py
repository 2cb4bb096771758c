"""Heads that see more than the class token: against the tokens of timm's own module, and in every way of computing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.net import Net
from vitfleet.models.variants.wide_head import (
    SCALE,
    SHIFT,
    HeadFeatures,
    WideHeadViT,
    draw_projection,
    expand,
    widen_head,
)
from vitfleet.models.zoo import build_model

TIMM = ModelConfig(name="vit_tiny_patch16_224", image_size=32, patch_size=8, depth=3)
WIDE = {
    "mean": HeadFeatures("mean"),
    "both": HeadFeatures("both"),
    "class tokens of two blocks": HeadFeatures("class-token", blocks=2),
    "both of three blocks": HeadFeatures("both", blocks=3),
    "random features": HeadFeatures("both", blocks=2, project=50, seed=3),
}
BATCH = 4


def build(features: HeadFeatures, config: ModelConfig = TIMM, *more: Any) -> Net:
    def adapt(vit: Any) -> None:
        widen_head(vit, features)
        for add in more:
            add(vit)

    return build_model(config, num_classes=5, channels=3, data_image_size=32, seed=0, adapt=adapt)


def pixels(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def weights_of(net: Net, seed: int = 0) -> dict[str, Tensor]:
    """Return weights far from the initial ones, with a shift and a scale."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=random)
        for name, tensor in net.initial_weights().items()
    }


def by_hand(vit: Any, features: HeadFeatures, images: Tensor) -> Tensor:
    """Return the input of the linear layer, from the module's own blocks."""
    outputs, tokens = [], vit.embed(images)
    for block in vit.blocks:
        tokens = block(tokens)
        outputs.append(tokens)
    seen = [F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6) for tokens in outputs[-features.blocks : -1]]
    seen.append(vit.norm(outputs[-1]))
    class_tokens = torch.cat([tokens[:, 0] for tokens in seen], dim=1)
    means = torch.cat([tokens[:, 1:].mean(dim=1) for tokens in seen], dim=1)
    parts = {"class-token": [class_tokens], "mean": [means], "both": [class_tokens, means]}[features.tokens]
    x: Tensor = (torch.cat(parts, dim=1) - vit.head.shift) * vit.head.scale
    return (x @ draw_projection(features, x.shape[1]).T).relu() if features.project else x


@pytest.mark.parametrize("name", WIDE)
def test_what_the_head_sees_by_hand(name: str) -> None:
    features = WIDE[name]
    net = build(features)
    weights, images = weights_of(net), pixels()
    vit: Any = net.module.vit
    vit.load_state_dict(weights, strict=False)
    expected = by_hand(vit, features, images)
    assert net.head_width == expected.shape[1]
    seen = net.representation(weights, images, None)
    shift, scale = weights[SHIFT], weights[SCALE]
    torch.testing.assert_close(expand(seen, shift, scale, vit.head.projection), expected, rtol=1e-4, atol=1e-4)
    logits = expected @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(net(weights, images), logits, rtol=1e-4, atol=1e-4)
    both = net.outputs_and_representation(weights, images, None, None)
    torch.testing.assert_close(both, (logits, expected), rtol=1e-4, atol=1e-4)


def test_the_default_is_the_models_own_head() -> None:
    plain, default = build_model(TIMM, 5, 3, 32, seed=0), build(HeadFeatures())
    assert type(default.module.vit.head) is torch.nn.Linear
    assert default.initial_weights().keys() == plain.initial_weights().keys()
    for name, tensor in plain.initial_weights().items():
        assert torch.equal(default.initial_weights()[name], tensor)
    weights, images = weights_of(plain), pixels()
    assert torch.equal(default(weights, images), plain(weights, images))
    assert torch.equal(
        plain.representation(weights, images, None), plain.outputs_and_representation(weights, images, None, None)[1]
    )


def test_shift_and_scale_are_weights_that_no_optimiser_trains() -> None:
    net = build(WIDE["random features"])
    assert {SHIFT, SCALE, "head.weight", "head.bias"} == set(net.parts.head)
    assert {SHIFT, SCALE}.isdisjoint(net.parts.parameters)
    assert net.parts.shapes["head.weight"] == (5, 50)
    assert net.parts.shapes[SHIFT] == (2 * 2 * 192,)
    weights = net.initial_weights()
    assert not weights[SHIFT].any()
    assert bool((weights[SCALE] == 1).all())


def test_random_features_come_from_their_seed_alone() -> None:
    features = WIDE["random features"]
    vits: list[Any] = [
        build_model(TIMM, 5, 3, 32, seed=seed, adapt=lambda vit: widen_head(vit, features)).module.vit
        for seed in (0, 1)
    ]
    first, second = (vit.head.projection for vit in vits)
    assert torch.equal(first, second)
    other = HeadFeatures(features.tokens, features.blocks, features.project, seed=4)
    assert not torch.equal(first, draw_projection(other, first.shape[1]))
    torch.testing.assert_close(first.norm(dim=1), torch.ones(50), rtol=0.2, atol=0)


def test_random_features_are_of_entries_of_like_size(tmp_path: Path) -> None:
    """Those of a pretrained body are far from it: here, one entry is a thousand times the others."""
    plain = build_model(TIMM, 5, 3, 32, seed=0)
    weights = plain.initial_weights()
    weights["norm.weight"][7] = 1000.0
    weights["norm.bias"][8] = 500.0
    save_file(weights, tmp_path / "body.safetensors")
    pretrained = TIMM.model_copy(update={"weights": str(tmp_path / "body.safetensors")})
    net, random_body = build(WIDE["random features"], pretrained), build(WIDE["random features"])
    assert not random_body.initial_weights()[SHIFT].any()
    assert bool((build(WIDE["both"], pretrained).initial_weights()[SCALE] == 1).all()), "sums tell more than noise"
    initial, vit = net.initial_weights(), net.module.vit
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert isinstance(net.functional, WideHeadViT)
    seen = net.functional.representation({**initial, **dict(vit.named_buffers())}, images, None)
    assert float(seen.std(dim=0).max()) > 100
    standardised = (seen - initial[SHIFT]) * initial[SCALE]
    assert float(standardised.std(dim=0).max()) < 10
    assert float(standardised.mean(dim=0).abs().max()) < 10


@pytest.mark.parametrize("name", WIDE)
def test_a_pass_that_begins_at_a_block_sees_the_same(name: str) -> None:
    net = build(WIDE[name])
    weights, images = weights_of(net), pixels()
    tokens = net.forward_to(weights, images, None, 1)
    torch.testing.assert_close(net.forward_from(weights, tokens, 1), net(weights, images))


def test_blocks_before_the_start_of_a_pass_cannot_be_seen() -> None:
    net = build(WIDE["both of three blocks"])
    weights = weights_of(net)
    with pytest.raises(UserError, match="only 2 of them pass here"):
        net.forward_from(weights, net.forward_to(weights, pixels(), None, 2), 2)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("shared", [(), (SHIFT, SCALE)])
def test_stacked_clients_see_what_each_sees_alone(name: str, shared: tuple[str, ...]) -> None:
    net = build(WIDE[name])
    clients = [weights_of(net, seed) for seed in range(3)]
    for name_ in shared:
        clients = [{**weights, name_: clients[0][name_]} for weights in clients]
    images = torch.stack([pixels(seed) for seed in range(3)])
    stacked = {
        name_: clients[0][name_] if name_ in shared else torch.stack([weights[name_] for weights in clients])
        for name_ in clients[0]
    }
    alone = torch.stack([net(weights, own) for weights, own in zip(clients, images, strict=True)])
    torch.testing.assert_close(net(stacked, images), alone, rtol=1e-4, atol=1e-4)


def test_means_are_of_kept_patches_without_prompts() -> None:
    features = WIDE["both of three blocks"]
    net = build(features, TIMM, lambda vit: add_prompts(vit, 2, deep=True), lambda vit: add_lora(vit, 2, 2.0, ("q",)))
    weights, images = weights_of(net), pixels()
    keep = torch.tensor([[0, 3, 5]]).expand(BATCH, 3)
    outputs = net.functional._run(weights, images, keep, 0, None, None) if net.functional else []
    assert [output.tokens.shape[1] for output in outputs] == [1 + 2 + 3] * 3
    without = [torch.cat([tokens[:, :1], tokens[:, 3:]], dim=1) for tokens, _ in outputs]
    normed = [F.layer_norm(tokens, (192,), eps=1e-6) for tokens in without[:2]]
    normed.append(F.layer_norm(without[2], (192,), weights["norm.weight"], weights["norm.bias"], 1e-6))
    seen = torch.cat([*(tokens[:, 0] for tokens in normed), *(tokens[:, 1:].mean(dim=1) for tokens in normed)], dim=1)
    torch.testing.assert_close(net.representation(weights, images, keep), seen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["swin", "pvt", "pit", "cait"])
def test_the_input_of_the_head_of_other_families_is_that_of_timm(name: str) -> None:
    net = build_model(ModelConfig(name=name, image_size=32), 5, 3, 32, seed=0)
    size = net.image_size
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))
    weights = net.initial_weights()
    without_head = {name: tensor for name, tensor in weights.items() if name not in set(net.parts.head)}
    vit: Any = net.module.vit
    expected = vit.forward_head(vit.forward_features(images), pre_logits=True)
    torch.testing.assert_close(net.representation(without_head, images, None), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (ModelConfig(name="swin_tiny_patch4_window7_224", image_size=64), WIDE["mean"]),
        (ModelConfig(name="deit_tiny_distilled_patch16_224", image_size=32, patch_size=8, depth=1), WIDE["both"]),
        (ModelConfig(name="vit_base_patch16_siglip_gap_224", image_size=48, depth=1), WIDE["both"]),
    ],
)
def test_models_without_a_head_on_a_class_token_are_refused(config: ModelConfig, features: HeadFeatures) -> None:
    with pytest.raises(UserError, match="sees its own features only"):
        build(features, config)


def test_more_blocks_than_the_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks = 4: must be at most 3"):
        build(HeadFeatures(blocks=4))


@pytest.mark.parametrize("name", ["deit", "levit"])
def test_two_layers_or_a_batch_norm_before_one_are_no_linear_head(name: str) -> None:
    net = build_model(ModelConfig(name=name, image_size=32), 5, 3, 32, seed=0)
    with pytest.raises(UserError, match="is not one linear layer"):
        assert net.head_width
