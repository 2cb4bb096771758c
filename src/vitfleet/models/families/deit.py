"""DeiT: Touvron et al., "Training data-efficient image transformers", 2021: a plain ViT with a distillation token.

The module is timm's. There is no teacher: both heads are trained on the labels, and their logits are averaged. The
layout is the plain ViT's.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.sizes import check_divides, choose_sizes
from vitfleet.models.request import ModelRequest, check_patch_size, refuse_hub_weights

# DeiT-Tiny; for small images with smaller patches.
SMALL = {"dim": 192, "depth": 12, "heads": 3, "patch": 4}
STANDARD = {**SMALL, "patch": 16}


class DeitParams(Table):
    """DeiT with a distillation token (Touvron et al., 2021)."""

    dim: int | None = Field(None, ge=8, description="embedding width; default: 192")
    depth: int | None = Field(None, ge=1, description="number of layers; default: 12")
    heads: int | None = Field(None, ge=1, description="attention heads; default: 3")


@register_model("deit", DeitParams)
def build_deit(params: DeitParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a DeiT."""
    from timm.models.deit import VisionTransformerDistilled

    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    patch_size = request.config.patch_size or sizes["patch"]
    check_patch_size(request.image_size, patch_size)
    check_divides(sizes["heads"], sizes["dim"])
    vit = VisionTransformerDistilled(
        img_size=request.image_size,
        patch_size=patch_size,
        in_chans=request.channels,
        num_classes=request.num_classes,
        embed_dim=sizes["dim"],
        depth=sizes["depth"],
        num_heads=sizes["heads"],
    )
    return vit, request.image_size
