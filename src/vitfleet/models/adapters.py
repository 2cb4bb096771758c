"""Parameter-efficient tuning of a plain ViT: prompt tokens and low-rank factors.

`peft` is not used for the low-rank factors. It adapts a whole linear layer, but timm keeps query, key and value in one
layer, so `peft` cannot adapt q and v alone. It also renames the layers it wraps, so that the names in a message would
no longer be the model's, and its layers hold dictionaries of adapters, which cannot be stacked over clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.errors import ConfigError, UserError
from vitfleet.models.parts import LORA_PREFIX, PROMPTS_NAME, LoraTarget, part_paths_of


def add_prompts(vit: Any, count: int, deep: bool) -> None:
    """Add visual prompts (Jia et al., 2022): learned tokens before the first block or, if deep, before every block."""
    if part_paths_of(vit).functional is None:
        raise UserError(
            f"model.name: a {type(vit).__name__} cannot take prompts; choose a plain ViT (vit, deit, t2t, or timm's "
            "vit_*, deit_*)"
        )
    embed_dim = vit.embed_dim
    patch_numbers = vit.patch_embed.proj.weight[0].numel()
    bound = math.sqrt(6 / (patch_numbers + embed_dim))  # as in the paper's code
    prompts = torch.empty(len(vit.blocks) if deep else 1, count, embed_dim).uniform_(-bound, bound)
    vit.register_parameter(PROMPTS_NAME, nn.Parameter(prompts))


def add_lora(vit: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Add low-rank updates W + α/r·BA (Hu et al., 2022) to the named layers of every block."""
    part_paths = part_paths_of(vit)
    blocks, places_of = [vit.get_submodule(path) for path in part_paths.blocks], part_paths.lora_targets
    found = [{name: _find_target(block, places) for name, places in places_of.items()} for block in blocks]
    available = [name for name in places_of if all(of_block[name] is not None for of_block in found)]
    for name in targets:
        if name not in available:
            choice = (
                f"choose from {', '.join(available)}" if available else f"a {type(vit).__name__} has no such layers"
            )
            raise ConfigError("method.targets", name, f"is not in this model; {choice}")
    for block, of_block in zip(blocks, found, strict=True):
        wanted = {name: target for name in targets if (target := of_block[name]) is not None}
        for path in dict.fromkeys(target.path for target in wanted.values()):
            parent_path, _, attribute = path.rpartition(".")
            of_layer = {name: target for name, target in wanted.items() if target.path == path}
            parent = block.get_submodule(parent_path)
            setattr(parent, attribute, LowRankLinear(getattr(parent, attribute), rank, alpha / rank, of_layer))


class LowRankLinear(nn.Linear):
    """A linear layer with low-rank updates of its outputs or of slices of them; weight and bias keep their names."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, targets: Mapping[str, LoraTarget]) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.scale = scale
        self.targets = targets
        self.num_slices = next(iter(targets.values())).num_slices
        for name, target in targets.items():
            a = torch.empty(rank, linear.in_features)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            self.register_parameter(f"{LORA_PREFIX}a_{name}", nn.Parameter(a))
            b = torch.zeros(linear.out_features // target.num_slices, rank)
            self.register_parameter(f"{LORA_PREFIX}b_{name}", nn.Parameter(b))

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the factors A and B of one target."""
        return getattr(self, f"{LORA_PREFIX}a_{name}"), getattr(self, f"{LORA_PREFIX}b_{name}")

    def joint_factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors of all targets as one pair: the rows of A below each other, B in blocks."""
        rows = self.out_features // self.num_slices
        factors = [(target.slice, *self.factors(name)) for name, target in self.targets.items()]
        joint_b = torch.zeros(self.out_features, sum(a.shape[0] for _, a, _ in factors))
        column = 0
        for slice_index, a, b in factors:
            joint_b[slice_index * rows : (slice_index + 1) * rows, column : column + a.shape[0]] = b
            column += a.shape[0]
        return torch.cat([a for _, a, _ in factors]), joint_b

    def forward(self, input: Tensor) -> Tensor:
        """Return Wx + b with the low-rank updates added to their slices."""
        output = super().forward(input)
        slices = list(output.chunk(self.num_slices, dim=-1))
        for name, target in self.targets.items():
            a, b = self.factors(name)
            update = F.linear(F.linear(input, a), b)
            slices[target.slice] = slices[target.slice] + self.scale * update
        return torch.cat(slices, dim=-1)


def _find_target(block: nn.Module, places: Sequence[LoraTarget]) -> LoraTarget | None:
    """Return the first of the places where a block has a linear layer; ``None`` if there is none."""
    modules = dict(block.named_modules())
    return next((target for target in places if isinstance(modules.get(target.path), nn.Linear)), None)


def merged_weights(vit: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights without low-rank factors: each update is added to the weight that it updates."""
    weights = {name: tensor.detach().clone() for name, tensor in vit.state_dict().items()}
    for path, module in vit.named_modules():
        if isinstance(module, LowRankLinear):
            a, b = module.joint_factors()
            weights[f"{path}.weight"] += module.scale * (b @ a)
    return {name: tensor for name, tensor in weights.items() if not name.rpartition(".")[2].startswith(LORA_PREFIX)}
