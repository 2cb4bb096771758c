"""CvT: Wu et al., "CvT: Introducing Convolutions to Vision Transformers", 2021.

Three stages. Each begins with a convolution that embeds the grid before it. In a block queries, keys and values pass
through a depthwise convolution with batch norm; keys and values are of half the grid. There are no positions. The last
stage has a class token. timm has no CvT; layers and sizes are those of the paper.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.models.families.request import ModelRequest, check_divides, check_stages, choose_sizes, refuse_hub_weights
from vitfleet.models.families.vit import INIT_STD, Mlp, init_layers_, init_normal_

# CvT-13 has 20 million parameters; the small configuration has 5.
STANDARD = {"dims": (64, 192, 384), "depths": (1, 2, 10), "heads": (1, 3, 6)}
SMALL = {"dims": (64, 128, 256), "depths": (1, 2, 6), "heads": (1, 2, 4)}
EMBEDDINGS = ((7, 4, 2), (3, 2, 1))  # kernel, stride and padding of the first embedding and of the others


class CvtParams(Table):
    """CvT with convolutional embeddings and projections (Wu et al., 2021)."""

    dims: tuple[int, ...] | None = Field(
        None, strict=False, description="widths; default: 64, 128, 256, at 224 pixels 64, 192, 384"
    )
    depths: tuple[int, ...] | None = Field(
        None, strict=False, description="layers of each stage; default: 1, 2, 6, at 224 pixels 1, 2, 10"
    )
    heads: tuple[int, ...] | None = Field(
        None, strict=False, description="attention heads; default: 1, 2, 4, at 224 pixels 1, 3, 6"
    )


def to_grid(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Return tokens ``[batch, tokens, dim]`` as a grid ``[batch, dim, height, width]``."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, *size)


class ConvEmbedding(nn.Module):
    """Overlapping patches of a grid as tokens: ``[batch, dim, height, width]``."""

    def __init__(self, channels: int, dim: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel, stride, padding)
        self.norm = nn.LayerNorm(dim)

    def forward(self, grid: Tensor) -> Tensor:
        """Return the embedded grid."""
        embedded = self.proj(grid)
        normed: Tensor = self.norm(embedded.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class ConvProjection(nn.Module):
    """A depthwise convolution with batch norm; the class token, which is not on the grid, passes by it."""

    def __init__(self, dim: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, tokens: Tensor, grid: Tensor, class_tokens: int) -> Tensor:
        """Return the tokens of the convolved grid after the class tokens."""
        convolved: Tensor = self.bn(self.conv(grid)).flatten(2).transpose(1, 2)
        return torch.cat([tokens[:, :class_tokens], convolved], dim=1)


class ConvAttention(nn.Module):
    """Self-attention whose projections begin with a convolution.

    The scores are scaled by the width of the tokens, as in the authors' code, not by that of a head.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = dim**-0.5
        self.conv_q, self.conv_k, self.conv_v = (ConvProjection(dim, stride) for stride in (1, 2, 2))
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, tokens: Tensor, size: tuple[int, int], class_tokens: int) -> Tensor:
        """Return the attended values; the tokens after the class tokens are a grid of ``size``."""
        grid = to_grid(tokens[:, class_tokens:], size)
        queries, keys, values = (
            self._split_heads(linear(convolve(tokens, grid, class_tokens)))
            for linear, convolve in ((self.q, self.conv_q), (self.k, self.conv_k), (self.v, self.conv_v))
        )
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=self.scale)
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _split_heads(self, tokens: Tensor) -> Tensor:
        return tokens.reshape(*tokens.shape[:2], self.heads, -1).transpose(1, 2)


class ConvBlock(nn.Module):
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = ConvAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, tokens: Tensor, size: tuple[int, int], class_tokens: int) -> Tensor:
        """Return the tokens after the block."""
        tokens = tokens + self.attn(self.norm1(tokens), size, class_tokens)
        after: Tensor = tokens + self.mlp(self.norm2(tokens))
        return after


class Stage(nn.Module):
    """An embedding and blocks; the last stage puts a class token before the grid's tokens."""

    cls_token: Tensor | None

    def __init__(self, channels: int, dim: int, depth: int, heads: int, first: bool, last: bool) -> None:
        super().__init__()
        self.register_parameter("cls_token", nn.Parameter(torch.zeros(1, 1, dim)) if last else None)
        self.embed = ConvEmbedding(channels, dim, *EMBEDDINGS[0 if first else 1])
        self.blocks = nn.ModuleList(ConvBlock(dim, heads) for _ in range(depth))

    def forward(self, grid: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens after the blocks, and the size of their grid."""
        embedded = self.embed(grid)
        size = (embedded.shape[-2], embedded.shape[-1])
        tokens = embedded.flatten(2).transpose(1, 2)
        class_tokens = 0 if self.cls_token is None else 1
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens, size, class_tokens)
        return tokens, size


class CvT(nn.Module):
    """A convolutional vision transformer; its parts are where timm's naming suggests."""

    def __init__(
        self, channels: int, num_classes: int, dims: tuple[int, ...], depths: tuple[int, ...], heads: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.num_features = dims[-1]
        inputs = (channels, *dims[:-1])
        self.stages = nn.ModuleList(
            Stage(inputs[i], dims[i], depths[i], heads[i], first=i == 0, last=i == len(dims) - 1)
            for i in range(len(dims))
        )
        self.norm = nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], num_classes)
        init_layers_(self, nn.Linear, nn.Conv2d)
        init_normal_(self.stages[-1].get_parameter("cls_token"), INIT_STD)

    def get_classifier(self) -> nn.Module:
        """Return the head, as timm's models do."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        grid = images
        for stage in self.stages:
            tokens, size = stage(grid)
            grid = to_grid(tokens, size) if stage.cls_token is None else grid
        logits: Tensor = self.head(self.norm(tokens)[:, 0])
        return logits


@register_model("cvt", CvtParams)
def build_cvt(params: CvtParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a CvT."""
    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    check_stages(sizes, "dims", "depths", "heads")
    for heads, dim in zip(sizes["heads"], sizes["dims"], strict=True):
        check_divides(heads, dim)
    vit = CvT(request.channels, request.num_classes, sizes["dims"], sizes["depths"], sizes["heads"])
    return vit, request.image_size
