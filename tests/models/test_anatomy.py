"""Anatomy: every weight belongs to one part, and the parts have the papers' numbers of parameters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitfleet.config import load_config
from vitfleet.config.schema import ModelConfig
from vitfleet.models.anatomy import Anatomy, Selection
from vitfleet.models.layout import layout_of
from vitfleet.models.net import Net
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
def anatomy() -> Anatomy:
    return build_model(
        ModelConfig(dim=16, depth=3, heads=2), num_classes=5, channels=3, data_image_size=32, seed=0
    ).anatomy


def parts(anatomy: Anatomy) -> list[Selection]:
    return [anatomy.embed, *anatomy.blocks, anatomy.norm, anatomy.head]


def test_count_parameters_gives_the_sizes_of_the_transfl_paper() -> None:
    net = build_model(load_config("transfl-cifar10").model, num_classes=10, channels=3, data_image_size=32, seed=0)
    anatomy = net.anatomy
    assert [anatomy.count_parameters(block) for block in anatomy.blocks] == [789_760] * 6
    assert anatomy.count_parameters(anatomy.non_blocks) == 32_522
    assert anatomy.count_parameters(anatomy.whole) == 4_771_082
    three = anatomy.union(*anatomy.blocks[:3], anatomy.non_blocks)
    assert round(4 * anatomy.count_parameters(anatomy.whole) / MIB, 4) == 18.2002
    assert round(4 * anatomy.count_parameters(three) / MIB, 4) == 9.1621


def test_count_parameters_gives_the_sizes_of_the_fedvit_paper() -> None:
    config = load_config("fedavg-cifar100").model
    anatomy = build_model(config, num_classes=100, channels=3, data_image_size=32, seed=0).anatomy
    assert (config.dim, anatomy.depth, config.heads) == (192, 6, 12)
    assert anatomy.count_parameters(anatomy.body) == 2_691_648
    assert anatomy.count_parameters(anatomy.whole) - anatomy.count_parameters(anatomy.body) == 192 * 100 + 100


def test_every_weight_belongs_to_exactly_one_part(family: tuple[str, Net]) -> None:
    anatomy = family[1].anatomy
    owners = Counter(name for part in parts(anatomy) for name in part)
    assert owners == Counter(list(anatomy.shapes))


def test_anatomy_holds_every_floating_point_weight(family: tuple[str, Net]) -> None:
    _, net = family
    vit = net.module.vit
    assert {name: p.shape for name, p in vit.named_parameters()}.items() <= net.anatomy.shapes.items()
    assert net.anatomy.count_parameters(net.anatomy.whole) == sum(p.numel() for p in vit.parameters())
    floating = {name for name, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    assert set(net.anatomy.shapes) == floating


def test_blocks_are_the_transformer_blocks_in_order(family: tuple[str, Net]) -> None:
    name, net = family
    anatomy = net.anatomy
    assert all(anatomy.blocks)
    assert anatomy.depth == DEPTHS.get(name, anatomy.depth)
    attention = [sum("attn" in weight for weight in block) > 0 for block in anatomy.blocks]
    assert all(attention) or name == "levit"
    order = {weight: position for position, weight in enumerate(anatomy.shapes)}
    firsts = [order[block.names[0]] for block in anatomy.blocks]
    assert firsts == sorted(firsts)


def test_only_the_head_depends_on_the_number_of_classes(family: tuple[str, Net]) -> None:
    name, net = family
    wider = build_model(FAMILIES[name], num_classes=7, channels=3, data_image_size=32, seed=0).anatomy
    differing = {weight for weight, shape in net.anatomy.shapes.items() if wider.shapes[weight] != shape}
    assert differing
    assert differing <= set(net.anatomy.head)
    assert wider.body == net.anatomy.body


def test_only_the_embedding_depends_on_the_number_of_channels(family: tuple[str, Net]) -> None:
    name, net = family
    grey = build_model(FAMILIES[name], num_classes=5, channels=1, data_image_size=32, seed=0).anatomy
    differing = {weight for weight, shape in net.anatomy.shapes.items() if grey.shapes[weight] != shape}
    assert differing
    assert differing <= set(net.anatomy.embed)


def test_running_statistics_are_weights_but_not_trainable() -> None:
    anatomy = build_model(FAMILIES["levit"], num_classes=5, channels=3, data_image_size=32, seed=0).anatomy
    statistics = {name for name in anatomy.shapes if name.endswith(("running_mean", "running_var"))}
    assert statistics
    assert statistics <= set(anatomy.whole)
    assert not statistics & set(anatomy.trainable(anatomy.whole))
    assert not any(name.endswith("num_batches_tracked") for name in anatomy.whole)


def test_head_of_a_distilled_model_is_both_heads() -> None:
    anatomy = build_model(FAMILIES["deit, distilled"], num_classes=5, channels=3, data_image_size=32, seed=0).anatomy
    assert set(anatomy.head) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    assert "dist_token" in anatomy.embed


def test_layout_of_rejects_a_model_without_blocks() -> None:
    class Convolutions(nn.Module):
        def get_classifier(self) -> nn.Module:
            return self

    with pytest.raises(TypeError, match="Convolutions has no transformer blocks"):
        layout_of(Convolutions())


# Selections


def test_body_head_and_non_blocks_split_the_model(anatomy: Anatomy) -> None:
    assert set(anatomy.body) | set(anatomy.head) == set(anatomy.whole) == set(anatomy.shapes)
    assert not set(anatomy.body) & set(anatomy.head)
    assert set(anatomy.non_blocks) == set(anatomy.whole) - {name for block in anatomy.blocks for name in block}
    assert anatomy.union(anatomy.non_blocks, *anatomy.blocks) == anatomy.whole
    assert anatomy.union() == Selection(())


@given(data=st.data())
def test_union_keeps_the_models_order(anatomy: Anatomy, data: st.DataObject) -> None:
    everything = list(anatomy.shapes)
    subsets = st.lists(st.sampled_from(everything)).map(anatomy.select)
    first, second, third = data.draw(subsets), data.draw(subsets), data.draw(subsets)
    both = anatomy.union(first, second)
    assert set(both) == set(first) | set(second)
    assert list(both) == [name for name in everything if name in set(both)]
    assert both == anatomy.union(second, first)
    assert anatomy.union(both, third) == anatomy.union(first, anatomy.union(second, third))
    assert anatomy.union(first, first) == first
    assert anatomy.count_parameters(both) + anatomy.count_parameters(anatomy.select(set(first) & set(second))) == (
        anatomy.count_parameters(first) + anatomy.count_parameters(second)
    )


def test_select_ignores_order_repetition_and_unknown_names(anatomy: Anatomy) -> None:
    assert anatomy.select(["head.bias", "cls_token", "head.bias", "no such weight"]).names == (
        "cls_token",
        "head.bias",
    )


def test_take_returns_the_selected_tensors(anatomy: Anatomy) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in anatomy.shapes.items()}
    taken = anatomy.head.take(tensors)
    assert list(taken) == ["head.weight", "head.bias"]
    assert taken["head.weight"] is tensors["head.weight"]
    with pytest.raises(KeyError):
        anatomy.head.take({})


def test_selection_is_a_hashable_collection(anatomy: Anatomy) -> None:
    assert "head.bias" in anatomy.head
    assert "cls_token" not in anatomy.head
    assert len(anatomy.head) == 2
    assert list(anatomy.head) == list(anatomy.head.names)
    assert hash(anatomy.head) == hash(Selection(("head.weight", "head.bias")))
