"""Tables of model, training, evaluation and machine."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from vitfleet.config.base import Table
from vitfleet.config.registry import MODELS, Parameters

#: The body with which a client's model is evaluated: as the client trained it, or as it would receive it now.
EvaluatedBody: TypeAlias = Literal["own", "aggregated"]

HUB_WEIGHTS = "hub"  # timm's weights, downloaded from the Hugging Face hub
SHIPPED_WEIGHTS = ("digits",)  # part of the package; `scripts/make_digits_weights.py` made them
NAMED_WEIGHTS = (HUB_WEIGHTS, *SHIPPED_WEIGHTS)


class ModelConfig(Table):
    """The model. The sizes below are those of ``vit``; other families have theirs in ``params``."""

    name: str = Field(
        "vit",
        description="vit, deit, cait, cvt, levit, pvt, pit, swin, t2t, another registered model, or a timm name",
    )
    image_size: int | None = Field(None, ge=4, le=1024, description="default: the data's size, or timm's own")
    patch_size: int | None = Field(None, ge=1, le=64, description="default: 4, the family's or timm's own")
    dim: int = Field(64, ge=8, le=16384, description="embedding width (for vit)")
    depth: int | None = Field(None, ge=1, le=64, description="number of layers; default: 4, or timm's own")
    heads: int = Field(4, ge=1, le=1024, description="attention heads (for vit)")
    mlp_ratio: float = Field(4.0, ge=0.125, le=64, description="MLP width over embedding width (for vit)")
    params: Annotated[dict[str, Any], Parameters(MODELS)] = Field(
        {}, description="parameters of a registered model that has any"
    )
    weights: str | None = Field(
        None, description="pretrained: a .safetensors file, a folder of them, 'hub', or 'digits' (shipped)"
    )

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> ModelConfig:
        if self.name == "vit" and self.dim % self.heads:
            raise ValueError(f"model.heads = {self.heads}: must divide model.dim = {self.dim}")
        return self


class TrainConfig(Table):
    """A client's local training."""

    epochs: int = Field(1, ge=1, le=10**6, description="passes over a client's images per round")
    batch_size: int = Field(32, ge=1, le=10**6, description="images per step")
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="optimiser; its state starts anew for every client and round"
    )
    lr: float = Field(1e-3, gt=0, description="largest learning rate of the schedule")
    weight_decay: float = Field(0.05, ge=0, description="weight decay, on every trained weight")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="learning-rate schedule, over the rounds of the run or of a task"
    )
    warmup_rounds: int = Field(0, ge=0, description="rounds of linear warm-up before the cosine")
    max_grad_norm: float | None = Field(None, gt=0, description="gradient clipping: largest norm of a step's gradient")
    mask_ratio: float = Field(0.0, ge=0, lt=1, description="fraction r_m of an image's patches dropped at every step")
    cached_views: int = Field(
        0,
        ge=0,
        le=1000,
        description="augmented views of every image of which a client computes the frozen first layers once; later "
        "epochs and rounds train on what it keeps of them; 0: all layers are computed in every epoch",
    )


class EvalConfig(Table):
    """When accuracy is measured, and on how many models."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    batch_size: int = Field(256, ge=1, le=10**6, description="images per evaluation batch")
    clients: int | None = Field(
        100,
        ge=0,
        description="for methods without a global model: client models that are averaged, those of the "
        "same clients in every round; null: all",
    )
    body: EvaluatedBody = Field(
        "own",
        description="for methods that share a body: a client's model has the body as it last trained it (own) or the "
        "server's current one (aggregated)",
    )


class MachineConfig(Table):
    """Device, precision and execution."""

    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the GPU, or the CPU for models 128 wide or more, has it; else fp32"
    )
    deterministic: bool = Field(False, description="bit-identical on a GPU too, slower; a CPU always is")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; default: torch's own")
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="clients trained in parallel threads on a CPU; default: one per CPU thread, where memory allows",
    )
    stack_size: int | None = Field(
        None, ge=1, le=10**4, description="clients trained at once, stacked; default: 1 on a CPU, up to 32 on a GPU"
    )
    graphs: bool = Field(True, description="on a GPU, capture training steps in CUDA graphs and replay them")
    kernels: bool = Field(
        True,
        description="on a GPU, Triton kernels for attention over few tokens and for the optimiser of stacked clients",
    )
    compile: bool | Literal["auto"] = Field(
        False, description="compile the model's forward and backward pass; pays off in long runs; auto: on a GPU"
    )
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
