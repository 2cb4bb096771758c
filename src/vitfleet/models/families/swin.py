"""Swin: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021.

The module is timm's, the layout the one that timm's naming suggests. Attention is within windows, which are shifted in
every second block; between stages four patches are merged into one.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.sizes import check_divides, check_stages, choose_sizes
from vitfleet.models.request import ModelRequest, check_patch_size, refuse_hub_weights

# Swin-T; for small images three stages of 8 x 8, 4 x 4 and 2 x 2 tokens.
SMALL = {"dim": 64, "depths": (2, 2, 6), "heads": (2, 4, 8), "window": 4}
STANDARD = {"dim": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "window": 7}
PATCH_SIZE = 4


class SwinParams(Table):
    """Swin with attention in shifted windows (Liu et al., 2021)."""

    dim: int | None = Field(
        None, ge=8, description="width of the first stage, doubled in each next one; default: 64, at 224 pixels 96"
    )
    depths: tuple[int, ...] | None = Field(
        None, strict=False, description="layers of each stage; default: 2, 2, 6, at 224 pixels 2, 2, 6, 2"
    )
    heads: tuple[int, ...] | None = Field(
        None, strict=False, description="attention heads; default: 2, 4, 8, at 224 pixels 3, 6, 12, 24"
    )
    window: int | None = Field(None, ge=1, description="side of a window in tokens; default: 4, at 224 pixels 7")


@register_model("swin", SwinParams)
def build_swin(params: SwinParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a Swin."""
    from timm.models.swin_transformer import SwinTransformer

    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    check_stages(sizes, "depths", "heads")
    for stage, heads in enumerate(sizes["heads"]):
        check_divides(heads, sizes["dim"] * 2**stage)
    patch_size = request.config.patch_size or PATCH_SIZE
    check_patch_size(request.image_size, patch_size)
    vit = SwinTransformer(
        img_size=request.image_size,
        patch_size=patch_size,
        in_chans=request.channels,
        num_classes=request.num_classes,
        embed_dim=sizes["dim"],
        depths=sizes["depths"],
        num_heads=sizes["heads"],
        window_size=sizes["window"],
        drop_path_rate=0.0,  # every random draw of a run has an address, but stochastic depth has none
    )
    return vit, request.image_size
