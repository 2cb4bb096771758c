"""The parameter-efficient tuning baselines of EFTViT's comparison: FedAvg over a few of the model's parameters.

A client receives the frozen weights once, before its first round. After that only the tuned weights are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import nn

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.parts import Selection


class FedFullParams(MethodParams):
    """Tuning baseline: the whole model is trained and sent."""


@register_method("fed-full", FedFullParams, title="Fed-Full")
class FedFull(WeightAveraging[FedFullParams]):
    """The whole model: the reference without any limit on the clients' resources."""


class FedHeadParams(MethodParams):
    """Tuning baseline: only the head is trained and sent."""


@register_method("fed-head", FedHeadParams, title="Fed-Head")
class FedHead(WeightAveraging[FedHeadParams]):
    """Only the head."""

    @property
    def trainable(self) -> Selection:
        """The head."""
        return self.parts.head


class FedBiasParams(MethodParams):
    """Tuning baseline: all biases and the head (BitFit)."""


@register_method("fed-bias", FedBiasParams, title="Fed-Bias")
class FedBias(WeightAveraging[FedBiasParams]):
    """Bias tuning: Ben Zaken et al., "BitFit", 2022."""

    @property
    def trainable(self) -> Selection:
        """All biases and the head."""
        return self.parts.union(self.parts.biases, self.parts.head)


class FedPromptParams(MethodParams):
    """Tuning baseline: visual prompts and the head (VPT)."""

    prompts: int = Field(10, ge=1, le=1000, description="prompt tokens (per layer, when deep)")
    deep: bool = Field(True, description="prompts before every layer, or only before the first")


@register_method("fed-prompt", FedPromptParams, title="Fed-Prompt")
class FedPrompt(WeightAveraging[FedPromptParams]):
    """Visual prompt tuning: Jia et al., 2022."""

    @classmethod
    def adapt_model(cls, params: FedPromptParams, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Add the prompts."""
        add_prompts(vit, params.prompts, params.deep)

    @property
    def trainable(self) -> Selection:
        """The prompts and the head."""
        return self.parts.union(self.parts.prompts, self.parts.head)


class FedLoraParams(MethodParams):
    """Tuning baseline: low-rank updates and the head (LoRA)."""

    rank: int = Field(8, ge=1, le=1024, description="rank r of the updates")
    alpha: float = Field(16.0, gt=0, description="the update is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(("q", "v"), strict=False, min_length=1, description="of q, k, v, proj, fc1, fc2")


@register_method("fed-lora", FedLoraParams, title="Fed-LoRA")
class FedLora(WeightAveraging[FedLoraParams]):
    """Low-rank adaptation: Hu et al., "LoRA", 2022. The two factors A and B are averaged separately."""

    @classmethod
    def adapt_model(cls, params: FedLoraParams, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Add the low-rank factors."""
        add_lora(vit, params.rank, params.alpha, params.targets)

    @property
    def trainable(self) -> Selection:
        """The low-rank factors and the head."""
        return self.parts.union(self.parts.lora, self.parts.head)
