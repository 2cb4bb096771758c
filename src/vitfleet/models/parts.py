"""The named parts of a vision transformer, the same for every model family, and where a family keeps them.

A method selects, splits and freezes by part (embedding, block i, norm, head): the :class:`ModelParts` of a model. A
:class:`Selection` of weights determines what trains and what is sent, with its size in bytes and its number of
parameters.

A family registers a function that returns the :class:`PartPaths` of a built model of its class. The rest of the package
knows no family by its name. A model of any other class has its parts where timm's naming suggests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from vitfleet.message import Tensors

FAMILIES_PACKAGE = "vitfleet.models.families"  # its import registers where the built-in families keep their parts
# Attributes in which timm's models keep their transformer blocks and the norms after the last one.
_BLOCK_LIST = "blocks"
_NORMS = ("norm", "fc_norm")
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
    """The self-attention of one block: the names of its two weights, and the number of its heads."""

    qkv: str
    projection: str
    heads: int


@dataclass(frozen=True)
class ModelParts:
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


@dataclass(frozen=True)
class LoraTarget:
    """The layer that a low-rank update is added to, or one of several equal slices of its outputs."""

    path: str  # module path of a linear layer within a block
    slice: int = 0
    num_slices: int = 1


#: The places of the layers that low-rank updates can be added to. A block may have them in one place or in another.
LORA_TARGETS: Mapping[str, tuple[LoraTarget, ...]] = {
    "q": (LoraTarget("attn.qkv", 0, 3), LoraTarget("attn.q")),
    "k": (LoraTarget("attn.qkv", 1, 3), LoraTarget("attn.k"), LoraTarget("attn.kv", 0, 2)),
    "v": (LoraTarget("attn.qkv", 2, 3), LoraTarget("attn.v"), LoraTarget("attn.kv", 1, 2)),
    "proj": (LoraTarget("attn.proj"),),
    "fc1": (LoraTarget("mlp.fc1"),),
    "fc2": (LoraTarget("mlp.fc2"),),
}

KeptForward: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PartPaths:
    """Where one built model keeps its parts, as module paths.

    Attributes
    ----------
    blocks
        The transformer blocks in the order of the forward pass, stages flattened. A weight that is in no part and comes
        after a block belongs to that block, one that comes before all blocks to the embedding.
    head
        The classifier; a distilled model has two.
    norm
        The norms between the last block and the head.
    num_patches
        Patches per image, where the model can run on some of them; else 0.
    forward_kept
        The forward pass on the kept patches ``(model, images, keep) -> logits``, where the module has one.
    functional
        Makes the forward pass as tensor operations (:class:`~vitfleet.models.forward.functional_vit.FunctionalViT`),
        where one sequence of tokens passes through blocks of the same structure; else the module is called.
    lora_targets
        The layers that low-rank updates can be added to.
    """

    blocks: tuple[str, ...]
    head: tuple[str, ...]
    norm: tuple[str, ...] = _NORMS
    num_patches: int = 0
    forward_kept: KeptForward | None = None
    functional: Callable[..., Any] | None = None
    lora_targets: Mapping[str, tuple[LoraTarget, ...]] = field(default_factory=lambda: LORA_TARGETS)


PartPathsFunction: TypeAlias = Callable[[Any], PartPaths]
_Function = TypeVar("_Function", bound=PartPathsFunction)
_PART_PATHS: dict[str, PartPathsFunction] = {}


def register_part_paths(module_class: type[nn.Module] | str) -> Callable[[_Function], _Function]:
    """Return a decorator that registers where a class of models and its subclasses keep their parts.

    A class may be given by its qualified name, ``package.module.Class``, where its package need not be imported.
    """
    name = module_class if isinstance(module_class, str) else qualified_name(module_class)

    def decorator(function: _Function) -> _Function:
        _PART_PATHS[name] = function
        return function

    return decorator


def qualified_name(module_class: type) -> str:
    """Return ``package.module.Class``."""
    return f"{module_class.__module__}.{module_class.__qualname__}"


def is_instance_of(value: object, class_name: str) -> bool:
    """Whether a value is of a class that is given by its qualified name, without importing it."""
    return any(qualified_name(cls) == class_name for cls in type(value).__mro__)


def part_paths_of(vit: nn.Module) -> PartPaths:
    """Return where a model keeps its parts; a ``TypeError`` if it has no transformer blocks in a known place."""
    import_module(FAMILIES_PACKAGE)
    names = (qualified_name(cls) for cls in type(vit).__mro__)
    function = next((_PART_PATHS[name] for name in names if name in _PART_PATHS), default_part_paths)
    part_paths = function(vit)
    if not part_paths.blocks:
        raise TypeError(f"{type(vit).__name__} has no transformer blocks that vitfleet can find")
    return part_paths


def default_part_paths(vit: Any) -> PartPaths:
    """Return the paths by timm's naming: lists called ``blocks``, ``norm`` or ``fc_norm``, and the classifier."""
    return PartPaths(blocks=block_paths(vit), head=head_paths(vit))


def block_paths(vit: nn.Module, list_name: str = _BLOCK_LIST) -> tuple[str, ...]:
    """Return the paths of all modules in lists of a name."""
    return tuple(
        f"{path}.{child}"
        for path, module in vit.named_modules()
        if path.split(".")[-1] == list_name
        for child, _ in module.named_children()
    )


def head_paths(vit: Any) -> tuple[str, ...]:
    """Return the paths of the classifier by timm's interface; a distilled model has two."""
    classifier = vit.get_classifier()
    heads = set(classifier) if isinstance(classifier, tuple) else {classifier}
    return tuple(path for path, module in vit.named_modules() if module in heads)


def find_parts(vit: nn.Module, part_paths: PartPaths) -> ModelParts:
    """Find the weights of a model's parts."""
    weights = {name: tensor for name, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    by_part = _sort_by_part(weights, part_paths)
    head = set(by_part["head"])
    return ModelParts(
        shapes={name: tensor.shape for name, tensor in weights.items()},
        parameters=frozenset(name for name, _ in vit.named_parameters()),
        blocks=tuple(by_part.pop(path) for path in part_paths.blocks),
        biases=Selection(tuple(name for name in weights if name.split(".")[-1] == "bias" and name not in head)),
        attention=_find_attention(vit, part_paths.blocks, weights),
        uniform_blocks=part_paths.functional is not None,
        **by_part,
    )


def _sort_by_part(names: Iterable[str], part_paths: PartPaths) -> dict[str, Selection]:
    """Return the weights of each part; the key of a block is its module path."""
    kinds = ("embed", "norm", "head", "prompts", "lora", *part_paths.blocks)
    found: dict[str, list[str]] = {part: [] for part in kinds}
    previous_block: str | None = None
    for name in names:
        block = next((path for path in part_paths.blocks if name.startswith(f"{path}.")), None)
        leaf = name.split(".")[-1]
        if leaf == PROMPTS_NAME:
            part = "prompts"
        elif leaf.startswith(LORA_PREFIX):
            part = "lora"
        elif block is not None:
            part = previous_block = block
        elif any(name.startswith(f"{path}.") for path in part_paths.head):
            part = "head"
        elif any(name.startswith(f"{path}.") for path in part_paths.norm):
            part = "norm"
        else:
            part = previous_block or "embed"
        found[part].append(name)
    return {part: Selection(tuple(weights)) for part, weights in found.items()}


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
