"""The parts of a vision transformer, by name, whatever its family.

A method selects, splits and freezes by part (embedding, block i, norm, head); which parameters that means
in one family or another is known here and nowhere else. What trains, what travels, its bytes and its
parameter counts all follow from a :class:`Selection`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from timm.layers import Attention as SelfAttention
from timm.layers import LayerScale, Mlp, PatchEmbed
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitfleet.message import Tensors

# The attribute under which timm's families keep their transformer layers.
_BLOCK_LISTS = {"blocks", "blocks_token_only"}
_NORMS = {"norm", "fc_norm"}
# What tuning names its additions by: see vitfleet.models.adapters.
PROMPTS = "prompts"
LORA = "lora_"


@dataclass(frozen=True)
class Selection:
    """A choice of a model's weights, in the model's own order."""

    names: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def take(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return the chosen ones of these tensors."""
        return {name: tensors[name] for name in self.names}


@dataclass(frozen=True)
class Attention:
    """One block's self-attention: the weights of its query-key-value and output projections, and its heads."""

    qkv: str
    projection: str
    heads: int


@dataclass(frozen=True)
class Anatomy:
    """Which weights belong to which part.

    Attributes
    ----------
    shapes
        Every weight of the model, in order: parameters, and the buffers that are averaged with them
        (running statistics of families with batch norm).
    parameters
        The weights that can train.
    embed, blocks, norm, head
        The parts. What lies between two blocks (a patch merging, a stage's norm) belongs to the one before.
    biases
        Every bias outside the head.
    prompts, lora
        What tuning added to the model, if anything: prompt tokens, low-rank factors. They belong to no part.
    attention
        The projections of each block's self-attention; empty in families that keep them otherwise.
    tokens
        Whether it is a plain ViT, whose patches can be dropped and whose blocks can be left out.
    """

    shapes: Mapping[str, torch.Size]
    parameters: frozenset[str]
    embed: Selection
    blocks: tuple[Selection, ...]
    norm: Selection
    head: Selection
    biases: Selection
    prompts: Selection
    lora: Selection
    attention: tuple[Attention, ...]
    is_plain_vit: bool

    @property
    def depth(self) -> int:
        """Number of transformer layers."""
        return len(self.blocks)

    @property
    def whole(self) -> Selection:
        """The whole model."""
        return self.select(self.shapes)

    @property
    def body(self) -> Selection:
        """Everything but the head."""
        head = set(self.head)
        return self.select(name for name in self.shapes if name not in head)

    @property
    def non_blocks(self) -> Selection:
        """Everything but the blocks."""
        return self.union(self.embed, self.norm, self.head)

    def union(self, *parts: Selection) -> Selection:
        """Return the union of several selections."""
        return self.select(name for part in parts for name in part)

    def select(self, names: Iterable[str]) -> Selection:
        """Return these weights as a selection, in the model's order."""
        wanted = set(names)
        return Selection(tuple(name for name in self.shapes if name in wanted))

    def trainable(self, selection: Selection) -> Selection:
        """Return those of a selection that an optimiser can train (buffers only travel)."""
        return Selection(tuple(name for name in selection if name in self.parameters))

    def count_parameters(self, selection: Selection) -> int:
        """Count the parameters of a selection."""
        return sum(prod(self.shapes[name]) for name in self.trainable(selection))


def dissect(vit: nn.Module) -> Anatomy:
    """Find the parts of a timm vision transformer."""
    weights = {name: tensor for name, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    parameters = frozenset(name for name, _ in vit.named_parameters())
    block_paths = find_blocks(vit)
    if not block_paths:
        raise TypeError(f"{type(vit).__name__} has no transformer blocks that vitfleet knows how to find")
    classifier = vit.get_classifier()  # type: ignore[operator]
    heads = set(classifier) if isinstance(classifier, tuple) else {classifier}
    head_paths = {path for path, module in vit.named_modules() if module in heads}

    blocks: list[list[str]] = [[] for _ in block_paths]
    embed: list[str] = []
    norm: list[str] = []
    head: list[str] = []
    prompts: list[str] = []
    lora: list[str] = []
    latest: int | None = None
    for name in weights:
        block = next((i for i, path in enumerate(block_paths) if name.startswith(f"{path}.")), None)
        leaf = name.split(".")[-1]
        if leaf == PROMPTS:
            prompts.append(name)
        elif leaf.startswith(LORA):
            lora.append(name)
        elif block is not None:
            latest = block
            blocks[block].append(name)
        elif any(name.startswith(f"{path}.") for path in head_paths):
            head.append(name)
        elif name.split(".")[0] in _NORMS:
            norm.append(name)
        elif latest is None:
            embed.append(name)
        else:
            blocks[latest].append(name)
    return Anatomy(
        shapes={name: tensor.shape for name, tensor in weights.items()},
        parameters=parameters,
        embed=Selection(tuple(embed)),
        blocks=tuple(Selection(tuple(names)) for names in blocks),
        norm=Selection(tuple(norm)),
        head=Selection(tuple(head)),
        biases=Selection(tuple(name for name in weights if name.split(".")[-1] == "bias" and name not in head)),
        prompts=Selection(tuple(prompts)),
        lora=Selection(tuple(lora)),
        attention=_attention(vit, block_paths, weights),
        is_plain_vit=is_plain_vit(vit),
    )


def find_blocks(vit: nn.Module) -> list[str]:
    """Return the paths of a model's transformer layers, in order."""
    return [
        f"{path}.{child}"
        for path, module in vit.named_modules()
        if path.split(".")[-1] in _BLOCK_LISTS
        for child, _ in module.named_children()
    ]


def is_plain_vit(vit: Any) -> bool:
    """Whether a model is a plain ViT: one sequence of tokens, with positions, through blocks of the usual kind."""
    return (
        isinstance(vit, VisionTransformer | VisionTransformerDistilled)
        and vit.pos_embed is not None
        and (vit.attn_pool is not None or vit.global_pool in ("token", "avg"))
        and isinstance(vit.patch_embed, PatchEmbed)  # not a convolutional stem, whose patches see each other
        and all(isinstance(norm, nn.Identity | nn.LayerNorm) for norm in (vit.norm_pre, vit.norm, vit.fc_norm))
        and isinstance(vit.patch_embed.norm, nn.Identity | nn.LayerNorm)
        and all(_is_usual(block) for block in vit.blocks)
    )


def can_drop_tokens(vit: Any) -> bool:
    """Whether a model may be given some of an image's patches: a plain ViT, or a CaiT."""
    return is_plain_vit(vit) or (isinstance(vit, Cait) and isinstance(vit.patch_embed, PatchEmbed))


def _is_usual(block: Any) -> bool:
    if type(block) is not Block or type(block.attn) is not SelfAttention or type(block.mlp) is not Mlp:
        return False
    attention, mlp = block.attn, block.mlp
    norms = (block.norm1, block.norm2, attention.q_norm, attention.k_norm, attention.norm, mlp.norm)
    return (
        all(isinstance(norm, nn.Identity | nn.LayerNorm) for norm in norms)
        and all(isinstance(scale, nn.Identity | LayerScale) for scale in (block.ls1, block.ls2))
        and getattr(attention, "gate", None) is None
        and isinstance(mlp.fc1, nn.Linear)
    )


def _attention(vit: nn.Module, block_paths: list[str], weights: Tensors) -> tuple[Attention, ...]:
    found = []
    for path in block_paths:
        heads = getattr(getattr(vit.get_submodule(path), "attn", None), "num_heads", None)
        qkv, projection = f"{path}.attn.qkv.weight", f"{path}.attn.proj.weight"
        if not isinstance(heads, int) or qkv not in weights or projection not in weights:
            return ()
        found.append(Attention(qkv, projection, heads))
    # A map of layers by heads needs the same heads in every layer; hierarchical families have not.
    return tuple(found) if len({one.heads for one in found}) == 1 else ()
