"""T2T-ViT: Yuan et al., "Tokens-to-Token ViT", 2021, with transformer layers in its tokens-to-token module (T2T-ViT_t).

An image becomes tokens in three soft splits. A soft split unfolds a grid into overlapping windows; between two splits
a small transformer layer mixes the tokens, and they are put back on a grid. A plain ViT follows, with fixed sinusoidal
positions. timm has no T2T-ViT; layers and sizes are those of the paper.

Tokens are dropped after the tokens-to-token module, which needs the whole image: the blocks see only those kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.config.base import Table
from vitfleet.config.registry import register_model
from vitfleet.message import Tensors, with_prefix
from vitfleet.models.families.request import ModelRequest, check_divides, choose_sizes, refuse_hub_weights
from vitfleet.models.families.vit import PlainViT
from vitfleet.models.forward.functional_vit import FunctionalViT
from vitfleet.models.forward.stacked_ops import gather_tokens, layer_norm, linear
from vitfleet.models.parts import PartPaths, default_part_paths, register_part_paths

Split: TypeAlias = tuple[int, int, int]  # kernel, stride and padding

# T2T-ViT-7. Its splits reduce an image by 16; those of small images by 4.
SIZES = {"dim": 256, "depth": 7, "heads": 4, "mlp_ratio": 2.0, "token_dim": 64}
SMALL_SPLITS: tuple[Split, ...] = ((3, 2, 1), (3, 2, 1), (3, 1, 1))
STANDARD_SPLITS: tuple[Split, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
SMALL, STANDARD = {**SIZES, "splits": SMALL_SPLITS}, {**SIZES, "splits": STANDARD_SPLITS}
NORM_EPS = 1e-5


class T2tParams(Table):
    """T2T-ViT with overlapping splits into tokens (Yuan et al., 2021)."""

    dim: int | None = Field(None, ge=8, description="embedding width; default: 256")
    depth: int | None = Field(None, ge=1, description="number of layers after the splits; default: 7")
    heads: int | None = Field(None, ge=1, description="attention heads; default: 4")
    mlp_ratio: float | None = Field(None, gt=0, description="MLP width over embedding width; default: 2")
    token_dim: int | None = Field(None, ge=1, description="width between the splits; default: 64")


class TokenTransformer(nn.Module):
    """The weights of a layer between two splits: it narrows its tokens, so values take the place of a residual."""

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs, eps=NORM_EPS)
        self.qkv = nn.Linear(inputs, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)


class TokensToToken(nn.Module):
    """The tokens-to-token module."""

    def __init__(self, channels: int, image_size: int, dim: int, token_dim: int, splits: tuple[Split, ...]) -> None:
        super().__init__()
        self.splits = splits
        side = image_size
        for kernel, stride, padding in splits:
            side = (side + 2 * padding - kernel) // stride + 1
        self.num_patches = side**2
        inputs = [channels * splits[0][0] ** 2, *(token_dim * kernel**2 for kernel, _, _ in splits[1:])]
        self.layers = nn.ModuleList(TokenTransformer(width, token_dim) for width in inputs[:-1])
        self.proj = nn.Linear(inputs[-1], dim)

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens of images."""
        return tokens_to_token(dict(self.named_parameters()), images, self.splits)


def tokens_to_token(weights: Tensors, images: Tensor, splits: tuple[Split, ...]) -> Tensor:
    """Return the tokens of images, of one client or of several stacked, ``[…, tokens, dim]``."""
    grid = images
    for index, split in enumerate(splits[:-1]):
        tokens = _transform(with_prefix(weights, f"layers.{index}."), soft_split(grid, split))
        side = round(tokens.shape[-2] ** 0.5)
        grid = tokens.mT.reshape(*tokens.shape[:-2], -1, side, side)
    return linear(soft_split(grid, splits[-1]), weights["proj.weight"], weights["proj.bias"])


def soft_split(grid: Tensor, split: Split) -> Tensor:
    """Unfold overlapping windows: ``[…, channels, height, width]`` to ``[…, windows, channels · kernel²]``."""
    kernel, stride, padding = split
    windows = F.unfold(grid.flatten(0, -4), kernel, padding=padding, stride=stride).mT
    return windows.reshape(*grid.shape[:-3], *windows.shape[1:])


def _transform(weights: Tensors, tokens: Tensor) -> Tensor:
    """Run a layer between two splits, which has one attention head."""
    scale = tokens.shape[-1] ** -0.5  # by the width of its inputs, as in the authors' code
    normed = layer_norm(tokens, weights["norm1.weight"], weights["norm1.bias"], NORM_EPS)
    queries, keys, values = linear(normed, weights["qkv.weight"], None).chunk(3, dim=-1)
    q, k, v = (part.flatten(0, -3).unsqueeze(1) for part in (queries, keys, values))
    attended = F.scaled_dot_product_attention(q, k, v, scale=scale).reshape(values.shape)
    tokens = values + linear(attended, weights["proj.weight"], weights["proj.bias"])
    normed = layer_norm(tokens, weights["norm2.weight"], weights["norm2.bias"], NORM_EPS)
    hidden = F.gelu(linear(normed, weights["fc1.weight"], weights["fc1.bias"]))
    return tokens + linear(hidden, weights["fc2.weight"], weights["fc2.bias"])


def sinusoids(positions: int, dim: int) -> Tensor:
    """Return fixed position embeddings: sines in even columns, cosines in odd ones, ``[1, positions, dim]``."""
    columns = torch.arange(dim, dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(-1) / 10000 ** (2 * (columns // 2) / dim)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float().unsqueeze(0)


class T2TViT(PlainViT):
    """A plain ViT behind a tokens-to-token module, with fixed positions."""

    def __init__(self, embed: TokensToToken, **arguments: Any) -> None:
        super().__init__(embed, **arguments)
        del self.pos_embed
        self.register_buffer("pos_embed", sinusoids(embed.num_patches + 1, self.embed_dim), persistent=False)


class FunctionalT2T(FunctionalViT):
    """The forward pass of a T2T-ViT: that of a plain ViT with another embedding."""

    def embed_patches(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Return the tokens of the tokens-to-token module that are kept."""
        tokens = tokens_to_token(with_prefix(weights, "patch_embed."), images, self.vit.patch_embed.splits)
        return tokens if keep is None else gather_tokens(tokens, keep)

    def positions(self, weights: Tensors) -> Tensor:
        """Return the fixed positions, which are no weights."""
        positions: Tensor = self.vit.pos_embed
        return positions


@register_part_paths(T2TViT)
def t2t_part_paths(vit: Any) -> PartPaths:
    """Return where the parts are: as in a plain ViT; the tokens-to-token module is the embedding."""
    return replace(default_part_paths(vit), num_patches=vit.patch_embed.num_patches, functional=FunctionalT2T)


@register_model("t2t", T2tParams)
def build_t2t(params: T2tParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a T2T-ViT."""
    refuse_hub_weights(request)
    sizes = choose_sizes(params, request.image_size, SMALL, STANDARD)
    check_divides(sizes["heads"], sizes["dim"])
    embed = TokensToToken(request.channels, request.image_size, sizes["dim"], sizes["token_dim"], sizes["splits"])
    vit = T2TViT(
        embed,
        num_classes=request.num_classes,
        dim=sizes["dim"],
        depth=sizes["depth"],
        num_heads=sizes["heads"],
        mlp_ratio=sizes["mlp_ratio"],
        qkv_bias=False,
        norm_eps=NORM_EPS,
    )
    return vit, request.image_size
