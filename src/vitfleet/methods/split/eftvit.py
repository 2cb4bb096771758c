"""EFTViT: Wu et al., "Efficient Federated Training of Vision Transformers with Masked Images …", ICCV 2025.

The model is split. The local module (embedding and the first M layers) belongs to each client, the global module (the
other N layers) and the head belong to the server. A client drops the fraction r_m (``train.mask_ratio``) of the patches
of every image. The remaining ones pass through its local module, the frozen global module and the head. It trains the
local module and the head (Algorithm 1). It sends no weights, but patch features, the outputs of its local module, with
the same number of samples of every class. The server stores the latest features of every client, trains the global
module and the head on them, and sends both to the clients (Algorithm 2).

In long runs the paper's algorithm loses accuracy: local modules drift apart, and the server memorises the stored views
of the images. The parameters under "Ours" are remedies that the paper does not have; by default they are off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.data.features import FeatureSet
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    ServerGenerator,
    ServerWork,
    train_metrics,
)
from vitfleet.methods.params import check_layers, check_views
from vitfleet.methods.split.feature_recorder import (
    FEATURE_DTYPES,
    FeatureStep,
    RecordingStep,
    balanced_features,
    recording_buffers,
)
from vitfleet.methods.split.feature_store import FeatureStoreUpdate, features_of, stored_in
from vitfleet.methods.split.median_sampling import draw_sampling_plan
from vitfleet.methods.split.server_training import ServerTrainingParams, server_settings
from vitfleet.models.parts import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalTraining

LAST = "last."  # prefix of the server's weights as they were last trained, where it sends their moving average


class EftVitParams(ServerTrainingParams):
    """Masked images on the client, features instead of weights (EFTViT). The mask ratio is ``train.mask_ratio``."""

    local_layers: int = Field(2, ge=1, description="layers M of a client's local module, 1 … the model's layers − 1")
    train_embedding: bool = Field(True, description="whether the embedding, part of the local module, is trained too")
    threshold: float = Field(
        0.5, ge=0, le=1, description="samples sent per class, as a quantile of the class counts: 0.5 median, 1 max"
    )
    feature_dtype: Literal["fp32", "bf16", "fp16", "int8"] = Field(
        "bf16", description="data type in which features are sent and stored"
    )
    # Ours
    views: int = Field(
        1, ge=1, le=1000, description="differently masked views sent per image; the upload grows as much"
    )
    average_local: int | None = Field(
        None, ge=1, description="rounds between averages of the local modules, which clients then send; default: never"
    )
    local_rounds: int | None = Field(
        None, ge=0, description="rounds after which local modules are frozen; default: they always train"
    )
    train_head: bool = Field(
        True,
        description="whether a client with a frozen local module trains a head of its own; false: it only computes "
        "features, and receives the model only in rounds that are evaluated",
    )


@register_method("eftvit", EftVitParams, title="EFTViT")
class EftVit(Method[EftVitParams]):
    """Trains on masked images and sends features instead of weights."""

    usual_mask_ratio = 0.75
    figures = ("balanced-labels",)

    @classmethod
    def check_config(cls, params: EftVitParams, config: Config) -> None:
        """Check M against the number of layers, if the configuration sets it, and the views against the epochs."""
        super().check_config(params, config)
        check_layers("local_layers", params.local_layers, config.model.depth, reserved=1)
        check_views(params.views, config.train.epochs)
        if not params.train_head and (params.local_rounds is None or params.average_local is not None):
            remedy = (
                "only for local modules that are frozen and not averaged; set method.local_rounds (0: frozen from the "
                "first round) and leave method.average_local at null"
            )
            raise ConfigError("method.train_head", params.train_head, remedy)

    @classmethod
    def averages_weights(cls, params: EftVitParams) -> bool:
        """Return whether local modules are averaged."""
        return params.average_local is not None

    def __init__(self, params: EftVitParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if not self.parts.uniform_blocks:
            raise ConfigError(
                "method.name",
                self.name,
                "needs a model that can be split before any layer; choose model.name = vit, deit or t2t",
            )
        check_layers("local_layers", params.local_layers, self.parts.depth, reserved=1)
        blocks = self.parts.blocks
        self.local_module = self.parts.union(self.parts.embed, *blocks[: params.local_layers])
        global_module = self.parts.union(*blocks[params.local_layers :], self.parts.norm)
        self.global_module = global_module
        self.server_module = self.parts.union(global_module, self.parts.head)
        # Where local modules are averaged or never trained, the server has a whole model.
        self.has_global_model = params.average_local is not None or params.local_rounds == 0

    @property
    def trainable(self) -> Selection:
        """What clients train in the first round: the local module, if it is not frozen, and the head."""
        return self._trainable(self.cost_round)

    def _trainable(self, round: int) -> Selection:
        """Return what clients train in a round; nothing if they only compute features."""
        if self.params.local_rounds is not None and round > self.params.local_rounds:
            return self.parts.head if self.params.train_head else self.parts.union()
        local_blocks = self.parts.blocks[: self.params.local_layers]
        local = self.local_module if self.params.train_embedding else self.parts.union(*local_blocks)
        return self.parts.union(local, self.parts.head)

    # Server

    @property
    def state_on_disk(self) -> bool:
        """Whether the stored features are on disk."""
        return self.params.store_on == "disk"

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial local module: all clients start from the same one."""
        return Message(self.local_module.take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial global module and head, without features; with the local module if all share it."""
        server = self.parts.whole if self.has_global_model else self.server_module
        return State(server.take(initial_weights))

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the global module and the head, and the mean local module if the client does not have it yet.

        A client that only computes features needs neither.
        """
        if not self._trainable(round):
            return Message()
        sent = self.server_module
        if self.params.average_local is not None:
            last_average = (round - 1) // self.params.average_local * self.params.average_local
            if last_average and (last_round is None or last_round <= last_average):
                sent = self.parts.whole
        return Message(sent.take(server_state.tensors))

    def evaluation_message(self, server_state: State, round: int) -> Message:
        """Return the global module and the head for clients that do not receive them anyway."""
        return Message() if self._trainable(round) else Message(self.server_module.take(server_state.tensors))

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the update of the stored features and, in some rounds, of the mean local module."""
        averaging = self._averages_local_modules(round)
        return FeatureStoreUpdate(
            server_state,
            self.context,
            round,
            dtype=FEATURE_DTYPES[self.params.feature_dtype],
            keep_previous=self.params.store == "all",
            device=self.context.device if self.params.store_on == "device" else torch.device("cpu"),
            local_modules=WeightedMean(server_state, self.context.aggregation) if averaging else None,
        )

    def server_update(self, server_state: State, round: int) -> ServerGenerator:
        """Train the global module and the head on the stored features (Algorithm 2)."""
        params = self.params
        oldest = 0 if params.max_age is None else round - params.max_age + 1
        stored = [features_of(part) for part in server_state.parts.values() if stored_in(part) >= oldest]
        if params.store_on == "device":
            stored = [features.to(self.context.device) for features in stored]
        if not stored:
            return server_state
        features = FeatureSet(
            stored, params.store_on == "device", params.balance == "clients", token_dropout=params.token_dropout
        )
        tensors = server_state.tensors
        weights = {name: tensors.get(LAST + name, tensors[name]) for name in self.server_module}
        result = yield replace(self._server_training(weights), features=features)
        return replace(server_state, tensors={**tensors, **self._averaged(tensors, result.weights, round)})

    def server_work(self, stored_images: int, new_images: int) -> ServerWork | None:
        """Return the training of the global module, on roughly as many features as the sampling takes from images."""
        params = self.params
        images = stored_images if params.store == "all" else new_images
        # Of unequal class counts, the median is below the mean and the largest above it.
        sampled = round((0.25 + params.threshold) * images)
        return ServerWork(params.server_epochs * params.views * sampled, self._server_training)

    def _server_training(self, weights: Tensors) -> LocalTraining:
        """Return the training of the global module and the head, to be given its features."""
        train = server_settings(self.params, self.context.train)
        step = FeatureStep(self.params.local_layers)
        return LocalTraining(weights, self.server_module, self.params.server_epochs, step, train=train)

    def _averaged(self, previous: Tensors, trained: Tensors, round: int) -> Tensors:
        """Return the weights to send: as trained, or their moving average together with those as trained."""
        if not self.params.server_ema:
            return trained
        # In early rounds the decay is smaller: the initial weights should not stay in the average for long.
        decay = min(self.params.server_ema, round / (round + 10))
        average = {name: torch.lerp(tensor, previous[name], decay) for name, tensor in trained.items()}
        return {**average, **{LAST + name: tensor for name, tensor in trained.items()}}

    def _averages_local_modules(self, round: int) -> bool:
        return self.params.average_local is not None and round % self.params.average_local == 0

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the local module and the head through the frozen global module; send features (Algorithm 1)."""
        epochs, params = self.context.train.epochs, self.params
        local_weights = job.base_weights if job.client_state is None else job.client_state.tensors
        weights = {**local_weights, **job.message.tensors}
        rng = Address(self.context.seed, Purpose.RECORD, job.round, job.client).generator()
        plan = draw_sampling_plan(job.shard.labels.cpu().numpy(), epochs, params.threshold, rng, params.views)
        trainable = self._trainable(job.round)
        step = RecordingStep(params.local_layers, params.feature_dtype, bool(trainable))
        buffers = recording_buffers(plan, params.feature_dtype, self.context)
        needed = weights if trainable else self.local_module.take(weights)
        result = yield LocalTraining(needed, trainable, epochs, step, kept=buffers)
        model = {**weights, **result.weights}
        local_module = self.local_module.take(model)
        sent = local_module if self._averages_local_modules(job.round) else {}
        numbers = train_metrics(result) if trainable else {"samples": result.samples}
        message = Message({**balanced_features(plan, result.kept, self.context.num_classes), **sent}, numbers)
        whole_model = model if job.message.tensors else {}
        never_trained = params.local_rounds == 0
        return ClientUpdate(message, whole_model, None if never_trained else State(local_module))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the client's local module, or the one that all share, with the server's global module and head."""
        local_weights = base_weights if client_state is None else client_state.tensors
        server = self.parts.whole if self.has_global_model else self.server_module
        return {**local_weights, **server.take(server_state.tensors)}
