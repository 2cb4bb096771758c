"""The families whose modules are timm's: of each its sizes, and the arguments of timm's constructor.

*CaiT* (Touvron et al., "Going deeper with Image Transformers", 2021): the patches pass through self-attention blocks
without a class token; then class-attention blocks read them into one.

*DeiT* (Touvron et al., "Training data-efficient image transformers", 2021): a plain ViT with a distillation token, and
with its parts. There is no teacher: both heads are trained on the labels, and their logits are averaged.

*LeViT* (Graham et al., "LeViT: a Vision Transformer in ConvNet's Clothing", 2021): a convolutional stem, then stages of
attention with learned biases by distance; between stages attention that halves the grid. Every linear layer is followed
by a batch norm.

*PiT* (Heo et al., "Rethinking Spatial Dimensions of Vision Transformers", 2021): three stages; between them a depthwise
convolution halves the grid of the patches, and a linear layer widens the class token.

*PVT* (Wang et al., "Pyramid Vision Transformer", 2021) in its second version (2022): four stages; between them
overlapping convolutions that halve the grid. Keys and values are of a reduced grid.

*Swin* (Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021): attention is
within windows, which are shifted in every second block; between stages four patches are merged into one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.request import (
    ModelRequest,
    check_divides,
    check_patch_size,
    check_stages,
    choose_sizes,
    refuse_hub_weights,
)
from vitfleet.models.forward.stacked_ops import kept_patches, linear
from vitfleet.models.parts import LoraTarget, PartPaths, block_paths, head_paths, register_part_paths

Sizes: TypeAlias = dict[str, Any]
PerStage: TypeAlias = tuple[int, ...] | None
#: Checks a family's sizes, and returns the arguments of timm's constructor that follow from them.
Arguments: TypeAlias = Callable[[ModelRequest, Sizes], Sizes]

LEVIT_ACTIVATION = "hard_swish"
#: Queries, keys and values are interleaved head by head in one layer: only the other layers are slices of their own.
LEVIT_LORA_TARGETS = {
    "proj": (LoraTarget("attn.proj.ln.linear"), LoraTarget("attn_downsample.proj.ln.linear")),
    "fc1": (LoraTarget("mlp.ln1.linear"),),
    "fc2": (LoraTarget("mlp.ln2.linear"),),
}


def timm_family(
    params: type[Table], timm_class: str, small: Sizes, standard: Sizes
) -> Callable[[Arguments], Arguments]:
    """Return a decorator that registers a family under the name of the function with its arguments.

    ``standard`` holds the sizes for larger images that differ from those for small ones.
    """
    package, _, class_name = timm_class.rpartition(".")

    def decorator(arguments: Arguments) -> Arguments:
        @register_model(arguments.__name__, params)
        def build(params: Table, request: ModelRequest) -> tuple[nn.Module, int]:
            refuse_hub_weights(request)
            sizes = choose_sizes(params, request.image_size, small, {**small, **standard})
            data_arguments = {"in_chans": request.channels, "num_classes": request.num_classes}
            vit = getattr(import_module(package), class_name)(**data_arguments, **arguments(request, sizes))
            return vit, request.image_size

        return arguments

    return decorator


def _cut_images(request: ModelRequest, sizes: Sizes) -> Sizes:
    """Return the sizes of an image and of its patches, which do not overlap."""
    patch_size = request.config.patch_size or sizes["patch"]
    check_patch_size(request.image_size, patch_size)
    return {"img_size": request.image_size, "patch_size": patch_size}


def _renamed(sizes: Sizes, **names: str) -> Sizes:
    """Return sizes under the names that timm's constructor has for them; that of the patches goes with the image's."""
    return {names.get(name, name): value for name, value in sizes.items() if name != "patch"}


def _size(description: str, at_least: int = 1) -> Any:
    return Field(None, ge=at_least, description=description)


def _per_stage(description: str) -> Any:
    return Field(None, strict=False, description=description)


class CaitParams(Table):
    """CaiT with class-attention layers at its end (Touvron et al., 2021)."""

    dim: int | None = _size("embedding width; default: 192", 8)
    depth: int | None = _size("self-attention layers; default: 12, at 224 pixels 24")
    class_depth: int | None = _size("class-attention layers; default: 2")
    heads: int | None = _size("attention heads; default: 4")


@timm_family(
    CaitParams,
    "timm.models.cait.Cait",
    small={"dim": 192, "depth": 12, "class_depth": 2, "heads": 4, "patch": 4},
    standard={"depth": 24, "patch": 16},
)
def cait(request: ModelRequest, sizes: Sizes) -> Sizes:
    """CaiT-XXS24; for small images with smaller patches and half of its layers."""
    check_divides(sizes["heads"], sizes["dim"])
    return {
        **_cut_images(request, sizes),
        **_renamed(sizes, dim="embed_dim", class_depth="depth_token_only", heads="num_heads"),
        "init_values": 1e-5,  # deep CaiTs have a smaller layer scale
    }


class DeitParams(Table):
    """DeiT with a distillation token (Touvron et al., 2021)."""

    dim: int | None = _size("embedding width; default: 192", 8)
    depth: int | None = _size("number of layers; default: 12")
    heads: int | None = _size("attention heads; default: 3")


@timm_family(
    DeitParams,
    "timm.models.deit.VisionTransformerDistilled",
    small={"dim": 192, "depth": 12, "heads": 3, "patch": 4},
    standard={"patch": 16},
)
def deit(request: ModelRequest, sizes: Sizes) -> Sizes:
    """DeiT-Tiny; for small images with smaller patches."""
    check_divides(sizes["heads"], sizes["dim"])
    return {**_cut_images(request, sizes), **_renamed(sizes, dim="embed_dim", heads="num_heads")}


class LevitParams(Table):
    """LeViT with a convolutional stem and batch norm (Graham et al., 2021)."""

    dims: PerStage = _per_stage("widths; default: 128, 256, 384")
    depths: PerStage = _per_stage("layers of each stage; default: 2, 3, 4")
    heads: PerStage = _per_stage("attention heads; default: 4, 6, 8")
    key_dim: int | None = _size("width of a head's keys; default: 16")
    stem_stride: int | None = Field(
        None, ge=2, le=32, multiple_of=2, description="pixels per token after the stem; default: 4, at 224 pixels 16"
    )


@timm_family(
    LevitParams,
    "timm.models.levit.Levit",
    small={"dims": (128, 256, 384), "depths": (2, 3, 4), "heads": (4, 6, 8), "key_dim": 16, "stem_stride": 4},
    standard={"stem_stride": 16},
)
def levit(request: ModelRequest, sizes: Sizes) -> Sizes:
    """LeViT-128S; its stem of four convolutions would leave 2 x 2 tokens of 32 x 32 pixels: small images get two."""
    check_stages(sizes, "dims", "depths", "heads")
    return {
        **_renamed(sizes, dims="embed_dim", depths="depth", heads="num_heads"),
        "img_size": request.image_size,
        "stem_backbone": LevitStem(request.channels, sizes["dims"][0], sizes["stem_stride"]),
        "act_layer": LEVIT_ACTIVATION,
    }


class LevitStem(nn.Sequential):
    """LeViT's stem with as many convolutions of stride 2 as a stride needs."""

    def __init__(self, channels: int, dim: int, stride: int) -> None:
        from timm.layers import get_act_layer
        from timm.models.levit import ConvNorm

        count = stride.bit_length() - 1
        layers: list[nn.Module] = []
        for index in range(count):
            out = dim // 2 ** (count - 1 - index)
            layers += [get_act_layer(LEVIT_ACTIVATION)()] if layers else []
            layers.append(ConvNorm(channels, out, 3, stride=2, padding=1))
            channels = out
        super().__init__(*layers)


class PitParams(Table):
    """PiT with pooling between its stages (Heo et al., 2021)."""

    head_dims: PerStage = _per_stage("widths of a head; default: 32, 32, 32")
    depths: PerStage = _per_stage("layers of each stage; default: 2, 6, 4")
    heads: PerStage = _per_stage("attention heads; default: 2, 4, 8")
    stride: int | None = _size("pixels between patches; default: 4, at 224 pixels 8")


@timm_family(
    PitParams,
    "timm.models.pit.PoolingVisionTransformer",
    small={"head_dims": (32, 32, 32), "depths": (2, 6, 4), "heads": (2, 4, 8), "patch": 4, "stride": 4},
    standard={"patch": 16, "stride": 8},
)
def pit(request: ModelRequest, sizes: Sizes) -> Sizes:
    """PiT-Ti, whose patches overlap by half; small images get 8 x 8 patches that do not."""
    check_stages(sizes, "depths", "heads", "head_dims")
    return {
        **_renamed(sizes, head_dims="base_dims", depths="depth"),
        "img_size": request.image_size,
        "patch_size": request.config.patch_size or sizes["patch"],
    }


class PvtParams(Table):
    """PVT v2 with keys and values of a reduced grid (Wang et al., 2022)."""

    dims: PerStage = _per_stage("widths; default: 32, 64, 160, 256")
    depths: PerStage = _per_stage("layers of each stage; default: 2, 2, 2, 2")
    heads: PerStage = _per_stage("attention heads; default: 1, 2, 5, 8")
    mlp_ratios: PerStage = _per_stage("MLP widths over embedding widths; default: 8, 8, 4, 4")
    reductions: PerStage = _per_stage("strides of keys and values; default: 4, 2, 1, 1, at 224 pixels 8, 4, 2, 1")


PVT_V2_B0 = {"dims": (32, 64, 160, 256), "depths": (2, 2, 2, 2), "heads": (1, 2, 5, 8), "mlp_ratios": (8, 8, 4, 4)}


@timm_family(
    PvtParams,
    "timm.models.pvt_v2.PyramidVisionTransformerV2",
    small={**PVT_V2_B0, "reductions": (4, 2, 1, 1)},
    standard={"reductions": (8, 4, 2, 1)},
)
def pvt(request: ModelRequest, sizes: Sizes) -> Sizes:
    """PVT v2-B0. Its first tokens are of 4 x 4 pixels at any image size; on a small grid less of it is reduced."""
    check_stages(sizes, "dims", "depths", "heads", "mlp_ratios", "reductions")
    return _renamed(sizes, dims="embed_dims", heads="num_heads", reductions="sr_ratios")


class SwinParams(Table):
    """Swin with attention in shifted windows (Liu et al., 2021)."""

    dim: int | None = _size("width of the first stage, doubled in each next one; default: 64, at 224 pixels 96", 8)
    depths: PerStage = _per_stage("layers of each stage; default: 2, 2, 6, at 224 pixels 2, 2, 6, 2")
    heads: PerStage = _per_stage("attention heads; default: 2, 4, 8, at 224 pixels 3, 6, 12, 24")
    window: int | None = _size("side of a window in tokens; default: 4, at 224 pixels 7")


@timm_family(
    SwinParams,
    "timm.models.swin_transformer.SwinTransformer",
    small={"dim": 64, "depths": (2, 2, 6), "heads": (2, 4, 8), "window": 4, "patch": 4},
    standard={"dim": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "window": 7},
)
def swin(request: ModelRequest, sizes: Sizes) -> Sizes:
    """Swin-T; for small images three stages of 8 x 8, 4 x 4 and 2 x 2 tokens."""
    check_stages(sizes, "depths", "heads")
    for stage, heads in enumerate(sizes["heads"]):
        check_divides(heads, sizes["dim"] * 2**stage)
    return {
        **_cut_images(request, sizes),
        **_renamed(sizes, dim="embed_dim", heads="num_heads", window="window_size"),
        "drop_path_rate": 0.0,  # every random draw of a run has an address, but stochastic depth has none
    }


@register_part_paths("timm.models.cait.Cait")
def cait_part_paths(vit: Any) -> PartPaths:
    """Return the parts of a CaiT: self-attention blocks, then class-attention blocks. Patches can be dropped."""
    from timm.layers import PatchEmbed

    maskable = isinstance(vit.patch_embed, PatchEmbed)
    return PartPaths(
        blocks=(*block_paths(vit), *block_paths(vit, "blocks_token_only")),
        head=head_paths(vit),
        num_patches=vit.patch_embed.num_patches if maskable else 0,
        forward_kept=forward_kept if maskable else None,
    )


def forward_kept(vit: Any, images: Tensor, keep: Tensor) -> Tensor:
    """Return a CaiT's logits of images of which only some patches are embedded."""
    kernel = vit.patch_embed.proj.weight
    kept = kept_patches(images, kernel.shape[-1], keep)
    embedded = linear(kept, kernel.flatten(1), vit.patch_embed.proj.bias)
    tokens = vit.blocks(vit.patch_embed.norm(embedded) + vit.pos_embed[0][keep])
    class_token = vit.cls_token.expand(tokens.shape[0], -1, -1)
    for block in vit.blocks_token_only:
        class_token = block(tokens, class_token)
    logits: Tensor = vit.forward_head(vit.norm(torch.cat([class_token, tokens], dim=1)))
    return logits


@register_part_paths("timm.models.levit.Levit")
def levit_part_paths(vit: Any) -> PartPaths:
    """Return the parts of a LeViT: the attention between two stages is a block of its own."""
    blocks: list[str] = []
    for index, stage in enumerate(vit.stages):
        if not isinstance(stage.downsample, nn.Identity):
            blocks.append(f"stages.{index}.downsample")
        blocks += [f"stages.{index}.blocks.{block}" for block in range(len(stage.blocks))]
    return PartPaths(blocks=tuple(blocks), head=head_paths(vit), norm=(), lora_targets=LEVIT_LORA_TARGETS)
