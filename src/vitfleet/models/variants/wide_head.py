"""A plain ViT whose head sees more than the class token of the last block.

What a block gives is its class token, the mean of its patch tokens (of a masked image: of those that are kept), or
both. The last block's tokens pass through the model's own final norm, those of earlier blocks through a layer norm
without weights. All of them are one row x, and the head computes

    φ = (x − shift) · scale,   or with random features   φ = ReLU(P (x − shift) · scale / √width),
    logits = W φ + b

with ``shift`` and ``scale`` (``head.shift``, ``head.scale``) that no optimiser trains, and a Gaussian matrix P that is
drawn by its seed wherever the model is built: it is neither sent nor stored. A head that sees the class token alone is
the model's own, without these.

Random features need entries of like size before anybody has seen an image: some entries of pretrained tokens have means
and deviations a hundred times those of others, whatever the image is. So the pretrained body says itself what they are,
on images of noise (:func:`standardise_on_noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.errors import ConfigError, UserError
from vitfleet.message import Tensors
from vitfleet.models.families.vit import INIT_STD, init_normal_, is_plain_vit
from vitfleet.models.forward.functional_vit import FORWARD_PASS, BlockOutput, FunctionalViT
from vitfleet.models.forward.stacked_ops import broadcast_channels
from vitfleet.randomness import Address, Purpose

if TYPE_CHECKING:
    from vitfleet.models.net import Net

SHIFT, SCALE = "head.shift", "head.scale"
NOISE_CELLS = (2, 4, 8, 16)  # pixels of one colour, across
NOISE_IMAGES = 16  # of each size
MIN_DEVIATION = 1e-3  # of an entry: the tokens are normalised, so those of most are near 1


@dataclass(frozen=True)
class HeadFeatures:
    """What a head sees.

    Attributes
    ----------
    tokens
        What of each block: its class token, the mean of its patch tokens, or both.
    blocks
        Of how many of the last blocks.
    project
        Number of random ReLU features of these; 0: the tokens themselves.
    seed
        Seed of the random features.
    """

    tokens: Literal["class-token", "mean", "both"] = "class-token"
    blocks: int = 1
    project: int = 0
    seed: int = 0

    @property
    def is_default(self) -> bool:
        """Whether it is what every head sees."""
        return (self.tokens, self.blocks, self.project) == ("class-token", 1, 0)


class WideHead(nn.Linear):
    """A linear layer on standardised features, or on random features of them; its weight and bias are a head's.

    Parameters
    ----------
    width
        Number of features before the random ones.
    """

    shift: Tensor
    scale: Tensor
    projection: Tensor | None

    def __init__(self, features: HeadFeatures, width: int, num_classes: int) -> None:
        super().__init__(features.project or width, num_classes, device="meta")
        self.features = features
        self.weight = nn.Parameter(torch.empty(num_classes, self.in_features))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        init_normal_(self.weight, INIT_STD)
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        projection = draw_projection(features, width) if features.project else None
        self.register_buffer("projection", projection, persistent=False)


def draw_projection(features: HeadFeatures, width: int) -> Tensor:
    """Return the matrix of the random features, ``[project, width]``: rows of about unit length."""
    rng = Address(features.seed, Purpose.HEAD_PROJECTION).generator()
    drawn = rng.standard_normal((features.project, width))
    return torch.from_numpy(drawn).div_(width**0.5).float()


def widen_head(vit: Any, features: HeadFeatures) -> None:
    """Let the head of a plain ViT see these features. The default changes nothing, whatever the model."""
    if features.is_default:
        return
    if hasattr(vit, FORWARD_PASS) or not is_plain_vit(vit) or not _is_class_token_vit(vit):
        raise UserError(
            f"model.name: the head of a {type(vit).__name__} sees its own features only; set features = class-token, "
            "blocks = 1 and project = 0, or choose a plain ViT with a class token (vit, vit_*, deit_*)"
        )
    if features.blocks > len(vit.blocks):
        raise ConfigError("method.blocks", features.blocks, f"must be at most {len(vit.blocks)}, the model's layers")
    tokens_per_block = 2 if features.tokens == "both" else 1
    width = tokens_per_block * features.blocks * vit.embed_dim
    vit.head = WideHead(features, width, len(vit.head.weight))
    setattr(vit, FORWARD_PASS, _WideHeadForward(features))


@dataclass(frozen=True)
class _WideHeadForward:
    """Makes the forward pass; compared by value: what was counted of one model is not taken for another's."""

    features: HeadFeatures

    def __call__(self, vit: Any) -> WideHeadViT:
        return WideHeadViT(vit)


def _is_class_token_vit(vit: Any) -> bool:
    """Whether the head is one linear layer on the class token of the last block, after the final norm."""
    return (
        vit.global_pool == "token"
        and vit.attn_pool is None
        and getattr(vit, "dist_token", None) is None
        and isinstance(vit.fc_norm, nn.Identity)
        and isinstance(vit.head, nn.Linear)
    )


def standardise_on_noise(vit: Any) -> None:
    """Set shift and scale of random features to what the model's features are on images of noise.

    A model without random features is left as it is, as is one whose weights have no values.
    """
    head = getattr(vit, "head", None)
    if not isinstance(head, WideHead) or head.projection is None or vit.cls_token.is_meta:
        return
    weights = {**dict(vit.named_parameters()), **dict(vit.named_buffers())}
    shift, scale = noise_standardisation(vit, weights)
    head.shift.copy_(shift)
    head.scale.copy_(scale)


def unsolved_head(net: Net, body: Tensors) -> dict[str, Tensor]:
    """Return a head whose logits are zero, which sees the features of a body that was trained with another one.

    As in a model that is built with the weights of that body, random features are standardised on images of noise.
    """
    shapes, device = net.parts.shapes, next(iter(body.values())).device
    head = {name: torch.zeros(shapes[name], device=device) for name in net.parts.head}
    if SCALE not in head:
        return head
    vit: Any = net.module.vit
    if vit.head.projection is None:
        return {**head, SCALE: torch.ones_like(head[SCALE])}
    on_host = {name: weight.cpu() for name, weight in body.items()}
    shift, scale = noise_standardisation(vit, on_host)
    return {**head, SHIFT: shift.to(device), SCALE: scale.to(device)}


def noise_standardisation(vit: Any, weights: Tensors) -> tuple[Tensor, Tensor]:
    """Return shift and scale of random features: what a body's features are on images of noise.

    The images are addressed by the seed of the random features: of single colours on grids of four sizes.
    """
    head = vit.head
    rows, columns = vit.patch_embed.grid_size
    height, width = vit.patch_embed.proj.weight.shape[-2:]
    size = (rows * height, columns * width)
    rng = Address(head.features.seed, Purpose.HEAD_PROJECTION, epoch=1).generator()
    images = []
    for cell in NOISE_CELLS:
        shape = (NOISE_IMAGES, vit.patch_embed.proj.in_channels, -(-size[0] // cell), -(-size[1] // cell))
        colours = rng.uniform(-1, 1, shape).astype(np.float32).repeat(cell, axis=2).repeat(cell, axis=3)
        images.append(torch.from_numpy(colours[..., : size[0], : size[1]].copy()))
    with torch.no_grad():
        seen = WideHeadViT(vit).representation(weights, torch.cat(images), None)
    return seen.mean(dim=0), 1 / seen.std(dim=0).clamp(min=MIN_DEVIATION)


def expand(seen: Tensor, shift: Tensor, scale: Tensor, projection: Tensor | None) -> Tensor:
    """Return the input φ of the linear layer, given what the head sees: standardised, or random features of that."""
    standardised = (seen - broadcast_channels(shift, seen)) * broadcast_channels(scale, seen)
    return standardised if projection is None else F.linear(standardised, projection).relu()


class WideHeadViT(FunctionalViT):
    """The forward pass of a plain ViT with a :class:`WideHead`."""

    @property
    def features(self) -> HeadFeatures:
        """What the head sees."""
        features: HeadFeatures = self.vit.head.features
        return features

    @property
    def head_blocks(self) -> int:  # type: ignore[override]
        """How many of the last blocks the head sees."""
        return self.features.blocks

    def _final_tokens(self, weights: Tensors, outputs: Sequence[BlockOutput]) -> Tensor:
        """Return the normalised tokens of all blocks that the head sees, one beside the other."""
        if len(outputs) < self.head_blocks:
            raise UserError(
                f"blocks = {self.head_blocks}: the head sees the last {self.head_blocks} layers, but only "
                f"{len(outputs)} of them pass here; choose fewer blocks"
            )
        earlier = [
            self._without_prompts(F.layer_norm(tokens, tokens.shape[-1:], eps=self.vit.norm.eps), num_prompts)
            for tokens, num_prompts in outputs[:-1]
        ]
        return torch.cat([*earlier, super()._final_tokens(weights, outputs)], dim=-1)

    def representation(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Return what the head sees, before it standardises that: no weight of the head is needed."""
        return self._seen(self._final_tokens(weights, self._run(weights, images, keep, 0, None, None)))

    def _seen(self, tokens: Tensor) -> Tensor:
        """Return class token, mean of the patch tokens, or both, in float32."""
        class_token = tokens[..., 0, :]
        if self.features.tokens == "class-token":
            return class_token.float()
        mean = tokens[..., self.vit.num_prefix_tokens :, :].mean(dim=-2)
        return (mean if self.features.tokens == "mean" else torch.cat([class_token, mean], dim=-1)).float()

    @property
    def representation_width(self) -> int:
        """Length of what the head sees."""
        return len(self.vit.head.shift)

    def head_input(self, weights: Tensors, representation: Tensor) -> Tensor:
        """Return the input of the linear layer, given what the head sees."""
        return expand(representation, weights[SHIFT], weights[SCALE], self.vit.head.projection)

    def pool(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Return the input of the linear layer, ``[…, batch, features]``, in float32."""
        return self.head_input(weights, self._seen(tokens))
