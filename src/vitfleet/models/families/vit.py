"""The plain ViT: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021.

Names, shapes, order and initial values of its weights are those of timm's ``VisionTransformer``, so that weights and
exported models are exchanged with timm as they are. It is written here because a device needs no other model: timm
requires torchvision, and importing both takes longer than importing torch.

DeiT's and timm's other plain ViTs have their parts in the same places, with more prefix tokens or another pooling.
Those that differ from :class:`PlainViT` in nothing but sizes are built by it under timm's names: a device trains the
models of the papers without timm, and a command starts more than a second earlier.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.config.registry import NoParams, register_model
from vitfleet.errors import UserError
from vitfleet.models.families.request import ModelRequest, check_patch_size, refuse_hub_weights
from vitfleet.models.forward.functional_vit import FORWARD_PASS, FunctionalViT
from vitfleet.models.parts import PartPaths, default_part_paths, is_instance_of, register_part_paths

INIT_STD = 0.02
CLASS_TOKEN_STD = 1e-6
NORM_EPS = 1e-6
PLAIN_VIT = "vit"
TIMM_VIT = "timm.models.vision_transformer.VisionTransformer"
DEFAULT_PATCH_SIZE = 4
DEFAULT_DEPTH = 4


# Width, depth and heads of timm's models; patch size and image size are in their names.
_SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
# What may follow a name: the training of timm's weights. It decides on nothing else for these.
_TAGS = ("", ".augreg_in1k", ".augreg_in21k", ".augreg_in21k_ft_in1k", ".augreg2_in21k_ft_in1k")
NAMED_VITS = {
    f"vit_{name}_patch{patch_size}_{image_size}{tag}": (*sizes, patch_size, image_size)
    for name, sizes in _SIZES.items()
    for patch_size, image_size in ((16, 224), (16, 384), (32, 224), (32, 384))
    if (name, patch_size) != ("tiny", 32)  # timm has none
    for tag in _TAGS
}
TIMM_MLP_RATIO = 4.0


class PatchEmbed(nn.Module):
    """Embeds the patches of an image, which do not overlap."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        self.grid_size = (image_size // patch_size, image_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(channels, dim, patch_size, patch_size)
        self.norm = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens ``[batch, patches, dim]``."""
        tokens: Tensor = self.norm(self.proj(images).flatten(2).transpose(1, 2))
        return tokens


class SelfAttention(nn.Module):
    """Self-attention with queries, keys and values from one layer; its norms are unused places."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        self.norm = nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the attended values."""
        batch, count, width = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv.unbind(0)
        attended = F.scaled_dot_product_attention(self.q_norm(queries), self.k_norm(keys), values)
        projected: Tensor = self.proj(self.norm(attended.transpose(1, 2).reshape(batch, count, width)))
        return projected


class Mlp(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same width."""
        after: Tensor = self.fc2(self.norm(self.act(self.fc1(tokens))))
        return after


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, qkv_bias: bool, norm_eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = SelfAttention(dim, num_heads, qkv_bias)
        self.ls1 = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.ls2 = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after the block."""
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        after: Tensor = tokens + self.ls2(self.mlp(self.norm2(tokens)))
        return after


class PlainViT(nn.Module):
    """A ViT with a class token, learned positions and a linear classifier.

    ``patch_embed`` returns the tokens of images, ``[batch, patches, dim]``, and has an attribute ``num_patches``.
    """

    # What timm's plain ViTs have in several variants, and this one in one.
    global_pool = "token"
    num_prefix_tokens = 1
    no_embed_class = False
    pool_include_prefix = False
    attn_pool = None

    def __init__(
        self,
        patch_embed: Any,
        num_classes: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool = True,
        norm_eps: float = NORM_EPS,
    ) -> None:
        super().__init__()
        self.embed_dim = self.num_features = dim
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_prefix_tokens + patch_embed.num_patches, dim))
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*(Block(dim, num_heads, mlp_ratio, qkv_bias, norm_eps) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.fc_norm = nn.Identity()
        self.head = nn.Linear(dim, num_classes)
        # In timm's order: the same seed gives the same weights.
        init_normal_(self.pos_embed, INIT_STD)
        if not self.cls_token.is_meta:
            nn.init.normal_(self.cls_token, std=CLASS_TOKEN_STD)
        init_layers_(self, nn.Linear)

    def get_classifier(self) -> nn.Module:
        """Return the head, as timm's models do."""
        return self.head

    def embed(self, images: Tensor) -> Tensor:
        """Return the tokens that enter the first block."""
        patches = self.patch_embed(images)
        # shape[0], not len(): an exported graph takes any number of images, and len() would make it a constant.
        tokens: Tensor = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed
        return tokens

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the tokens after the last norm."""
        features: Tensor = self.norm(self.blocks(self.norm_pre(self.embed(images))))
        return features

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits of the tokens after the last norm, or with ``pre_logits`` the input of the classifier."""
        pooled: Tensor = self.fc_norm(tokens[:, 0])
        return pooled if pre_logits else self.head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.forward_head(self.forward_features(images))


def init_normal_(tensor: Tensor, std: float) -> None:
    """Draw normal numbers, at most 2 in size, by the inverse of their distribution function.

    torch's ``trunc_normal_`` draws by other ways in other versions.
    """
    if tensor.is_meta:  # nothing to draw, and torch computes the shapes of these operations in Python
        return
    with torch.no_grad():
        tensor.uniform_(-1, 1).erfinv_().mul_(std * math.sqrt(2)).clamp_(-2, 2)


def init_layers_(vit: nn.Module, *kinds: type[nn.Linear | nn.Conv2d]) -> None:
    """Draw the weights of all layers of these kinds; their biases are zero."""
    for module in vit.modules():
        if isinstance(module, kinds):
            init_normal_(module.weight, INIT_STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@register_model(PLAIN_VIT)
def build_plain_vit(params: NoParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a plain ViT of the sizes in the table ``model``."""
    refuse_hub_weights(request)
    config, image_size = request.config, request.image_size
    patch_size = config.patch_size or DEFAULT_PATCH_SIZE
    check_patch_size(image_size, patch_size)
    embed = PatchEmbed(image_size, patch_size, request.channels, config.dim)
    depth = config.depth or DEFAULT_DEPTH
    return PlainViT(embed, request.num_classes, config.dim, depth, config.heads, config.mlp_ratio), image_size


def build_named_vit(request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a plain ViT that timm has a name for; image size, patch size and depth may be others, as in timm."""
    config = request.config
    dim, depth, heads, patch_size, image_size = NAMED_VITS[config.name]
    patch_size, image_size = config.patch_size or patch_size, config.image_size or image_size
    check_patch_size(image_size, patch_size)
    embed = PatchEmbed(image_size, patch_size, request.channels, dim)
    return PlainViT(embed, request.num_classes, dim, config.depth or depth, heads, TIMM_MLP_RATIO), image_size


@register_part_paths(TIMM_VIT)
@register_part_paths(PlainViT)
def vit_part_paths(vit: Any) -> PartPaths:
    """Return where a plain ViT keeps its parts. Patches that do not overlap can be dropped before standard blocks."""
    part_paths = default_part_paths(vit)
    if not is_plain_vit(vit):
        return part_paths
    forward_pass = getattr(vit, FORWARD_PASS, FunctionalViT)
    return replace(part_paths, num_patches=vit.patch_embed.num_patches, functional=forward_pass)


def is_plain_vit(vit: Any) -> bool:
    """Whether it is one token sequence with position embeddings through standard blocks."""
    if is_instance_of(vit, TIMM_VIT):
        return _is_plain_timm_vit(vit)
    return isinstance(vit, PlainViT) and isinstance(vit.patch_embed, PatchEmbed)


def require_plain_vit(vit: Any, what: str) -> None:
    """Refuse a model that cannot be given what only a plain ViT with one classifier on its class token can."""
    if not is_plain_vit(vit) or getattr(vit, "dist_token", None) is not None or vit.attn_pool is not None:
        raise UserError(
            f"model.name: a {type(vit).__name__} cannot {what}; choose a plain ViT (vit_*, deit_* that are "
            "not distilled)"
        )


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
