"""The model families: sizes, parts, token dropping; CvT and T2T-ViT against the formulas of their papers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from family_configs import TINY_FAMILIES, WITH_BATCH_NORM, WITH_TOKEN_DROPPING, WITH_UNIFORM_BLOCKS, tiny_family
from vitfleet.config.schema import ModelConfig
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.families.cvt import ConvAttention
from vitfleet.models.families.t2t import TokensToToken, sinusoids, soft_split
from vitfleet.models.net import Net
from vitfleet.models.parts import find_parts, part_paths_of
from vitfleet.models.zoo import build_model

BATCH = 3


def images(net: Net) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (BATCH, len(net.mean), net.image_size, net.image_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_weights(net: Net) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {
        name: (tensor + 0.1 * torch.rand(tensor.shape, generator=generator)).double()
        for name, tensor in net.initial_weights().items()
    }


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_weight_belongs_to_exactly_one_part(name: str) -> None:
    net = tiny_family(name)
    parts = net.parts
    in_order = [parts.embed, *parts.blocks, parts.norm, parts.head]
    assert all(len(block) for block in parts.blocks)
    assert Counter(weight for part in in_order for weight in part) == Counter(list(parts.shapes))
    assert set(parts.parameters) == {weight for weight, _ in net.module.vit.named_parameters()}
    assert set(parts.shapes) - parts.parameters == {weight for weight in parts.shapes if "running_" in weight}
    assert bool(net.batch_norms) == (name in WITH_BATCH_NORM)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_what_a_family_can_do(name: str) -> None:
    net = tiny_family(name)
    assert net.parts.uniform_blocks == (name in WITH_UNIFORM_BLOCKS)
    assert net.stacking == ("tensor operations" if name in WITH_UNIFORM_BLOCKS else "vmap")
    if name in WITH_TOKEN_DROPPING:
        assert net.num_kept_patches(0.5) == net.num_patches // 2
    else:
        with pytest.raises(UserError, match=r"mask ratio = 0\.5: must be 0, a \w+ has no tokens that can be dropped"):
            net.num_kept_patches(0.5)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_net_equals_its_module(name: str) -> None:
    net = tiny_family(name)
    net.module.double()
    weights = random_weights(net)
    vit: Any = copy.deepcopy(net.module.vit)
    vit.load_state_dict(weights, strict=False)
    torch.testing.assert_close(net(weights, images(net)), vit.eval()(images(net)))


@pytest.mark.parametrize("name", WITH_TOKEN_DROPPING)
def test_keeping_all_patches_in_any_order_changes_nothing(name: str) -> None:
    net = tiny_family(name)
    weights, inputs = random_weights(net), images(net)
    keep = torch.rand(BATCH, net.num_patches, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    torch.testing.assert_close(net(weights, inputs, keep), net(weights, inputs), rtol=1e-6, atol=1e-6)
    fewer = net(weights, inputs, keep[:, :3])
    assert not torch.allclose(fewer, net(weights, inputs))


@pytest.mark.parametrize("name", WITH_UNIFORM_BLOCKS)
def test_models_with_uniform_blocks_can_be_split_skipped_and_prompted(name: str) -> None:
    net = tiny_family(name)
    weights, inputs = random_weights(net), images(net)
    keep = torch.tensor([0, 5, 9]).expand(BATCH, 3)
    tokens = net.forward_to(weights, inputs, keep, 1)
    assert tokens.shape == (BATCH, net.num_prefix_tokens + 3, net.embed_dim)
    torch.testing.assert_close(net.forward_from(weights, tokens, 1), net(weights, inputs, keep))
    shallow = {weight: tensor for weight, tensor in weights.items() if weight not in net.parts.blocks[1]}
    assert net(shallow, inputs, depth=1).shape == (BATCH, 4)
    prompted = build_model(TINY_FAMILIES[name], 4, 1, 32, seed=0, adapt=lambda vit: add_prompts(vit, 2, deep=True))
    more = {**weights, "prompts": prompted.initial_weights()["prompts"].double()}
    assert not torch.allclose(prompted(more, inputs), net(weights, inputs))


@pytest.mark.parametrize("name", [name for name in TINY_FAMILIES if name not in WITH_UNIFORM_BLOCKS])
def test_prompts_are_refused_where_blocks_differ(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.name: a \w+ cannot take prompts; choose a plain ViT"):
        add_prompts(tiny_family(name).module.vit, 2, deep=False)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_low_rank_factors_start_as_nothing_and_reach_every_block(name: str) -> None:
    net = tiny_family(name)
    net.module.double()
    vit = copy.deepcopy(net.module.vit)
    targets = ("proj", "fc2") if name == "levit" else ("q", "v")
    add_lora(vit, 2, 4.0, targets)
    part_paths = part_paths_of(vit)
    lora = find_parts(vit, part_paths).lora
    for path in part_paths.blocks:
        assert sum(weight.startswith(f"{path}.") for weight in lora) == 2 * len(targets)
    inputs = images(net)
    torch.testing.assert_close(vit.double().eval()(inputs), net.module.vit.eval()(inputs))


def test_levits_queries_have_no_layer_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"method\.targets = 'q': is not in this model; choose from proj, fc1, fc2"):
        add_lora(tiny_family("levit").module.vit, 2, 4.0, ("q",))


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_default_sizes_fit_small_images(name: str) -> None:
    with torch.device("meta"):
        net = build_model(ModelConfig(name=name, image_size=32), 10, 3, 64, seed=0)
    assert net.image_size == 32
    assert net.num_patches in ((64,) if name in WITH_TOKEN_DROPPING else (0,))
    assert 0.2e6 < net.parts.count_parameters(net.parts.whole) < 8e6


@pytest.mark.parametrize(("name", "millions"), [("cvt", 20.0), ("t2t", 4.3), ("deit", 5.9), ("swin", 28.3)])
def test_standard_sizes_are_those_of_the_papers(name: str, millions: float) -> None:
    with torch.device("meta"):
        parts = build_model(ModelConfig(name=name), 1000, 3, 224, seed=0).parts
    assert parts.count_parameters(parts.whole) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.long
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_standard_models_run_and_stack(name: str) -> None:
    net = build_model(ModelConfig(name=name, patch_size=16 if name == "vit" else None), 5, 3, 224, seed=0)
    with torch.no_grad():
        logits = net(net.initial_weights(), torch.randn(1, 3, 224, 224))
    assert logits.shape == (1, 5)
    assert torch.isfinite(logits).all()
    assert net.stackable


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("cvt", {"depths": [1, 1]}, r"model\.params\.depths = \[1, 1\]: must have one value per stage"),
        ("deit", {"heads": 5}, r"model\.params\.heads = 5: must divide the width, 192"),
        ("swin", {"heads": [3, 4, 8]}, r"model\.params\.heads = 3: must divide the width, 64"),
        ("t2t", {"width": 5}, r"model\.params\.width = 5: no such key; 't2t' has the parameters dim"),
    ],
)
def test_wrong_sizes_name_the_key(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UserError), match=message):
        build_model(ModelConfig(name=name, params=params), 5, 3, 32, seed=0)


# T2T-ViT


def test_soft_split_is_made_of_overlapping_windows() -> None:
    grid = torch.randn(2, 3, 5, 5)
    windows = soft_split(grid, (3, 2, 1))
    padded = F.pad(grid, (1, 1, 1, 1))
    assert windows.shape == (2, 9, 27)
    for row in range(3):
        for column in range(3):
            window = padded[:, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            assert torch.equal(windows[:, 3 * row + column], window.flatten(1))
    stacked = soft_split(torch.stack([grid, 2 * grid]), (3, 2, 1))
    assert torch.equal(stacked, torch.stack([windows, 2 * windows]))


def test_tokens_to_token_by_hand() -> None:
    torch.manual_seed(0)
    module = TokensToToken(channels=1, image_size=8, dim=5, token_dim=4, splits=((3, 2, 1), (3, 2, 1)))
    pixels = torch.randn(2, 1, 8, 8)
    layer = module.layers[0]
    tokens = F.unfold(pixels, 3, padding=1, stride=2).mT  # [2, 16, 9]
    q, k, v = layer.qkv(layer.norm1(tokens)).split(4, dim=-1)  # type: ignore[operator]
    scores = torch.einsum("bic,bjc->bij", q, k) / 3  # the root of the 9 inputs
    mixed = v + layer.proj(scores.softmax(-1) @ v)  # type: ignore[operator]
    mixed = mixed + layer.fc2(F.gelu(layer.fc1(layer.norm2(mixed))))  # type: ignore[operator]
    again = F.unfold(mixed.mT.reshape(2, 4, 4, 4), 3, padding=1, stride=2).mT
    torch.testing.assert_close(module(pixels), module.proj(again))
    assert module.num_patches == module(pixels).shape[1] == 4


def test_positions_are_fixed_sinusoids() -> None:
    table = sinusoids(10, 6)[0]
    torch.testing.assert_close(
        table[3, 2:4],
        torch.tensor([3 / 10000 ** (2 / 6)] * 2)
        .sin()
        .where(torch.tensor([True, False]), torch.tensor([3 / 10000 ** (2 / 6)] * 2).cos()),
    )
    assert "pos_embed" not in tiny_family("t2t").parts.shapes


# CvT


def test_convolutional_attention_by_hand() -> None:
    torch.manual_seed(0)
    attention = ConvAttention(dim=4, heads=2).double().eval()
    tokens = torch.randn(2, 1 + 9, 4, dtype=torch.float64)
    grid = tokens[:, 1:].mT.reshape(2, 4, 3, 3)

    def project(convolve: Any, linear: Any, stride: int) -> Tensor:
        kernel = convolve.conv.weight
        maps = torch.cat([F.conv2d(grid[:, c : c + 1], kernel[c : c + 1], None, stride, 1) for c in range(4)], dim=1)
        maps = maps / (1 + convolve.bn.eps) ** 0.5  # running mean 0, variance 1
        projected: Tensor = torch.cat([tokens[:, :1], maps.flatten(2).mT], dim=1) @ linear.weight.T + linear.bias
        return projected

    q, k, v = (
        project(attention.conv_q, attention.q, 1),
        project(attention.conv_k, attention.k, 2),
        project(attention.conv_v, attention.v, 2),
    )
    heads = []
    for head in range(2):
        part = slice(2 * head, 2 * head + 2)
        scores = (q[..., part] @ k[..., part].mT) * 4**-0.5
        heads.append(scores.softmax(-1) @ v[..., part])
    expected = torch.cat(heads, dim=-1) @ attention.proj.weight.T + attention.proj.bias
    torch.testing.assert_close(attention(tokens, (3, 3), 1), expected)
