"""The named parts of a vision transformer, the same for every model family.

A method selects, splits and freezes by part (embedding, block i, norm, head). Each family declares its parts as a
:class:`~vitfleet.models.layout.Layout`; this module maps them to weights. A :class:`Selection` of weights determines
what trains and what is sent, with its size in bytes and its number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from vitfleet.message import Tensors
from vitfleet.models.layout import Layout

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
    uniform_blocks
        Whether one sequence of tokens passes through blocks of the same structure, as in a plain ViT: the model can be
        split before any block, and blocks can be skipped or exchanged.
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
    uniform_blocks: bool

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

        A selection may have tensors that the model does not have: see :mod:`vitfleet.methods.continual.fedweit`.
        """
        return Selection(tuple(name for name in selection if name in self.parameters or name not in self.shapes))

    def count_parameters(self, selection: Selection) -> int:
        """Return the number of trainable parameters in a selection."""
        return sum(prod(self.shapes[name]) for name in self.trainable(selection))


def dissect(vit: nn.Module, layout: Layout) -> Anatomy:
    """Find the weights of a model's parts."""
    weights = {name: tensor for name, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    parts = _sort_by_part(weights, layout)
    head = set(parts["head"])
    return Anatomy(
        shapes={name: tensor.shape for name, tensor in weights.items()},
        parameters=frozenset(name for name, _ in vit.named_parameters()),
        embed=Selection(tuple(parts["embed"])),
        blocks=tuple(Selection(tuple(parts[path])) for path in layout.blocks),
        norm=Selection(tuple(parts["norm"])),
        head=Selection(tuple(parts["head"])),
        biases=Selection(tuple(name for name in weights if name.split(".")[-1] == "bias" and name not in head)),
        prompts=Selection(tuple(parts["prompts"])),
        lora=Selection(tuple(parts["lora"])),
        attention=_find_attention(vit, layout.blocks, weights),
        uniform_blocks=layout.functional is not None,
    )


def _sort_by_part(names: Iterable[str], layout: Layout) -> dict[str, list[str]]:
    """Return the names of the weights by part; the key of a block is its module path."""
    parts: dict[str, list[str]] = {part: [] for part in ("embed", "norm", "head", "prompts", "lora", *layout.blocks)}
    previous_block: str | None = None
    for name in names:
        block = next((path for path in layout.blocks if name.startswith(f"{path}.")), None)
        leaf = name.split(".")[-1]
        if leaf == PROMPTS_NAME:
            part = "prompts"
        elif leaf.startswith(LORA_PREFIX):
            part = "lora"
        elif block is not None:
            part = previous_block = block
        elif any(name.startswith(f"{path}.") for path in layout.head):
            part = "head"
        elif any(name.startswith(f"{path}.") for path in layout.norm):
            part = "norm"
        else:
            part = previous_block or "embed"
        parts[part].append(name)
    return parts


def _find_attention(vit: nn.Module, block_paths: Iterable[str], weights: Tensors) -> tuple[AttentionProjections, ...]:
    attention = []
    for path in block_paths:
        heads = getattr(getattr(vit.get_submodule(path), "attn", None), "num_heads", None)
        qkv, projection = f"{path}.attn.qkv.weight", f"{path}.attn.proj.weight"
        if not isinstance(heads, int) or qkv not in weights or projection not in weights:
            return ()
        attention.append(AttentionProjections(qkv, projection, heads))
    # A map of blocks by heads needs equally many heads in every block, which hierarchical families do not have.
    return tuple(attention) if len({block.heads for block in attention}) == 1 else ()
