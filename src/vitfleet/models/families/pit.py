"""PiT: Heo et al., "Rethinking Spatial Dimensions of Vision Transformers", 2021. The module is timm's.

A ViT in three stages: between them a depthwise convolution halves the grid of the patches, and a linear layer widens
the class token. The layout is the one that timm's naming suggests.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.sizes import check_stages, choose_sizes
from vitfleet.models.request import ModelRequest, refuse_hub_weights

# PiT-Ti, whose patches overlap by half; small images get 8 x 8 patches that do not.
SMALL = {"head_dims": (32, 32, 32), "depths": (2, 6, 4), "heads": (2, 4, 8), "patch": 4, "stride": 4}
STANDARD = {**SMALL, "patch": 16, "stride": 8}


class PitParams(Table):
    """PiT with pooling between its stages (Heo et al., 2021)."""

    head_dims: tuple[int, ...] | None = Field(None, strict=False, description="widths of a head; default: 32, 32, 32")
    depths: tuple[int, ...] | None = Field(None, strict=False, description="layers of each stage; default: 2, 6, 4")
    heads: tuple[int, ...] | None = Field(None, strict=False, description="attention heads; default: 2, 4, 8")
    stride: int | None = Field(None, ge=1, description="pixels between patches; default: 4, at 224 pixels 8")


@register_model("pit", PitParams)
def build_pit(params: PitParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a PiT."""
    from timm.models.pit import PoolingVisionTransformer

    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    check_stages(sizes, "depths", "heads", "head_dims")
    vit = PoolingVisionTransformer(
        img_size=request.image_size,
        patch_size=request.config.patch_size or sizes["patch"],
        stride=sizes["stride"],
        in_chans=request.channels,
        num_classes=request.num_classes,
        base_dims=sizes["head_dims"],
        depth=sizes["depths"],
        heads=sizes["heads"],
    )
    return vit, request.image_size
