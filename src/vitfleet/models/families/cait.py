"""CaiT: Touvron et al., "Going deeper with Image Transformers", 2021. The module is timm's.

The patches pass through self-attention blocks without a class token; then class-attention blocks read them into one.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.sizes import check_divides, choose_sizes
from vitfleet.models.layout import Layout, block_paths, head_paths, register_layout
from vitfleet.models.request import ModelRequest, check_patch_size, refuse_hub_weights
from vitfleet.models.stacked_ops import kept_patches, linear

# CaiT-XXS24; for small images with smaller patches and half of its layers. Deep CaiTs have a smaller layer scale.
SMALL = {"dim": 192, "depth": 12, "class_depth": 2, "heads": 4, "patch": 4}
STANDARD = {**SMALL, "depth": 24, "patch": 16}
LAYER_SCALE = 1e-5


class CaitParams(Table):
    """CaiT with class-attention layers at its end (Touvron et al., 2021)."""

    dim: int | None = Field(None, ge=8, description="embedding width; default: 192")
    depth: int | None = Field(None, ge=1, description="self-attention layers; default: 12, at 224 pixels 24")
    class_depth: int | None = Field(None, ge=1, description="class-attention layers; default: 2")
    heads: int | None = Field(None, ge=1, description="attention heads; default: 4")


@register_model("cait", CaitParams)
def build_cait(params: CaitParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a CaiT."""
    from timm.models.cait import Cait

    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    patch_size = request.config.patch_size or sizes["patch"]
    check_patch_size(request.image_size, patch_size)
    check_divides(sizes["heads"], sizes["dim"])
    vit = Cait(
        img_size=request.image_size,
        patch_size=patch_size,
        in_chans=request.channels,
        num_classes=request.num_classes,
        embed_dim=sizes["dim"],
        depth=sizes["depth"],
        depth_token_only=sizes["class_depth"],
        num_heads=sizes["heads"],
        init_values=LAYER_SCALE,
    )
    return vit, request.image_size


@register_layout("timm.models.cait.Cait")
def cait_layout(vit: Any) -> Layout:
    """Return the layout: self-attention blocks, then class-attention blocks. Patches can be dropped."""
    from timm.layers import PatchEmbed

    maskable = isinstance(vit.patch_embed, PatchEmbed)
    return Layout(
        blocks=(*block_paths(vit), *block_paths(vit, "blocks_token_only")),
        head=head_paths(vit),
        num_patches=vit.patch_embed.num_patches if maskable else 0,
        forward_kept=forward_kept if maskable else None,
    )


def forward_kept(vit: Any, images: Tensor, keep: Tensor) -> Tensor:
    """Return the logits of images of which only some patches are embedded."""
    kernel = vit.patch_embed.proj.weight
    kept = kept_patches(images, kernel.shape[-1], keep)
    embedded = linear(kept, kernel.flatten(1), vit.patch_embed.proj.bias)
    tokens = vit.blocks(vit.patch_embed.norm(embedded) + vit.pos_embed[0][keep])
    class_token = vit.cls_token.expand(tokens.shape[0], -1, -1)
    for block in vit.blocks_token_only:
        class_token = block(tokens, class_token)
    logits: Tensor = vit.forward_head(vit.norm(torch.cat([class_token, tokens], dim=1)))
    return logits
