"""A vision transformer as a pure function of its weights, with token dropping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.models.anatomy import Anatomy, can_drop_tokens, dissect, is_plain_vit
from vitfleet.models.functional_vit import FunctionalViT, affine, cut


class TimmWrapper(nn.Module):
    """Holds a timm model, its weights under ``vit.``; runs it as it is, or a CaiT on some patches."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the logits of images, of which only the patches at these positions are embedded."""
        if keep is None:
            return cast(Tensor, self.vit(images))
        vit: Any = self.vit
        kernel = vit.patch_embed.proj.weight
        patches = cut(images, kernel.shape[-1])
        kept = patches.gather(1, keep.unsqueeze(-1).expand(*keep.shape, patches.shape[-1]))
        rows = affine(kept, kernel.flatten(1), vit.patch_embed.proj.bias)
        tokens = vit.blocks(vit.patch_embed.norm(rows) + vit.pos_embed[0][keep])
        token = vit.cls_token.expand(len(tokens), -1, -1)
        for block in vit.blocks_token_only:
            token = block(tokens, token)
        return cast(Tensor, vit.forward_head(vit.norm(torch.cat([token, tokens], dim=1))))


@dataclass(frozen=True)
class Net:
    """One architecture, without weights of its own: they are an argument of every call.

    Attributes
    ----------
    anatomy
        The names of its weights, by part.
    plain
        The forward pass of a plain ViT; ``None`` for any other family, whose module is run as it is.
    patches
        Patches of a whole image, 0 for a family whose tokens cannot be dropped.
    prefix, width
        Tokens that stand before the patches (class token, registers), and the numbers in a token.
    side, mean, std
        The input it takes: pixels a side, and the normalisation of pixels in 0…1.
    """

    module: TimmWrapper
    anatomy: Anatomy
    functional: FunctionalViT | None
    num_patches: int
    num_prefix_tokens: int
    embed_dim: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def stackable(self) -> bool:
        """Whether weights may have a leading axis of clients."""
        return self.functional is not None and self.module.vit.attn_pool is None

    def __call__(
        self, weights: Tensors, images: Tensor, keep: Tensor | None = None, depth: int | None = None
    ) -> Tensor:
        """Return the logits of these images under these weights.

        Parameters
        ----------
        keep
            Positions of the patches that are kept; the others are never embedded.
        depth
            Blocks of the model, where it is not all of them: the others are left out.
        """
        blocks = self.anatomy.blocks[depth:] if depth is not None else ()
        needed = self.anatomy.shapes.keys() - {name for block in blocks for name in block}
        if missing := needed - weights.keys():
            raise KeyError(f"{len(missing)} of the model's weights are missing, {min(missing)} among them")
        if self.functional is None:
            inner = {f"vit.{name}": tensor for name, tensor in weights.items()}
            return cast(Tensor, functional_call(self.module, inner, (images, keep), tie_weights=False))
        return self.functional(weights, images, keep, 0, None, depth)

    def forward_to(self, weights: Tensors, images: Tensor, keep: Tensor | None, block: int) -> Tensor:
        """Return the tokens that enter a block: the patch features of the module before it."""
        assert self.functional is not None
        return self.functional(weights, images, keep, 0, block, None)

    def forward_from(self, weights: Tensors, tokens: Tensor, block: int) -> Tensor:
        """Return the logits of tokens that enter a block."""
        assert self.functional is not None
        return self.functional(weights, tokens, None, block, None, None)

    def initial_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights the architecture was built with."""
        state = self.module.vit.state_dict()
        return {name: state[name].detach().clone() for name in self.anatomy.shapes}

    def drop_weights(self) -> None:
        """Let go of the weights the architecture was built with: on a machine of a fleet they come with messages."""
        for place, part in self.module.vit.named_modules():
            for name, weight in part.named_parameters(recurse=False):
                if (f"{place}.{name}" if place else name) in self.anatomy.shapes:
                    setattr(part, name, nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))

    def to(self, device: torch.device) -> Net:
        """Move the architecture's constants (index tables of some families) to a device."""
        self.module.to(device)
        return self

    def with_unfused_attention(self) -> Net:
        """Return the same function with plain products instead of the fused kernel of attention, where there is one."""
        return (
            self if self.functional is None else replace(self, functional=FunctionalViT(self.module.vit, fused=False))
        )

    def num_kept_patches(self, mask_ratio: float) -> int:
        """Return how many patches a mask leaves: a constant, so that shapes are static."""
        if mask_ratio == 0:
            return self.num_patches
        if not self.num_patches:
            family = type(self.module.vit).__name__
            raise UserError(f"train.mask_ratio = {mask_ratio}: must be 0, a {family} has no tokens that can be dropped")
        # Rounded the way the papers count: 196 patches at 0.75 leave 49, at 0.60 leave 78.
        return max(1, int(self.num_patches * (1 - mask_ratio) + 1e-6))


def as_net(vit: Any, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Net:
    """Wrap a timm model."""
    plain = FunctionalViT(vit) if is_plain_vit(vit) else None
    patches = vit.patch_embed.num_patches if can_drop_tokens(vit) else 0
    prefix = vit.num_prefix_tokens if plain else 0
    return Net(TimmWrapper(vit), dissect(vit), plain, patches, prefix, vit.num_features, side, mean, std)
