"""The tuning baselines of EFTViT's comparison: FedAvg over a few of the model's parameters.

The frozen rest is given to a client once, at its first contact; after that only what is tuned travels.
"""

from __future__ import annotations

from torch import nn

from vitfleet.config.methods import FedBiasConfig, FedFullConfig, FedHeadConfig, FedLoraConfig, FedPromptConfig
from vitfleet.methods.fedavg import WeightAveraging
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.anatomy import Selection


class FedFull(WeightAveraging[FedFullConfig]):
    """The whole model: the reference without any limit on what a client can do."""

    name = "fed-full"


class FedHead(WeightAveraging[FedHeadConfig]):
    """Only the head."""

    name = "fed-head"

    @property
    def trainable(self) -> Selection:
        """The head."""
        return self.anatomy.head


class FedBias(WeightAveraging[FedBiasConfig]):
    """Bias tuning: Ben Zaken et al., "BitFit", 2022."""

    name = "fed-bias"

    @property
    def trainable(self) -> Selection:
        """Every bias, and the head."""
        return self.anatomy.union(self.anatomy.biases, self.anatomy.head)


class FedPrompt(WeightAveraging[FedPromptConfig]):
    """Visual prompt tuning: Jia et al., 2022."""

    name = "fed-prompt"

    @classmethod
    def adapt_model(cls, params: FedPromptConfig, vit: nn.Module) -> None:
        """Add the prompts."""
        add_prompts(vit, params.prompts, params.deep)

    @property
    def trainable(self) -> Selection:
        """The prompts, and the head."""
        return self.anatomy.union(self.anatomy.prompts, self.anatomy.head)


class FedLora(WeightAveraging[FedLoraConfig]):
    """Low-rank adaptation: Hu et al., "LoRA", 2022. The two factors are averaged one by one."""

    name = "fed-lora"

    @classmethod
    def adapt_model(cls, params: FedLoraConfig, vit: nn.Module) -> None:
        """Add the factors."""
        add_lora(vit, params.rank, params.alpha, params.targets)

    @property
    def trainable(self) -> Selection:
        """The factors, and the head."""
        return self.anatomy.union(self.anatomy.lora, self.anatomy.head)
