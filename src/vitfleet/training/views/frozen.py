"""The first part of a model that nothing changes during a run, and what it makes of a client's images."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.models.net import Net
from vitfleet.models.parts import ModelParts

VIEWS = "views"  # the name of the tensor of cached views


@dataclass(frozen=True)
class FrozenPart:
    """The first part of a model that nothing changes during a run.

    Attributes
    ----------
    names
        The weights that decide what it computes.
    split
        The block that its tokens enter; ``None``: it is the whole body, and what it computes is what the head sees.
    """

    names: tuple[str, ...]
    split: int | None

    def shape(self, net: Net, mask_ratio: float) -> tuple[int, ...]:
        """Return the shape of what it computes of one image."""
        if self.split is None:
            return (net.representation_width,)
        return net.num_prefix_tokens + net.num_kept_patches(mask_ratio), net.embed_dim


@dataclass(frozen=True)
class CachedViews:
    """What the frozen part makes of a client's images: of each image as often as it was augmented and masked."""

    values: Tensor  # [views · samples, …], one view of all samples after the other
    count: int  # views of each image
    part: FrozenPart


def find_frozen_part(parts: ModelParts, fixed: Collection[str]) -> FrozenPart | None:
    """Return the longest first part of a model of which all weights are fixed; ``None`` if it has no whole block."""
    fixed, head = frozenset(fixed), frozenset(parts.head)
    changing = parts.shapes.keys() - fixed
    if changing <= head:
        return FrozenPart(tuple(parts.body), None)
    after = {name for part in (*parts.blocks, parts.norm, parts.head) for name in part}
    split = next((index for index, block in enumerate(parts.blocks) if changing & set(block)), parts.depth)
    if not changing <= after or not parts.uniform_blocks or not split:
        return None
    return FrozenPart(tuple(parts.union(parts.embed, *parts.blocks[:split])), split)


def images_needed(what: str) -> UserError:
    """Return the error about a step that does with its batch what cached views do not allow."""
    return UserError(
        f"train.cached_views: must be 0, because the method's step {what}: that needs the images themselves"
    )
