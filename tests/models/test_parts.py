"""Parts: every weight belongs to one part, and the parts have the papers' numbers of parameters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitfleet.config import load_config
from vitfleet.config.schema import ModelConfig
from vitfleet.models.net import Net
from vitfleet.models.parts import ModelParts, Selection, part_paths_of
from vitfleet.models.zoo import build_model

MIB = 2**20

# One small model per family, at 32 pixels if the family has an image size.
FAMILIES = {
    "vit": ModelConfig(dim=16, depth=3, heads=2),
    "vit of timm": ModelConfig(name="vit_tiny_patch16_224", image_size=32, patch_size=4, depth=2),
    "vit with registers": ModelConfig(name="vit_small_patch14_reg4_dinov2", image_size=28, depth=2),
    "vit, averaged": ModelConfig(name="vit_base_patch16_siglip_gap_224", image_size=32, depth=1),
    "deit": ModelConfig(name="deit_tiny_patch16_224", image_size=32, patch_size=4, depth=2),
    "deit, distilled": ModelConfig(name="deit_tiny_distilled_patch16_224", image_size=32, patch_size=4, depth=2),
    "deit 3": ModelConfig(name="deit3_small_patch16_224", image_size=32, patch_size=4, depth=2),
    "cait": ModelConfig(name="cait_xxs24_224", image_size=32, patch_size=4, depth=2),
    "swin": ModelConfig(name="swin_tiny_patch4_window7_224", image_size=32),
    "pvt_v2": ModelConfig(name="pvt_v2_b0"),
    "pit": ModelConfig(name="pit_ti_224", image_size=32, patch_size=4),
    "pit, distilled": ModelConfig(name="pit_ti_distilled_224", image_size=32, patch_size=4),
    "levit": ModelConfig(name="levit_128s", image_size=32),
}
DEPTHS = {
    "vit": 3,
    "vit of timm": 2,
    "deit": 2,
    "deit, distilled": 2,
    "cait": 4,
    "swin": 12,
    "pvt_v2": 8,
    "pit": 12,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, Net]:
    return request.param, build_model(FAMILIES[request.param], num_classes=5, channels=3, data_image_size=32, seed=0)


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    return build_model(
        ModelConfig(dim=16, depth=3, heads=2), num_classes=5, channels=3, data_image_size=32, seed=0
    ).parts


def every_part(parts: ModelParts) -> list[Selection]:
    return [parts.embed, *parts.blocks, parts.norm, parts.head]


def test_count_parameters_gives_the_sizes_of_the_transfl_paper() -> None:
    net = build_model(load_config("transfl-cifar10").model, num_classes=10, channels=3, data_image_size=32, seed=0)
    parts = net.parts
    assert [parts.count_parameters(block) for block in parts.blocks] == [789_760] * 6
    assert parts.count_parameters(parts.non_blocks) == 32_522
    assert parts.count_parameters(parts.whole) == 4_771_082
    three = parts.union(*parts.blocks[:3], parts.non_blocks)
    assert round(4 * parts.count_parameters(parts.whole) / MIB, 4) == 18.2002
    assert round(4 * parts.count_parameters(three) / MIB, 4) == 9.1621


def test_count_parameters_gives_the_sizes_of_the_fedvit_paper() -> None:
    config = load_config("fedavg-cifar100").model
    parts = build_model(config, num_classes=100, channels=3, data_image_size=32, seed=0).parts
    assert (config.dim, parts.depth, config.heads) == (192, 6, 12)
    assert parts.count_parameters(parts.body) == 2_691_648
    assert parts.count_parameters(parts.whole) - parts.count_parameters(parts.body) == 192 * 100 + 100


def test_every_weight_belongs_to_exactly_one_part(family: tuple[str, Net]) -> None:
    parts = family[1].parts
    owners = Counter(name for part in every_part(parts) for name in part)
    assert owners == Counter(list(parts.shapes))


def test_parts_hold_every_floating_point_weight(family: tuple[str, Net]) -> None:
    _, net = family
    vit = net.module.vit
    assert {name: p.shape for name, p in vit.named_parameters()}.items() <= net.parts.shapes.items()
    assert net.parts.count_parameters(net.parts.whole) == sum(p.numel() for p in vit.parameters())
    floating = {name for name, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    assert set(net.parts.shapes) == floating


def test_blocks_are_the_transformer_blocks_in_order(family: tuple[str, Net]) -> None:
    name, net = family
    parts = net.parts
    assert all(parts.blocks)
    assert parts.depth == DEPTHS.get(name, parts.depth)
    attention = [sum("attn" in weight for weight in block) > 0 for block in parts.blocks]
    assert all(attention) or name == "levit"
    order = {weight: position for position, weight in enumerate(parts.shapes)}
    firsts = [order[block.names[0]] for block in parts.blocks]
    assert firsts == sorted(firsts)


def test_only_the_head_depends_on_the_number_of_classes(family: tuple[str, Net]) -> None:
    name, net = family
    wider = build_model(FAMILIES[name], num_classes=7, channels=3, data_image_size=32, seed=0).parts
    differing = {weight for weight, shape in net.parts.shapes.items() if wider.shapes[weight] != shape}
    assert differing
    assert differing <= set(net.parts.head)
    assert wider.body == net.parts.body


def test_only_the_embedding_depends_on_the_number_of_channels(family: tuple[str, Net]) -> None:
    name, net = family
    grey = build_model(FAMILIES[name], num_classes=5, channels=1, data_image_size=32, seed=0).parts
    differing = {weight for weight, shape in net.parts.shapes.items() if grey.shapes[weight] != shape}
    assert differing
    assert differing <= set(net.parts.embed)


def test_running_statistics_are_weights_but_not_trainable() -> None:
    parts = build_model(FAMILIES["levit"], num_classes=5, channels=3, data_image_size=32, seed=0).parts
    statistics = {name for name in parts.shapes if name.endswith(("running_mean", "running_var"))}
    assert statistics
    assert statistics <= set(parts.whole)
    assert not statistics & set(parts.trainable(parts.whole))
    assert not any(name.endswith("num_batches_tracked") for name in parts.whole)


def test_head_of_a_distilled_model_is_both_heads() -> None:
    parts = build_model(FAMILIES["deit, distilled"], num_classes=5, channels=3, data_image_size=32, seed=0).parts
    assert set(parts.head) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    assert "dist_token" in parts.embed


def test_layout_of_rejects_a_model_without_blocks() -> None:
    class Convolutions(nn.Module):
        def get_classifier(self) -> nn.Module:
            return self

    with pytest.raises(TypeError, match="Convolutions has no transformer blocks"):
        part_paths_of(Convolutions())


# Selections


def test_body_head_and_non_blocks_split_the_model(parts: ModelParts) -> None:
    assert set(parts.body) | set(parts.head) == set(parts.whole) == set(parts.shapes)
    assert not set(parts.body) & set(parts.head)
    assert set(parts.non_blocks) == set(parts.whole) - {name for block in parts.blocks for name in block}
    assert parts.union(parts.non_blocks, *parts.blocks) == parts.whole
    assert parts.union() == Selection(())


@given(data=st.data())
def test_union_keeps_the_models_order(parts: ModelParts, data: st.DataObject) -> None:
    everything = list(parts.shapes)
    subsets = st.lists(st.sampled_from(everything)).map(parts.select)
    first, second, third = data.draw(subsets), data.draw(subsets), data.draw(subsets)
    both = parts.union(first, second)
    assert set(both) == set(first) | set(second)
    assert list(both) == [name for name in everything if name in set(both)]
    assert both == parts.union(second, first)
    assert parts.union(both, third) == parts.union(first, parts.union(second, third))
    assert parts.union(first, first) == first
    assert parts.count_parameters(both) + parts.count_parameters(parts.select(set(first) & set(second))) == (
        parts.count_parameters(first) + parts.count_parameters(second)
    )


def test_select_ignores_order_repetition_and_unknown_names(parts: ModelParts) -> None:
    assert parts.select(["head.bias", "cls_token", "head.bias", "no such weight"]).names == (
        "cls_token",
        "head.bias",
    )


def test_take_returns_the_selected_tensors(parts: ModelParts) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in parts.shapes.items()}
    taken = parts.head.take(tensors)
    assert list(taken) == ["head.weight", "head.bias"]
    assert taken["head.weight"] is tensors["head.weight"]
    with pytest.raises(KeyError):
        parts.head.take({})


def test_selection_is_a_hashable_collection(parts: ModelParts) -> None:
    assert "head.bias" in parts.head
    assert "cls_token" not in parts.head
    assert len(parts.head) == 2
    assert list(parts.head) == list(parts.head.names)
    assert hash(parts.head) == hash(Selection(("head.weight", "head.bias")))
