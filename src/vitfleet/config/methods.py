"""The parameters of every method; ``method.name`` says which table is meant."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitfleet.config.base import Table


class StandaloneConfig(Table):
    """Every client trains alone; nothing travels but the initial model."""

    name: Literal["standalone"] = "standalone"


class FedAvgConfig(Table):
    """Federated averaging, weighted by samples (McMahan et al., 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProxConfig(Table):
    """FedAvg with a proximal term μ/2·‖w − w_t‖² on the client (Li et al., 2020)."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="weight μ of the proximal term")


class TransFLConfig(Table):
    """Clients send only the k layers with the largest gradients (TransFL)."""

    name: Literal["transfl"] = "transfl"
    k: int = Field(3, ge=1, description="layers sent, 1 … the model's layers")
    statistic: Literal["mean-abs", "rms"] = Field(
        "mean-abs", description="what ranks a layer: the mean |gradient| (the paper's), or its root mean square"
    )
    always: tuple[Literal["embed", "norm", "head"], ...] = Field(
        ("embed", "norm", "head"), strict=False, description="the parts besides layers that travel every round"
    )


class FedFullConfig(Table):
    """Tuning baseline: the whole model trains and travels."""

    name: Literal["fed-full"] = "fed-full"


class FedHeadConfig(Table):
    """Tuning baseline: only the head trains and travels."""

    name: Literal["fed-head"] = "fed-head"


class FedBiasConfig(Table):
    """Tuning baseline: all biases and the head (BitFit)."""

    name: Literal["fed-bias"] = "fed-bias"


class FedPromptConfig(Table):
    """Tuning baseline: visual prompts and the head (VPT)."""

    name: Literal["fed-prompt"] = "fed-prompt"
    prompts: int = Field(10, ge=1, le=1000, description="prompt tokens (a layer, when deep)")
    deep: bool = Field(True, description="prompts before every layer, or only before the first")


class FedLoraConfig(Table):
    """Tuning baseline: low-rank updates and the head (LoRA)."""

    name: Literal["fed-lora"] = "fed-lora"
    rank: int = Field(8, ge=1, le=1024, description="rank r of the updates")
    alpha: float = Field(16.0, gt=0, description="the update is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(("q", "v"), strict=False, min_length=1, description="of q, k, v, proj, fc1, fc2")


class FedBfptConfig(Table):
    """Layer after layer, through a shallow local model (FEDBFPT)."""

    name: Literal["fedbfpt"] = "fedbfpt"
    local_layers: int = Field(6, ge=2, description="layers of a client's model, 2 … the model's layers")


class EftVitConfig(Table):
    """Masked images on the client, features instead of weights (EFTViT). The mask is ``train.mask_ratio``."""

    name: Literal["eftvit"] = "eftvit"
    local_layers: int = Field(2, ge=1, description="layers M of a client's local module, 1 … the model's layers − 1")
    train_embedding: bool = Field(True, description="whether embedding and positions, local anyway, train too")
    threshold: float = Field(
        0.5, ge=0, le=1, description="samples sent of a class, as a quantile of the class counts: 0.5 median, 1 max"
    )
    values: Literal["fp32", "bf16", "fp16", "int8"] = Field("bf16", description="how features travel and are stored")
    server_epochs: int = Field(2, ge=1, description="the server's passes over its store in a round")
    store: Literal["all", "latest-round"] = Field("all", description="every client's latest features, or this round's")
    store_on: Literal["device", "host", "disk"] = Field(
        "device", description="where the server's store lies; disk: memory-mapped from the checkpoint's files"
    )
    balance: Literal["clients", "samples"] = Field(
        "clients", description="whether every client or every sample counts the same in the server's training"
    )


class FedPerConfig(Table):
    """FedAvg under the rule that the body is shared and the head is each client's own (FedPer)."""

    name: Literal["fedper"] = "fedper"


class FedRepConfig(Table):
    """Head epochs with the body frozen, then body epochs with the head frozen; the body is averaged (FedRep)."""

    name: Literal["fedrep"] = "fedrep"
    head_epochs: int = Field(1, ge=0, description="of train.epochs, those that train the head; the rest train the body")


class MemoryTable(Table):
    """What methods that store samples of learned tasks have in common."""

    rho: float = Field(0.1, gt=0, le=1, description="share ρ of a task's samples, of every class, that is stored")
    memory_bytes: int | None = Field(
        None, ge=1, description="most bytes stored a client; the tasks are cut to a common size; null: no limit"
    )
    check: bool = Field(False, description="verify at every step that the angle to no stored task is obtuse")


class GemConfig(MemoryTable):
    """Gradient episodic memory: no step against the gradient of a stored task (GEM)."""

    name: Literal["gem"] = "gem"
    margin: float = Field(0.0, ge=0, description="least weight of each stored task once one is violated (GEM: 0.5)")


class AGemConfig(MemoryTable):
    """No step against the gradient of all stored tasks together (A-GEM)."""

    name: Literal["a-gem"] = "a-gem"


class FedVitConfig(MemoryTable):
    """Knowledge extractor, gradient restorer, gradient integrator (FedViT)."""

    name: Literal["fedvit"] = "fedvit"
    head_epochs: int = Field(1, ge=0, description="of train.epochs, those that train the head; the rest train the body")
    k: int = Field(10, ge=1, description="stored tasks that are integrated: the most dissimilar ones")
    rank_every: int = Field(1, ge=1, description="steps that a ranking of the stored tasks serves")
    tune_epochs: int = Field(1, ge=0, description="epochs of fine tuning after an aggregation")


MethodConfig = Annotated[
    StandaloneConfig
    | FedAvgConfig
    | FedProxConfig
    | TransFLConfig
    | FedFullConfig
    | FedHeadConfig
    | FedBiasConfig
    | FedPromptConfig
    | FedLoraConfig
    | FedBfptConfig
    | EftVitConfig
    | FedPerConfig
    | FedRepConfig
    | GemConfig
    | AGemConfig
    | FedVitConfig,
    Field(discriminator="name"),
]
