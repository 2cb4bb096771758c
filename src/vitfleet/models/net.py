"""A vision transformer as a pure function of its weights, with token dropping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.models.anatomy import Anatomy, dissect


class Forward(nn.Module):
    """Runs a timm ViT; of a masked image only the kept patches are ever embedded."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return logits; ``keep`` holds the kept patches' positions, ``[batch, kept]``."""
        vit: Any = self.vit  # timm's models are untyped
        if keep is None:
            return cast(Tensor, vit(images))
        tokens = vit.norm_pre(embed_kept(vit, images, keep))
        for block in vit.blocks:
            tokens = block(tokens)
        return cast(Tensor, vit.forward_head(vit.norm(tokens)))


def embed_kept(vit: Any, images: Tensor, keep: Tensor) -> Tensor:
    """Cut an image into patches, drop the others, embed the kept with their own positions, prepend tokens."""
    projection: nn.Conv2d = vit.patch_embed.proj
    side = projection.kernel_size[0]
    patches = F.unfold(images, side, stride=side).transpose(1, 2)
    kept = patches.gather(1, keep[:, :, None].expand(-1, -1, patches.shape[-1]))
    tokens: Tensor = vit.patch_embed.norm(F.linear(kept, projection.weight.flatten(1), projection.bias))
    # Prefix tokens in timm's order: class, distillation, registers; with or without positions of their own.
    prefix = [
        token
        for name in ("cls_token", "dist_token", "reg_token")
        if (token := getattr(vit, name, None)) is not None
    ]
    count = sum(token.shape[1] for token in prefix)
    positions: Tensor = vit.pos_embed
    own = 0 if vit.no_embed_class else count
    tokens = tokens + positions[0, own:][keep]
    if not prefix:
        return tokens
    head = torch.cat(prefix, dim=1)
    if own:
        head = head + positions[:, :own]
    return torch.cat([head.expand(tokens.shape[0], -1, -1), tokens], dim=1)


@dataclass(frozen=True)
class Net:
    """One architecture, without weights of its own: they are an argument of every call.

    Attributes
    ----------
    anatomy
        The names of its weights, by part.
    patches
        Patches of a whole image, 0 for a family whose tokens cannot be dropped.
    side, mean, std
        The input it takes: pixels a side, and the normalisation of pixels in 0…1.
    """

    module: Forward
    anatomy: Anatomy
    patches: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, weights: Tensors, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the logits of these images under these weights."""
        inner = {f"vit.{name}": tensor for name, tensor in weights.items()}
        return cast(Tensor, functional_call(self.module, inner, (images, keep), tie_weights=False))

    def initial_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights the architecture was built with."""
        state = self.module.vit.state_dict()
        return {name: state[name].detach().clone() for name in self.anatomy.shapes}

    def to(self, device: torch.device) -> Net:
        """Move the architecture's constants (index tables of some families) to a device."""
        self.module.to(device)
        return self

    def kept(self, mask_ratio: float) -> int:
        """Return how many patches a mask leaves: a constant, so that shapes are static."""
        if mask_ratio == 0:
            return self.patches
        if not self.patches:
            family = type(self.module.vit).__name__
            raise UserError(
                f"train.mask_ratio = {mask_ratio}: must be 0, a {family} has no tokens that can be dropped"
            )
        # Rounded the way the papers count: 196 patches at 0.75 leave 49, at 0.60 leave 78.
        return max(1, int(self.patches * (1 - mask_ratio) + 1e-6))


def as_net(vit: Any, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Net:
    """Wrap a timm model."""
    plain = isinstance(vit, VisionTransformer) and vit.pos_embed is not None
    patches = vit.patch_embed.num_patches if plain else 0
    return Net(Forward(vit), dissect(vit), patches, side, mean, std)
