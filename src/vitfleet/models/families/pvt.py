"""PVT: Wang et al., "Pyramid Vision Transformer", 2021, in its second version (2022), which is timm's.

Four stages; between them overlapping convolutions that halve the grid. Keys and values are of a reduced grid. The
layout is the one that timm's naming suggests.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.sizes import check_stages, choose_sizes
from vitfleet.models.request import ModelRequest, refuse_hub_weights

# PVT v2-B0. Its first tokens are of 4 x 4 pixels at any image size; on a small grid less of it is reduced.
STANDARD = {
    "dims": (32, 64, 160, 256),
    "depths": (2, 2, 2, 2),
    "heads": (1, 2, 5, 8),
    "mlp_ratios": (8, 8, 4, 4),
    "reductions": (8, 4, 2, 1),
}
SMALL = {**STANDARD, "reductions": (4, 2, 1, 1)}


class PvtParams(Table):
    """PVT v2 with keys and values of a reduced grid (Wang et al., 2022)."""

    dims: tuple[int, ...] | None = Field(None, strict=False, description="widths; default: 32, 64, 160, 256")
    depths: tuple[int, ...] | None = Field(None, strict=False, description="layers of each stage; default: 2, 2, 2, 2")
    heads: tuple[int, ...] | None = Field(None, strict=False, description="attention heads; default: 1, 2, 5, 8")
    mlp_ratios: tuple[int, ...] | None = Field(
        None, strict=False, description="MLP widths over embedding widths; default: 8, 8, 4, 4"
    )
    reductions: tuple[int, ...] | None = Field(
        None, strict=False, description="strides of keys and values; default: 4, 2, 1, 1, at 224 pixels 8, 4, 2, 1"
    )


@register_model("pvt", PvtParams)
def build_pvt(params: PvtParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a PVT v2."""
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    check_stages(sizes, "dims", "depths", "heads", "mlp_ratios", "reductions")
    vit = PyramidVisionTransformerV2(
        in_chans=request.channels,
        num_classes=request.num_classes,
        depths=sizes["depths"],
        embed_dims=sizes["dims"],
        num_heads=sizes["heads"],
        sr_ratios=sizes["reductions"],
        mlp_ratios=sizes["mlp_ratios"],
    )
    return vit, request.image_size
