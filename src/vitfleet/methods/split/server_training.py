"""Parameters of a server that trains on features: EFTViT's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitfleet.config.base import MethodParams
from vitfleet.config.schema import TrainConfig


class ServerTrainingParams(MethodParams):
    """The server's store of features, and its training on them."""

    server_epochs: int = Field(2, ge=1, le=10**6, description="the server's epochs over its stored features per round")
    server_lr: float | None = Field(
        None, gt=0, description="largest learning rate of the server's training; default: train.lr"
    )
    server_batch_size: int | None = Field(
        None, ge=1, description="samples per step of the server's training; default: train.batch_size"
    )
    server_weight_decay: float | None = Field(
        None, ge=0, description="weight decay of the server's training; default: train.weight_decay"
    )
    store: Literal["all", "latest-round"] = Field("all", description="every client's latest features, or this round's")
    store_on: Literal["device", "host", "disk"] = Field(
        "device", description="where the server stores features; disk: memory-mapped from the checkpoint's files"
    )
    balance: Literal["clients", "samples"] = Field(
        "clients", description="whether every client or every sample has the same weight in the server's training"
    )
    # Ours
    max_age: int | None = Field(
        None, ge=1, description="the server trains only on features of the last so many rounds; default: on all"
    )
    token_dropout: float = Field(
        0.0, ge=0, lt=1, description="fraction of a stored sample's patches that the server drops at every step"
    )
    server_ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay per round of a moving average of the weights the server sends and evaluates; 0: none",
    )


def server_settings(params: ServerTrainingParams, train: TrainConfig) -> TrainConfig:
    """Return the settings of the server's training: those of the clients, but for what the parameters set."""
    own = {
        "lr": params.server_lr,
        "batch_size": params.server_batch_size,
        "weight_decay": params.server_weight_decay,
    }
    return train.model_copy(update={key: value for key, value in own.items() if value is not None})
