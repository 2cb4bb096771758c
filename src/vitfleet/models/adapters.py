"""What parameter-efficient tuning adds to a plain ViT: prompt tokens and low-rank factors.

`peft` is not used for the low-rank factors: it adapts a whole linear layer, and timm keeps query, key and value
in one, so "q and v" cannot be said to it; it also renames the layers it wraps, so that a message's names would
no longer be the model's, and its layers hold dictionaries of adapters that cannot be stacked over clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.errors import ConfigError, UserError
from vitfleet.models.anatomy import LORA, PROMPTS, find_blocks, is_plain_vit


def add_prompts(vit: Any, count: int, deep: bool) -> None:
    """Add visual prompts (Jia et al., 2022): tokens learned before the first block, or (deep) before every block."""
    if not is_plain_vit(vit):
        raise UserError(f"model.name: a {type(vit).__name__} cannot take prompts; choose a plain ViT (vit_*, deit_*)")
    width = vit.embed_dim
    patch = vit.patch_embed.proj.kernel_size[0]
    channels = vit.patch_embed.proj.in_channels
    reach = math.sqrt(6 / (channels * patch**2 + width))  # as in the paper's own code
    prompts = torch.empty(len(vit.blocks) if deep else 1, count, width).uniform_(-reach, reach)
    vit.register_parameter(PROMPTS, nn.Parameter(prompts))


@dataclass(frozen=True)
class Target:
    """A linear layer of a block, or the slice of its outputs that a low-rank update is for."""

    path: str
    slice: int = 0
    slices: int = 1


TARGETS = {
    "q": Target("attn.qkv", 0, 3),
    "k": Target("attn.qkv", 1, 3),
    "v": Target("attn.qkv", 2, 3),
    "proj": Target("attn.proj"),
    "fc1": Target("mlp.fc1"),
    "fc2": Target("mlp.fc2"),
}


def add_lora(vit: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Add low-rank updates W + α/r·BA (Hu et al., 2022) to the named layers of every block."""
    blocks = [vit.get_submodule(path) for path in find_blocks(vit)]
    for name in targets:
        if name not in TARGETS or not all(_exists(block, TARGETS[name].path) for block in blocks):
            known = [one for one, target in TARGETS.items() if all(_exists(block, target.path) for block in blocks)]
            has = f"it has {', '.join(known)}" if known else f"a {type(vit).__name__} has none that can be named"
            raise ConfigError("method.targets", name, f"is not in this model; {has}")
    for block in blocks:
        for path in dict.fromkeys(TARGETS[name].path for name in targets):
            parent, _, leaf = path.rpartition(".")
            chosen = {name: TARGETS[name] for name in targets if TARGETS[name].path == path}
            holder = block.get_submodule(parent)
            setattr(holder, leaf, LowRankLinear(getattr(holder, leaf), rank, alpha / rank, chosen))


class LowRankLinear(nn.Linear):
    """A linear layer whose outputs, or slices of them, get a low-rank update; its own names stay."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, targets: dict[str, Target]) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.scale = scale
        self.targets = targets
        self.slices = next(iter(targets.values())).slices
        for name, target in targets.items():
            a = torch.empty(rank, linear.in_features)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            self.register_parameter(f"{LORA}a_{name}", nn.Parameter(a))
            b = torch.zeros(linear.out_features // target.slices, rank)
            self.register_parameter(f"{LORA}b_{name}", nn.Parameter(b))

    def forward(self, input: Tensor) -> Tensor:
        """Return Wx + b with the updates added to their slices."""
        output = super().forward(input)
        parts = list(output.chunk(self.slices, dim=-1))
        for name, target in self.targets.items():
            low = F.linear(input, getattr(self, f"{LORA}a_{name}"))
            update = F.linear(low, getattr(self, f"{LORA}b_{name}"))
            parts[target.slice] = parts[target.slice] + self.scale * update
        return torch.cat(parts, dim=-1)


def _exists(block: nn.Module, path: str) -> bool:
    try:
        return isinstance(block.get_submodule(path), nn.Linear)
    except AttributeError:
        return False
