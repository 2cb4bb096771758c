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
from vitfleet.models.functional_vit import FORWARD_PASS, FunctionalViT
from vitfleet.models.stacked_ops import kept_patches, linear


class TimmWrapper(nn.Module):
    """A timm model under the attribute ``vit``; a CaiT can run on some of an image's patches."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return logits.

        Parameters
        ----------
        keep
            For a CaiT: positions of the patches that are kept; the others are never embedded.
        """
        if keep is None:
            return cast(Tensor, self.vit(images))
        vit: Any = self.vit
        kernel = vit.patch_embed.proj.weight
        kept = kept_patches(images, kernel.shape[-1], keep)
        embedded = linear(kept, kernel.flatten(1), vit.patch_embed.proj.bias)
        tokens = vit.blocks(vit.patch_embed.norm(embedded) + vit.pos_embed[0][keep])
        class_token = vit.cls_token.expand(len(tokens), -1, -1)
        for block in vit.blocks_token_only:
            class_token = block(tokens, class_token)
        return cast(Tensor, vit.forward_head(vit.norm(torch.cat([class_token, tokens], dim=1))))


@dataclass(frozen=True)
class Net:
    """A model architecture. Its weights are an argument of every call.

    Attributes
    ----------
    module
        The timm model that defines the architecture.
    anatomy
        The names of its weights, by part.
    functional
        The forward pass of a plain ViT; ``None`` for other families, whose module is called instead.
    num_patches
        Patches per image; 0 for a family whose tokens cannot be dropped.
    num_prefix_tokens, embed_dim
        Tokens before the patches (class token, registers), and the width of a token.
    image_size, mean, std
        The model's input: height and width in pixels, and the normalisation of pixels in 0…1.
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
        """Return logits; see :meth:`outputs`."""
        return self.split_outputs(self.outputs(weights, images, keep, depth))[0]

    def outputs(self, weights: Tensors, images: Tensor, keep: Tensor | None = None, depth: int | None = None) -> Tensor:
        """Return logits, and after them the outputs that only the loss of a training needs, if the model has any.

        Parameters
        ----------
        keep
            Positions of the patches that are kept; the others are never embedded.
        depth
            Number of blocks to use, if not all of them; the last ones are skipped.
        """
        skipped = self.anatomy.blocks[depth:] if depth is not None else ()
        needed = self.anatomy.shapes.keys() - {name for block in skipped for name in block}
        if missing := needed - weights.keys():
            raise KeyError(f"{len(missing)} of the model's weights are missing, {min(missing)} among them")
        if self.functional is None:
            module_weights = {f"vit.{name}": tensor for name, tensor in weights.items()}
            return cast(Tensor, functional_call(self.module, module_weights, (images, keep), tie_weights=False))
        return self.functional(weights, images, keep, 0, None, depth)

    def split_outputs(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits among the model's outputs, and the other outputs; ``None`` if there are no others."""
        num_classes = None if self.functional is None else self.functional.num_classes
        if num_classes is None or outputs.shape[-1] == num_classes:
            return outputs, None
        return outputs[..., :num_classes], outputs[..., num_classes:]

    def forward_to(self, weights: Tensors, images: Tensor, keep: Tensor | None, block: int) -> Tensor:
        """Return the tokens that enter a block. Only for a plain ViT."""
        assert self.functional is not None
        return self.functional(weights, images, keep, 0, block, None)

    def forward_from(self, weights: Tensors, tokens: Tensor, block: int) -> Tensor:
        """Return the logits of tokens that enter a block. Only for a plain ViT."""
        assert self.functional is not None
        return self.functional(weights, tokens, None, block, None, None)

    def initial_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights with which the architecture was built."""
        state = self.module.vit.state_dict()
        return {name: state[name].detach().clone() for name in self.anatomy.shapes}

    def drop_weights(self) -> None:
        """Free the initial weights. A client of a real fleet receives its weights in messages."""
        for path, module in self.module.vit.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if (f"{path}.{name}" if path else name) in self.anatomy.shapes:
                    setattr(module, name, nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))

    def to(self, device: torch.device) -> Net:
        """Move the architecture's constants (index tables of some families) to a device."""
        self.module.to(device)
        return self

    def with_unfused_attention(self) -> Net:
        """Return the same function without the fused attention kernel, if it has one."""
        if self.functional is None:
            return self
        return replace(self, functional=type(self.functional)(self.module.vit, fused_attention=False))

    def num_kept_patches(self, mask_ratio: float) -> int:
        """Return how many patches a mask keeps. The number is the same for every image, so that shapes are static."""
        if mask_ratio == 0:
            return self.num_patches
        if not self.num_patches:
            family = type(self.module.vit).__name__
            raise UserError(
                f"train.mask_ratio, or the method's own mask ratio = {mask_ratio}: must be 0, "
                f"a {family} has no tokens that can be dropped"
            )
        return num_kept(self.num_patches, mask_ratio)


def num_kept(count: int, dropped: float) -> int:
    """Return how many of ``count`` tokens remain if a fraction is dropped: at least one.

    Rounded as in the papers: of 196 patches, a ratio of 0.75 keeps 49 and 0.60 keeps 78.
    """
    return max(1, int(count * (1 - dropped) + 1e-6))


def wrap_timm_model(vit: Any, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Net:
    """Return a timm model as a :class:`Net`."""
    plain = is_plain_vit(vit)
    return Net(
        module=TimmWrapper(vit),
        anatomy=dissect(vit),
        functional=getattr(vit, FORWARD_PASS, FunctionalViT)(vit) if plain else None,
        num_patches=vit.patch_embed.num_patches if can_drop_tokens(vit) else 0,
        num_prefix_tokens=vit.num_prefix_tokens if plain else 0,
        embed_dim=vit.num_features,
        image_size=image_size,
        mean=mean,
        std=std,
    )
