"""The named parts of a vision transformer, the same for every model family.

A method selects, splits and freezes by part (embedding, block i, norm, head). Only this module maps the parts to the
parameters of each family. A :class:`Selection` of weights determines what trains and what is sent, with its size in
bytes and its number of parameters.
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

# Attributes in which timm's model families keep their transformer blocks.
_BLOCK_LISTS = {"blocks", "blocks_token_only"}
_NORMS = {"norm", "fc_norm"}
# Names of the weights that vitfleet.models.adapters adds.
PROMPTS_NAME = "prompts"
LORA_PREFIX = "lora_"


@dataclass(frozen=True)
class Selection:
    """Names of some of a model's weights, in the model's order."""

    names: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def take(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return the selected tensors."""
        return {name: tensors[name] for name in self.names}


@dataclass(frozen=True)
class AttentionProjections:
    """The self-attention of one block.

    Attributes
    ----------
    qkv, projection
        Names of the weights of the query-key-value and of the output projection.
    heads
        Number of heads.
    """

    qkv: str
    projection: str
    heads: int


@dataclass(frozen=True)
class Anatomy:
    """The weights of a model, by part.

    Attributes
    ----------
    shapes
        Shape of every weight, in the model's order: parameters, and the buffers that are averaged with them (running
        statistics of families with batch norm).
    parameters
        Names of the weights that can be trained.
    embed, blocks, norm, head
        The parts. A module between two blocks (a patch merging, a norm) belongs to the block before it.
    biases
        All biases outside the head.
    prompts, lora
        Prompt tokens and low-rank factors, if they were added to the model. They belong to no part.
    attention
        The self-attention of each block; empty for families with other attention modules.
    is_plain_vit
        Whether it is a plain ViT, whose patches can be dropped and whose blocks can be skipped.
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
    attention: tuple[AttentionProjections, ...]
    is_plain_vit: bool

    @property
    def depth(self) -> int:
        """Number of transformer blocks."""
        return len(self.blocks)

    @property
    def whole(self) -> Selection:
        """All weights."""
        return self.select(self.shapes)

    @property
    def body(self) -> Selection:
        """All weights except the head."""
        head = set(self.head)
        return self.select(name for name in self.shapes if name not in head)

    @property
    def non_blocks(self) -> Selection:
        """All weights except the blocks."""
        return self.union(self.embed, self.norm, self.head)

    def union(self, *parts: Selection) -> Selection:
        """Return the union of several selections."""
        return self.select(name for part in parts for name in part)

    def select(self, names: Iterable[str]) -> Selection:
        """Return the selection of these weights; names that the model does not have are ignored."""
        selected = set(names)
        return Selection(tuple(name for name in self.shapes if name in selected))

    def trainable(self, selection: Selection) -> Selection:
        """Return the tensors of a selection that an optimiser can train: all but the model's buffers.

        A selection may have tensors that the model does not have: see :mod:`vitfleet.training.composition`.
        """
        return Selection(tuple(name for name in selection if name in self.parameters or name not in self.shapes))

    def count_parameters(self, selection: Selection) -> int:
        """Return the number of trainable parameters in a selection."""
        return sum(prod(self.shapes[name]) for name in self.trainable(selection))


def dissect(vit: nn.Module) -> Anatomy:
    """Find the parts of a timm vision transformer.

    Raises
    ------
    TypeError
        If the model has no transformer blocks in a known place.
    """
    weights = {name: tensor for name, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    block_paths = find_blocks(vit)
    if not block_paths:
        raise TypeError(f"{type(vit).__name__} has no transformer blocks that vitfleet can find")
    parts = _sort_by_part(list(weights), block_paths, _find_heads(vit))
    head = set(parts["head"])
    return Anatomy(
        shapes={name: tensor.shape for name, tensor in weights.items()},
        parameters=frozenset(name for name, _ in vit.named_parameters()),
        embed=Selection(tuple(parts["embed"])),
        blocks=tuple(Selection(tuple(parts[path])) for path in block_paths),
        norm=Selection(tuple(parts["norm"])),
        head=Selection(tuple(parts["head"])),
        biases=Selection(tuple(name for name in weights if name.split(".")[-1] == "bias" and name not in head)),
        prompts=Selection(tuple(parts["prompts"])),
        lora=Selection(tuple(parts["lora"])),
        attention=_find_attention(vit, block_paths, weights),
        is_plain_vit=is_plain_vit(vit),
    )


def _find_heads(vit: Any) -> list[str]:
    """Return the module paths of the classifier; a distilled model has two."""
    classifier = vit.get_classifier()
    heads = set(classifier) if isinstance(classifier, tuple) else {classifier}
    return [path for path, module in vit.named_modules() if module in heads]


def _sort_by_part(names: Iterable[str], block_paths: list[str], head_paths: list[str]) -> dict[str, list[str]]:
    """Return the names of the weights by part; the key of a block is its module path."""
    parts: dict[str, list[str]] = {part: [] for part in ("embed", "norm", "head", "prompts", "lora", *block_paths)}
    previous_block: str | None = None
    for name in names:
        block = next((path for path in block_paths if name.startswith(f"{path}.")), None)
        leaf = name.split(".")[-1]
        if leaf == PROMPTS_NAME:
            part = "prompts"
        elif leaf.startswith(LORA_PREFIX):
            part = "lora"
        elif block is not None:
            part = previous_block = block
        elif any(name.startswith(f"{path}.") for path in head_paths):
            part = "head"
        elif name.split(".")[0] in _NORMS:
            part = "norm"
        else:
            part = previous_block or "embed"
        parts[part].append(name)
    return parts


def find_blocks(vit: nn.Module) -> list[str]:
    """Return the module paths of a model's transformer blocks, in order."""
    return [
        f"{path}.{child}"
        for path, module in vit.named_modules()
        if path.split(".")[-1] in _BLOCK_LISTS
        for child, _ in module.named_children()
    ]


def is_plain_vit(vit: Any) -> bool:
    """Whether a model is a plain ViT: one token sequence with position embeddings through standard blocks."""
    return (
        isinstance(vit, VisionTransformer | VisionTransformerDistilled)
        and vit.pos_embed is not None
        and (vit.attn_pool is not None or vit.global_pool in ("token", "avg"))
        and isinstance(vit.patch_embed, PatchEmbed)  # not a convolutional stem, whose patches overlap
        and all(isinstance(norm, nn.Identity | nn.LayerNorm) for norm in (vit.norm_pre, vit.norm, vit.fc_norm))
        and isinstance(vit.patch_embed.norm, nn.Identity | nn.LayerNorm)
        and all(_is_standard_block(block) for block in vit.blocks)
    )


def can_drop_tokens(vit: Any) -> bool:
    """Whether a model can run on some of an image's patches: a plain ViT or a CaiT."""
    return is_plain_vit(vit) or (isinstance(vit, Cait) and isinstance(vit.patch_embed, PatchEmbed))


def _is_standard_block(block: Any) -> bool:
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


def _find_attention(vit: nn.Module, block_paths: list[str], weights: Tensors) -> tuple[AttentionProjections, ...]:
    attention = []
    for path in block_paths:
        heads = getattr(getattr(vit.get_submodule(path), "attn", None), "num_heads", None)
        qkv, projection = f"{path}.attn.qkv.weight", f"{path}.attn.proj.weight"
        if not isinstance(heads, int) or qkv not in weights or projection not in weights:
            return ()
        attention.append(AttentionProjections(qkv, projection, heads))
    # A map of blocks by heads needs equally many heads in every block, which hierarchical families do not have.
    return tuple(attention) if len({block.heads for block in attention}) == 1 else ()
