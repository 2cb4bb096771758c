"""A vision transformer as a pure function of its weights, with token dropping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.models.anatomy import PROMPTS, Anatomy, dissect, has_tokens


class Forward(nn.Module):
    """Runs a timm model; a plain ViT part by part, so that patches can be dropped and blocks rerouted."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit
        self.by_parts = has_tokens(vit)

    def forward(
        self,
        inputs: Tensor,
        keep: Tensor | None = None,
        route: tuple[int, ...] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return logits, or the tokens on the way to them.

        Parameters
        ----------
        inputs
            Images; where ``start`` is not 0, the tokens that enter that block.
        keep
            Positions of the patches that are kept, ``[batch, kept]``; the others are never embedded.
        route
            The blocks to run, in this order; all of them by default.
        start, stop
            Run the blocks from ``start`` to before ``stop``; with a ``stop``, return the tokens that leave there.
        """
        vit: Any = self.vit  # timm's models are untyped
        if not self.by_parts:
            return cast(Tensor, vit(inputs))
        tokens = inputs if start else vit.norm_pre(embed(vit, inputs, keep))
        prompts: Tensor | None = getattr(vit, PROMPTS, None)
        added = 0
        for position, block in enumerate((route or range(len(vit.blocks)))[start:stop]):
            if prompts is not None and position < prompts.shape[0]:
                tokens = put_prompts(tokens, prompts[position], vit.num_prefix_tokens, replace=added)
                added = prompts.shape[1]
            tokens = vit.blocks[block](tokens)
        if stop is not None:
            return cast(Tensor, tokens)
        tokens = vit.norm(tokens)
        if added:
            prefix = vit.num_prefix_tokens
            tokens = torch.cat([tokens[:, :prefix], tokens[:, prefix + added :]], dim=1)
        return cast(Tensor, vit.forward_head(tokens))


def embed(vit: Any, images: Tensor, keep: Tensor | None) -> Tensor:
    """Cut images into patches, leave the dropped ones out, embed the others with their own positions, add tokens."""
    projection: nn.Conv2d = vit.patch_embed.proj
    side = projection.kernel_size[0]
    patches = F.unfold(images, side, stride=side).transpose(1, 2)
    # Prefix tokens in timm's order: class, distillation, registers; with or without positions of their own.
    prefix = [
        token for name in ("cls_token", "dist_token", "reg_token") if (token := getattr(vit, name, None)) is not None
    ]
    positions: Tensor = vit.pos_embed
    own = 0 if vit.no_embed_class else sum(token.shape[1] for token in prefix)
    places = positions[:, own:]
    if keep is not None:
        patches = patches.gather(1, keep[:, :, None].expand(-1, -1, patches.shape[-1]))
        places = places[0][keep]
    tokens: Tensor = vit.patch_embed.norm(F.linear(patches, projection.weight.flatten(1), projection.bias)) + places
    if not prefix:
        return tokens
    head = torch.cat(prefix, dim=1)
    if own:
        head = head + positions[:, :own]
    return torch.cat([head.expand(tokens.shape[0], -1, -1), tokens], dim=1)


def put_prompts(tokens: Tensor, prompts: Tensor, prefix: int, replace: int) -> Tensor:
    """Put prompts after the prefix tokens, in the place of the ``replace`` prompts of the block before."""
    rows = prompts.expand(tokens.shape[0], -1, -1)
    return torch.cat([tokens[:, :prefix], rows, tokens[:, prefix + replace :]], dim=1)


@dataclass(frozen=True)
class Net:
    """One architecture, without weights of its own: they are an argument of every call.

    Attributes
    ----------
    anatomy
        The names of its weights, by part.
    patches
        Patches of a whole image, 0 for a family whose tokens cannot be dropped.
    prefix, width
        Tokens that stand before the patches (class token, registers), and the numbers in a token.
    side, mean, std
        The input it takes: pixels a side, and the normalisation of pixels in 0…1.
    """

    module: Forward
    anatomy: Anatomy
    patches: int
    prefix: int
    width: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(
        self, weights: Tensors, images: Tensor, keep: Tensor | None = None, route: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return the logits of these images under these weights: see :meth:`Forward.forward`."""
        if missing := self.anatomy.shapes.keys() - weights.keys():
            raise KeyError(f"{len(missing)} of the model's weights are missing, {min(missing)} among them")
        return self._run(weights, images, keep, route)

    def until(self, weights: Tensors, images: Tensor, keep: Tensor | None, block: int) -> Tensor:
        """Return the tokens that enter a block: the patch features of the module before it."""
        return self._run(weights, images, keep, None, 0, block)

    def onward(self, weights: Tensors, tokens: Tensor, block: int) -> Tensor:
        """Return the logits of tokens that enter a block."""
        return self._run(weights, tokens, None, None, block)

    def _run(self, weights: Tensors, *arguments: object) -> Tensor:
        inner = {f"vit.{name}": tensor for name, tensor in weights.items()}
        return cast(Tensor, functional_call(self.module, inner, arguments, tie_weights=False))

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
            raise UserError(f"train.mask_ratio = {mask_ratio}: must be 0, a {family} has no tokens that can be dropped")
        # Rounded the way the papers count: 196 patches at 0.75 leave 49, at 0.60 leave 78.
        return max(1, int(self.patches * (1 - mask_ratio) + 1e-6))


def as_net(vit: Any, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Net:
    """Wrap a timm model."""
    patches = vit.patch_embed.num_patches if has_tokens(vit) else 0
    prefix = vit.num_prefix_tokens if has_tokens(vit) else 0
    return Net(Forward(vit), dissect(vit), patches, prefix, vit.num_features, side, mean, std)
