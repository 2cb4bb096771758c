"""The plain ViT: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021.

DeiT's and timm's other plain ViTs have the same layout, with more prefix tokens or another pooling. Those that differ
from :class:`PlainViT` in nothing but sizes are built by it under timm's names: a device trains the models of the papers
without timm, and a command starts more than a second earlier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from vitfleet.config.registry import NoParams, register_model
from vitfleet.models.functional_vit import FORWARD_PASS, FunctionalViT
from vitfleet.models.layout import Layout, default_layout, is_instance_of, register_layout
from vitfleet.models.plain_vit import PatchEmbed, PlainViT
from vitfleet.models.request import ModelRequest, check_patch_size, refuse_hub_weights

PLAIN_VIT = "vit"
TIMM_VIT = "timm.models.vision_transformer.VisionTransformer"
DEFAULT_PATCH_SIZE = 4
DEFAULT_DEPTH = 4


class NamedSizes(NamedTuple):
    """Sizes of a model of timm; its patches and images are in its name."""

    dim: int
    depth: int
    num_heads: int
    patch_size: int
    image_size: int


_SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
# What may follow a name: the training of timm's weights. It decides on nothing else for these.
_TAGS = ("", ".augreg_in1k", ".augreg_in21k", ".augreg_in21k_ft_in1k", ".augreg2_in21k_ft_in1k")
NAMED_VITS = {
    f"vit_{name}_patch{patch_size}_{image_size}{tag}": NamedSizes(*sizes, patch_size, image_size)
    for name, sizes in _SIZES.items()
    for patch_size, image_size in ((16, 224), (16, 384), (32, 224), (32, 384))
    if (name, patch_size) != ("tiny", 32)  # timm has none
    for tag in _TAGS
}
TIMM_MLP_RATIO = 4.0


@register_model(PLAIN_VIT)
def build_plain_vit(params: NoParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a plain ViT of the sizes in the table ``model``."""
    refuse_hub_weights(request)
    config, image_size = request.config, request.image_size
    patch_size = config.patch_size or DEFAULT_PATCH_SIZE
    check_patch_size(image_size, patch_size)
    vit = PlainViT(
        PatchEmbed(image_size, patch_size, request.channels, config.dim),
        num_classes=request.num_classes,
        dim=config.dim,
        depth=config.depth or DEFAULT_DEPTH,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
    )
    return vit, image_size


def build_named_vit(request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a plain ViT that timm has a name for; image size, patch size and depth may be others, as in timm."""
    config, sizes = request.config, NAMED_VITS[request.config.name]
    image_size = config.image_size or sizes.image_size
    patch_size = config.patch_size or sizes.patch_size
    check_patch_size(image_size, patch_size)
    embed = PatchEmbed(image_size, patch_size, request.channels, sizes.dim)
    depth = config.depth or sizes.depth
    return PlainViT(embed, request.num_classes, sizes.dim, depth, sizes.num_heads, TIMM_MLP_RATIO), image_size


@register_layout(TIMM_VIT)
@register_layout(PlainViT)
def vit_layout(vit: Any) -> Layout:
    """Return the layout. Patches can be dropped in front of standard blocks, if they do not overlap."""
    layout = default_layout(vit)
    if not is_plain_vit(vit):
        return layout
    forward_pass = getattr(vit, FORWARD_PASS, FunctionalViT)
    return Layout(layout.blocks, layout.head, num_patches=vit.patch_embed.num_patches, functional=forward_pass)


def is_plain_vit(vit: Any) -> bool:
    """Whether it is one token sequence with position embeddings through standard blocks."""
    if is_instance_of(vit, TIMM_VIT):
        return _is_plain_timm_vit(vit)
    return isinstance(vit, PlainViT) and isinstance(vit.patch_embed, PatchEmbed)


def _is_plain_timm_vit(vit: Any) -> bool:
    from timm.layers import PatchEmbed as TimmPatchEmbed

    return (
        vit.pos_embed is not None
        and (vit.attn_pool is not None or vit.global_pool in ("token", "avg"))
        and isinstance(vit.patch_embed, TimmPatchEmbed)  # not a convolutional stem, whose patches overlap
        and all(isinstance(norm, nn.Identity | nn.LayerNorm) for norm in (vit.norm_pre, vit.norm, vit.fc_norm))
        and isinstance(vit.patch_embed.norm, nn.Identity | nn.LayerNorm)
        and all(_is_standard_block(block) for block in vit.blocks)
    )


def _is_standard_block(block: Any) -> bool:
    """Whether a block of timm consists of layers that :class:`FunctionalViT` has."""
    from timm.layers import Attention, LayerScale, Mlp
    from timm.models.vision_transformer import Block

    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return False
    attention, mlp = block.attn, block.mlp
    norms = (block.norm1, block.norm2, attention.q_norm, attention.k_norm, attention.norm, mlp.norm)
    return (
        all(isinstance(norm, nn.Identity | nn.LayerNorm) for norm in norms)
        and all(isinstance(scale, nn.Identity | LayerScale) for scale in (block.ls1, block.ls2))
        and getattr(attention, "gate", None) is None
        and isinstance(mlp.fc1, nn.Linear)
    )
