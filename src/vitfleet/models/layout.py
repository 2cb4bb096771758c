"""Where a model family keeps its parts, declared beside the family's builder.

A family registers a function that returns the :class:`PartPaths` of a built model of its class. The rest of the package
asks the layout and knows no family by its name. A model of any other class gets the layout that timm's naming suggests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

FAMILIES_PACKAGE = "vitfleet.models.families"  # its import registers the layouts of the built-in families
# Attributes in which timm's models keep their transformer blocks and the norms after the last one.
_BLOCK_LIST = "blocks"
_NORMS = ("norm", "fc_norm")


@dataclass(frozen=True)
class LoraTarget:
    """The layer that a low-rank update is added to.

    Attributes
    ----------
    path
        Module path of a linear layer within a block.
    slice, num_slices
        Which of how many equal slices of the layer's outputs.
    """

    path: str
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
    """The parts of one built model, as module paths.

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
        Makes the forward pass as tensor operations (:class:`~vitfleet.models.forward.functional_vit.FunctionalViT`), where
        one sequence of tokens passes through blocks of the same structure; else the module is called.
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
    """Return a decorator that registers the layout function of a class of models and its subclasses.

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
    """Return the layout of a model.

    Raises
    ------
    TypeError
        If the model has no transformer blocks in a known place.
    """
    import_module(FAMILIES_PACKAGE)
    names = (qualified_name(cls) for cls in type(vit).__mro__)
    function = next((_PART_PATHS[name] for name in names if name in _PART_PATHS), default_part_paths)
    part_paths = function(vit)
    if not part_paths.blocks:
        raise TypeError(f"{type(vit).__name__} has no transformer blocks that vitfleet can find")
    return part_paths


def default_part_paths(vit: Any) -> PartPaths:
    """Return the layout by timm's naming: lists called ``blocks``, ``norm`` or ``fc_norm``, and the classifier."""
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
