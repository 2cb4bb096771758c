"""EFTViT: Wu et al., "Efficient Federated Training of Vision Transformers with Masked Images …", ICCV 2025.

The model is split. The local module (embedding and the first M layers) belongs to each client, the global module (the
other N layers) and the head belong to the server. A client drops the fraction r_m (``train.mask_ratio``) of the patches
of every image. The remaining ones pass through its local module, the frozen global module and the head. It trains the
local module and the head (Algorithm 1). It sends no weights, but patch features, the outputs of its local module, with
the same number of samples of every class. The server stores the latest features of every client, trains the global
module and the head on them, and sends both to the clients (Algorithm 2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.data.features import FeatureSet
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientJob,
    ClientUpdate,
    Method,
    ServerGenerator,
    train_metrics,
)
from vitfleet.methods.context import MethodContext
from vitfleet.methods.feature_recorder import FEATURE_DTYPES, FeatureRecorder, balanced_features, recording_buffers
from vitfleet.methods.feature_store import FeatureStoreUpdate, features_of
from vitfleet.methods.median_sampling import draw_sampling_plan
from vitfleet.methods.param_checks import check_layers
from vitfleet.models.anatomy import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.objective import Fit, Objective


class EftVitParams(MethodParams):
    """Masked images on the client, features instead of weights (EFTViT). The mask ratio is ``train.mask_ratio``."""

    local_layers: int = Field(2, ge=1, description="layers M of a client's local module, 1 … the model's layers − 1")
    train_embedding: bool = Field(True, description="whether the embedding, part of the local module, is trained too")
    threshold: float = Field(
        0.5, ge=0, le=1, description="samples sent per class, as a quantile of the class counts: 0.5 median, 1 max"
    )
    feature_dtype: Literal["fp32", "bf16", "fp16", "int8"] = Field(
        "bf16", description="data type in which features are sent and stored"
    )
    server_epochs: int = Field(2, ge=1, description="the server's epochs over its stored features per round")
    store: Literal["all", "latest-round"] = Field("all", description="every client's latest features, or this round's")
    store_on: Literal["device", "host", "disk"] = Field(
        "device", description="where the server stores features; disk: memory-mapped from the checkpoint's files"
    )
    balance: Literal["clients", "samples"] = Field(
        "clients", description="whether every client or every sample has the same weight in the server's training"
    )


@register_method("eftvit", EftVitParams)
class EftVit(Method[EftVitParams]):
    """Trains on masked images and sends features instead of weights."""

    usual_mask_ratio = 0.75
    has_global_model = False
    figures = ("balanced-labels",)

    @classmethod
    def check_config(cls, params: EftVitParams, config: Config) -> None:
        """Check M against the number of layers, if the configuration sets it."""
        super().check_config(params, config)
        check_layers("local_layers", params.local_layers, config.model.depth, reserved=1)

    def __init__(self, params: EftVitParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if not self.anatomy.is_plain_vit:
            raise ConfigError("method.name", self.name, "needs a plain ViT (vit_*, deit_*), which can be split")
        check_layers("local_layers", params.local_layers, self.anatomy.depth, reserved=1)
        blocks = self.anatomy.blocks
        self.local_module = self.anatomy.union(self.anatomy.embed, *blocks[: params.local_layers])
        self.global_module = self.anatomy.union(*blocks[params.local_layers :], self.anatomy.norm)

    @property
    def trainable(self) -> Selection:
        """The local module and the head."""
        local_blocks = self.anatomy.blocks[: self.params.local_layers]
        local = self.local_module if self.params.train_embedding else self.anatomy.union(*local_blocks)
        return self.anatomy.union(local, self.anatomy.head)

    # Server

    @property
    def state_on_disk(self) -> bool:
        """Whether the stored features are on disk."""
        return self.params.store_on == "disk"

    def base_message(self, initial_weights: Tensors) -> Message:
        """Return the initial local module: all clients start from the same one."""
        return Message(self.local_module.take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial global module and head, without features."""
        return State(self.anatomy.union(self.global_module, self.anatomy.head).take(initial_weights))

    def client_message(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the global module and the head."""
        return Message(server_state.tensors)

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the update of the stored features."""
        return FeatureStoreUpdate(
            server_state,
            self.context,
            dtype=FEATURE_DTYPES[self.params.feature_dtype],
            keep_previous=self.params.store == "all",
            device=self.context.device if self.params.store_on == "device" else torch.device("cpu"),
        )

    def server_update(self, server_state: State, round: int) -> ServerGenerator:
        """Train the global module and the head on the stored features (Algorithm 2)."""
        stored = [features_of(part) for part in server_state.parts.values()]
        if self.params.store_on == "device":
            stored = [features.to(self.context.device) for features in stored]
        if not stored:
            return server_state
        objective = Objective(self.anatomy.union(self.global_module, self.anatomy.head), split=self.params.local_layers)
        feature_set = FeatureSet(
            stored, on_device=self.params.store_on == "device", equal_clients=self.params.balance == "clients"
        )
        result = yield Fit(server_state.tensors, objective, self.params.server_epochs, features=feature_set)
        return replace(server_state, tensors=result.weights)

    # Client

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train the local module and the head through the frozen global module; send features (Algorithm 1)."""
        epochs, feature_dtype = self.context.train.epochs, self.params.feature_dtype
        local_weights = job.base_weights if job.client_state is None else job.client_state.tensors
        weights = {**local_weights, **job.message.tensors}
        rng = Address(self.context.seed, Purpose.RECORD, job.round, job.client).generator()
        plan = draw_sampling_plan(job.shard.labels.cpu().numpy(), epochs, self.params.threshold, rng)
        objective = Objective(self.trainable, observer=FeatureRecorder(feature_dtype), split=self.params.local_layers)
        buffers = recording_buffers(plan, feature_dtype, self.context)
        result = yield Fit(weights, objective, epochs, observer_state=buffers)
        model = {**weights, **result.weights}
        message = Message(balanced_features(plan, result.observed), train_metrics(result))
        return ClientUpdate(message, model, State(self.local_module.take(model)))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the client's local module with the server's global module and head."""
        local_weights = base_weights if client_state is None else client_state.tensors
        return {**local_weights, **server_state.tensors}
