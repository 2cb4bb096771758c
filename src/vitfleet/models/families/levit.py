"""LeViT: Graham et al., "LeViT: a Vision Transformer in ConvNet's Clothing", 2021. The module is timm's.

A convolutional stem, then stages of attention with learned biases by distance; between stages attention that halves the
grid. Every linear layer is followed by a batch norm.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.sizes import check_stages, choose_sizes
from vitfleet.models.layout import Layout, LoraTarget, head_paths, register_layout
from vitfleet.models.request import ModelRequest, refuse_hub_weights

# LeViT-128S. Its stem of four convolutions would leave 2 x 2 tokens of 32 x 32 pixels: small images get two.
SMALL = {"dims": (128, 256, 384), "depths": (2, 3, 4), "heads": (4, 6, 8), "key_dim": 16, "stem_stride": 4}
STANDARD = {**SMALL, "stem_stride": 16}
ACTIVATION = "hard_swish"
#: Queries, keys and values are interleaved head by head in one layer: only the other layers are slices of their own.
LORA_TARGETS = {
    "proj": (LoraTarget("attn.proj.ln.linear"), LoraTarget("attn_downsample.proj.ln.linear")),
    "fc1": (LoraTarget("mlp.ln1.linear"),),
    "fc2": (LoraTarget("mlp.ln2.linear"),),
}


class LevitParams(Table):
    """LeViT with a convolutional stem and batch norm (Graham et al., 2021)."""

    dims: tuple[int, ...] | None = Field(None, strict=False, description="widths; default: 128, 256, 384")
    depths: tuple[int, ...] | None = Field(None, strict=False, description="layers of each stage; default: 2, 3, 4")
    heads: tuple[int, ...] | None = Field(None, strict=False, description="attention heads; default: 4, 6, 8")
    key_dim: int | None = Field(None, ge=1, description="width of a head's keys; default: 16")
    stem_stride: int | None = Field(
        None, ge=2, le=32, multiple_of=2, description="pixels per token after the stem; default: 4, at 224 pixels 16"
    )


class Stem(nn.Sequential):
    """LeViT's stem with as many convolutions of stride 2 as a stride needs."""

    def __init__(self, channels: int, dim: int, stride: int) -> None:
        from timm.layers import get_act_layer
        from timm.models.levit import ConvNorm

        count = stride.bit_length() - 1
        layers: list[nn.Module] = []
        for index in range(count):
            out = dim // 2 ** (count - 1 - index)
            layers += [get_act_layer(ACTIVATION)()] if layers else []
            layers.append(ConvNorm(channels, out, 3, stride=2, padding=1))
            channels = out
        super().__init__(*layers)


@register_model("levit", LevitParams)
def build_levit(params: LevitParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a LeViT without a distillation head."""
    from timm.models.levit import Levit

    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    check_stages(sizes, "dims", "depths", "heads")
    vit = Levit(
        img_size=request.image_size,
        in_chans=request.channels,
        num_classes=request.num_classes,
        embed_dim=sizes["dims"],
        depth=sizes["depths"],
        num_heads=sizes["heads"],
        key_dim=sizes["key_dim"],
        stem_backbone=Stem(request.channels, sizes["dims"][0], sizes["stem_stride"]),
        stem_stride=sizes["stem_stride"],
        act_layer=ACTIVATION,
    )
    return vit, request.image_size


@register_layout("timm.models.levit.Levit")
def levit_layout(vit: Any) -> Layout:
    """Return the layout: the attention between two stages is a block of its own."""
    blocks: list[str] = []
    for index, stage in enumerate(vit.stages):
        if not isinstance(stage.downsample, nn.Identity):
            blocks.append(f"stages.{index}.downsample")
        blocks += [f"stages.{index}.blocks.{block}" for block in range(len(stage.blocks))]
    return Layout(blocks=tuple(blocks), head=head_paths(vit), norm=(), lora_targets=LORA_TARGETS)
