"""EFTViT: Wu et al., "Efficient Federated Training of Vision Transformers with Masked Images …", ICCV 2025.

The model is split. The local module (embedding and the first M layers) belongs to each client, the global module (the
other N layers) and the head belong to the server. A client drops the fraction r_m (``train.mask_ratio``) of the patches
of every image. The remaining ones pass through its local module, the frozen global module and the head. It trains the
local module and the head (Algorithm 1). It sends no weights, but patch features, the outputs of its local module, with
the same number of samples of every class (:mod:`~vitfleet.methods.split.median_sampling`). The server stores the latest
features of every client, trains the global module and the head on them, and sends both to the clients (Algorithm 2).

In long runs the paper's algorithm loses accuracy: local modules drift apart, and the server memorises the stored views
of the images. The parameters under "Ours" are remedies that the paper does not have; by default they are off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.data.features import Features, FeatureSet, quantize
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors, label_dtype, to_device
from vitfleet.methods.aggregation.defence import usual
from vitfleet.methods.aggregation.limits import check_rms
from vitfleet.methods.aggregation.weighted_mean import WeightedMean, norm_outliers
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    ServerGenerator,
    ServerWork,
    Work,
    train_metrics,
)
from vitfleet.methods.params import check_layers
from vitfleet.methods.reported import RejectedUpdateError, check_complete
from vitfleet.methods.split.median_sampling import SamplingPlan, draw_sampling_plan
from vitfleet.models.parts import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

FEATURES, SCALES, LABELS = "features", "scales", "labels"  # the tensors that a client sends and the server stores
ROWS = "rows"  # of the sampling plan, among the constants of the client's training
LAST = "last."  # prefix of the server's weights as they were last trained, where it sends their moving average
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
MEGABYTE = 10**6
MOST_SAMPLES = 4  # times the round's median of reported samples: the rows of more are dropped, where devices may lie
SIZE_MULTIPLE = 32  # sizes are rounded up to a multiple of this, so that shapes recur from client to client


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
    store_mb: float = Field(
        20_000, gt=0, description="largest size of the stored features, in megabytes; features beyond it are rejected"
    )
    balance: Literal["clients", "samples"] = Field(
        "clients", description="whether every client or every sample has the same weight in the server's training"
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


@register_method("eftvit", EftVitParams, title="EFTViT")
class EftVit(Method[EftVitParams]):
    """Trains on masked images and sends features instead of weights."""

    usual_mask_ratio = 0.75
    has_known_size = False
    figures = ("balanced-labels",)

    @classmethod
    def check_config(cls, params: EftVitParams, config: Config) -> None:
        """Check M against the number of layers, if the configuration sets it, and the views against the epochs."""
        super().check_config(params, config)
        check_layers("local_layers", params.local_layers, config.model.depth, reserved=1)
        epochs = config.train.epochs
        if params.views > epochs:
            remedy = f"must be at most train.epochs = {epochs}: every epoch gives one view"
            raise ConfigError("method.views", params.views, remedy)
        if not params.train_head and (params.local_rounds is None or params.average_local is not None):
            remedy = (
                "only for local modules that are frozen and not averaged; set method.local_rounds (0: frozen from the "
                "first round) and leave method.average_local at null"
            )
            raise ConfigError("method.train_head", params.train_head, remedy)

    @classmethod
    def takes_head(cls, params: EftVitParams) -> bool:
        """Return true: the server has the head."""
        return True

    @classmethod
    def declared_work(cls, params: EftVitParams, config: Config) -> Work:
        """Return the work with the patches whose features are sent."""
        shown = params.views * (1 - config.train.mask_ratio)
        return replace(super().declared_work(params, config), shown_share=shown)

    @classmethod
    def averages_weights(cls, params: EftVitParams) -> bool:
        """Return whether local modules are averaged."""
        return params.average_local is not None

    def __init__(self, params: EftVitParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if not self.parts.uniform_blocks:
            remedy = "needs a model that can be split before any layer; choose model.name = vit, deit or t2t"
            raise ConfigError("method.name", self.name, remedy)
        check_layers("local_layers", params.local_layers, self.parts.depth, reserved=1)
        model_parts, local_blocks = self.parts, self.parts.blocks[: params.local_layers]
        self.local_module = model_parts.union(model_parts.embed, *local_blocks)
        self.trained_locally = self.local_module if params.train_embedding else model_parts.union(*local_blocks)
        self.global_module = model_parts.union(*model_parts.blocks[params.local_layers :], model_parts.norm)
        self.server_module = model_parts.union(self.global_module, model_parts.head)
        # Where local modules are averaged or never trained, the server has a whole model.
        self.has_global_model = params.average_local is not None or params.local_rounds == 0

    @property
    def feature_split(self) -> int:
        """The block after the local module."""
        return self.params.local_layers

    @property
    def trainable(self) -> Selection:
        """What clients train in the first round: the local module, if it is not frozen, and the head."""
        return self.trainable_in(self.cost_round)

    def trainable_in(self, round: int) -> Selection:
        """Return what clients train in a round; nothing if they only compute features."""
        if self.params.local_rounds is not None and round > self.params.local_rounds:
            return self.parts.head if self.params.train_head else self.parts.union()
        return self.parts.union(self.trained_locally, self.parts.head)

    def averages_local_modules(self, round: int) -> bool:
        """Return whether clients send their local modules in a round, to be averaged."""
        return self.params.average_local is not None and round % self.params.average_local == 0

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
        if not self.trainable_in(round):
            return Message()
        sent = self.server_module
        if self.params.average_local is not None:
            last_average = (round - 1) // self.params.average_local * self.params.average_local
            if last_average and (last_round is None or last_round <= last_average):
                sent = self.parts.whole
        return Message(sent.take(server_state.tensors))

    def evaluation_message(self, server_state: State, round: int) -> Message:
        """Return the global module and the head for clients that do not receive them anyway."""
        return Message() if self.trainable_in(round) else Message(self.server_module.take(server_state.tensors))

    def check_update(self, expected: Message, update: Message) -> None:
        """Do nothing: how many rows a client sends depends on its images. The aggregator checks their form."""

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the update of the stored features and, in some rounds, of the mean local module."""
        return FeatureStoreUpdate(self, server_state, round)

    def most_per_class(self, samples: int, classes: int) -> int:
        """Return the most rows of a class that a client with so many samples of so many classes sends."""
        # The threshold is a quantile of the class counts: the classes from it on have at least as many samples.
        from_threshold = max(1, classes - 1 - math.floor(self.params.threshold * (classes - 1)))
        return self.params.views * math.ceil(samples / from_threshold)

    def server_update(self, server_state: State, round: int) -> ServerGenerator:
        """Train the global module and the head on the stored features (Algorithm 2)."""
        params, tensors, on_device = self.params, server_state.tensors, self.params.store_on == "device"
        rounds = range(0 if params.max_age is None else round - params.max_age + 1, round + 1)
        stored = [features_of(part.tensors) for part in server_state.parts.values() if part.numbers["round"] in rounds]
        if not stored:
            return server_state
        if on_device:
            stored = [features.to(self.context.device) for features in stored]
        features = FeatureSet(stored, on_device, params.balance == "clients", params.token_dropout)
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
        params = self.params
        own = {
            "lr": params.server_lr,
            "batch_size": params.server_batch_size,
            "weight_decay": params.server_weight_decay,
        }
        train = self.context.train.model_copy(update={key: value for key, value in own.items() if value is not None})
        step = FeatureStep(params.local_layers)
        return LocalTraining(weights, self.server_module, params.server_epochs, step, train=train)

    def _averaged(self, previous: Tensors, trained: Tensors, round: int) -> Tensors:
        """Return the weights to send: as trained, or their moving average together with those as trained."""
        if not self.params.server_ema:
            return trained
        # In early rounds the decay is smaller: the initial weights should not stay in the average for long.
        decay = min(self.params.server_ema, round / (round + 10))
        average = {name: torch.lerp(tensor, previous[name], decay) for name, tensor in trained.items()}
        return {**average, **{LAST + name: tensor for name, tensor in trained.items()}}

    def with_head(self, server_state: State, head: Tensors, round: int) -> State:
        """Return the server's state with another head, also where its training goes on."""
        last = {LAST + name: weight for name, weight in head.items() if LAST + name in server_state.tensors}
        return super().with_head(server_state, {**head, **last}, round)

    # Client

    def own_body(self, client_state: State | None) -> Tensors:
        """Return the client's local module, where the server has none."""
        return {} if self.has_global_model or client_state is None else client_state.tensors

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the local module and the head through the frozen global module; send features (Algorithm 1)."""
        epochs, params = self.context.train.epochs, self.params
        local_weights = job.base_weights if job.client_state is None else job.client_state.tensors
        weights = {**local_weights, **job.message.tensors}
        rng = Address(self.context.seed, Purpose.RECORD, job.round, job.client).generator()
        plan = draw_sampling_plan(job.shard.labels.cpu().numpy(), epochs, params.threshold, rng, params.views)
        trainable = self.trainable_in(job.round)
        needed = weights if trainable else self.local_module.take(weights)
        step = RecordingStep(params.local_layers, params.feature_dtype, bool(trainable))
        rows, recording = self._recording(plan)
        result = yield LocalTraining(needed, trainable, epochs, step, constants=rows, kept=recording)
        model = {**weights, **result.weights}
        local_module = self.local_module.take(model)
        sent = local_module if self.averages_local_modules(job.round) and result.samples else {}
        numbers = train_metrics(result) if trainable else {"samples": result.samples}
        message = Message({**self._balanced_features(plan, result.kept), **sent}, numbers)
        client_state = None if params.local_rounds == 0 else State(local_module)  # one that is never trained is known
        return ClientUpdate(message, model if job.message.tensors else {}, client_state)

    def _recording(self, plan: SamplingPlan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the rows of the plan, and empty features: at least one row more, for what is not recorded."""
        context, dtype = self.context, DTYPES[self.params.feature_dtype]
        rows = torch.from_numpy(plan.rows)
        rows = F.pad(rows, (0, -rows.shape[1] % SIZE_MULTIPLE)).to(context.device)
        num_rows = plan.num_recorded + 1
        num_rows += -num_rows % SIZE_MULTIPLE
        features = torch.zeros(num_rows, context.num_tokens, context.embed_dim, dtype=dtype, device=context.device)
        scales = {SCALES: torch.ones(features.shape[:2], device=context.device)} if dtype == torch.int8 else {}
        return {ROWS: rows}, {FEATURES: features, **scales}

    def _balanced_features(self, plan: SamplingPlan, recorded: Tensors) -> dict[str, Tensor]:
        """Return what is sent: the same number of samples of every class."""
        if not plan.num_recorded:
            return {}
        sent_rows = torch.from_numpy(plan.sent_rows).to(recorded[FEATURES].device)
        labels = torch.from_numpy(plan.sent_labels).to(label_dtype(self.context.num_classes))
        return {**{name: tensor[sent_rows] for name, tensor in recorded.items()}, LABELS: labels}

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the client's local module, or the one that all share, with the server's global module and head."""
        local_weights = base_weights if client_state is None else client_state.tensors
        server = self.parts.whole if self.has_global_model else self.server_module
        return {**local_weights, **server.take(server_state.tensors)}


@dataclass(frozen=True)
class RecordingStep:
    """The client's step: records the features of the sampling plan, and follows the gradient if anything trains."""

    split: int
    feature_dtype: str
    trains: bool

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        if not self.trains:
            view.keep(view.map(self.record, view.kept, view.features(batch, self.split)))
            return {}
        computed = view.value_and_grad(cross_entropy, batch, split=self.split)
        view.keep(view.map(self.record, view.kept, computed.outputs[0]))
        return computed.gradients

    def record(self, kept: Tensors, outputs: Outputs) -> Tensors:
        """Write the features of one step to their rows, in place."""
        assert outputs.features is not None
        features = outputs.features.detach().float()
        # The last row is never sent; padding is written to it.
        last_row = kept[FEATURES].shape[0] - 1
        # A scalar index would be read by the host; an index tensor with one element is not.
        epoch_rows = outputs.constants[ROWS].index_select(0, outputs.epoch.reshape(1)).squeeze(0)
        rows = torch.where(outputs.sample_weight > 0, epoch_rows[outputs.positions], last_row)
        if SCALES in kept:
            features, scales = quantize(features)
            kept[SCALES].index_put_((rows,), scales)
        kept[FEATURES].index_put_((rows,), features.to(DTYPES[self.feature_dtype]))
        return kept


@dataclass(frozen=True)
class FeatureStep:
    """The server's step: follows the gradient of the cross-entropy of features that enter the model at the split."""

    split: int

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(cross_entropy, batch, split=self.split)


class FeatureStoreUpdate(Aggregator):
    """Replaces the stored features of each client, one part of the server's state, by those it sent in a round.

    With ``store = "latest-round"`` the features of all other clients are dropped (section 3.5), else kept (section
    3.6). Where clients send their local modules, it averages these.
    """

    def __init__(self, method: EftVit, server_state: State, round: int) -> None:
        self.method = method
        self.context = method.context
        self.limits = method.context.aggregation
        self.server_state = server_state
        self.round = round
        self.received: dict[int, State] = {}
        self.samples: dict[int, int] = {}
        self.sizes: dict[int, float] = {}
        averages = method.averages_local_modules(round)
        self.local_modules = WeightedMean(server_state, self.limits) if averages else None

    def add(self, client: int, message: Message) -> None:
        """Store a client's features in place of its previous ones."""
        samples = message.numbers["samples"]
        assert isinstance(samples, int)  # else the update was rejected
        if not message.tensors and not samples:
            return
        names = (FEATURES, SCALES, LABELS)
        sent = {name: tensor for name, tensor in message.tensors.items() if name in names}
        others = {name: tensor for name, tensor in message.tensors.items() if name not in names}
        rms = self._checked_rms(sent, samples)
        if self.local_modules is not None:
            check_complete(others, self.method.local_module)
            self.local_modules.earlier_samples = self.earlier_samples
            self.local_modules.earlier_sizes = ()  # those of the round before are of features
            self.local_modules.add(client, replace(message, tensors=others))
        elif others:
            raise RejectedUpdateError(f"its message has an unknown tensor {min(others)!r}")
        device = self.context.device if self.method.params.store_on == "device" else torch.device("cpu")
        self.received[client] = State(to_device(sent, device), {"round": self.round})
        self.sizes[client], self.samples[client] = rms, samples

    def _checked_rms(self, sent: Tensors, samples: int) -> float:
        """Return the root mean square of a client's features, if they can be trained on and are within the limits."""
        self._check_form(sent)
        classes, labels = self.context.num_classes, sent[LABELS]
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            raise RejectedUpdateError(f"its labels are not all between 0 and {classes - 1}")
        counts = torch.bincount(labels.long())
        counts = counts[counts > 0]
        if len(labels) and int(counts.min()) != int(counts.max()):
            raise RejectedUpdateError("its features are not as many of every class")
        most_rows = self.method.most_per_class(samples, len(counts)) if len(labels) else 0
        if len(labels) and int(counts.max()) > most_rows:
            rows = f"{len(labels)} rows of features of {samples} images; expected: at most {most_rows} of a class"
            raise RejectedUpdateError(f"it sends {rows}")
        rms, most = features_of(sent).rms(), self.limits.max_change
        if not math.isfinite(rms):
            raise RejectedUpdateError("its features are not finite")
        if most is not None and rms > most:  # as of a weight that starts at zero
            raise RejectedUpdateError(f"its features have the size {rms:.3g}; aggregate.max_change = {most:g}")
        check_rms(rms, [*self.earlier_sizes, *self.sizes.values()], self.limits, floor=0.0)
        return rms

    def _check_form(self, sent: Tensors) -> None:
        """Reject features of another form than the method's clients send."""
        context, dtype = self.context, DTYPES[self.method.params.feature_dtype]
        samples = len(sent[LABELS]) if LABELS in sent and sent[LABELS].dim() else 0
        shape = (samples, context.num_tokens, context.embed_dim)
        expected = {FEATURES: (dtype, shape), LABELS: (label_dtype(context.num_classes), shape[:1])}
        if dtype == torch.int8:
            expected[SCALES] = torch.float32, shape[:2]
        if sent.keys() != expected.keys():
            raise RejectedUpdateError(f"its message has {sorted(sent)}; expected: {sorted(expected)}")
        for name, tensor in sent.items():
            if (tensor.dtype, tuple(tensor.shape)) != expected[name]:
                raise RejectedUpdateError(
                    f"its {name} have the type {tensor.dtype} and the shape {tuple(tensor.shape)}; expected: "
                    f"{expected[name][0]}, {expected[name][1]}"
                )

    def finish(self) -> State:
        """Return the server's state with the new features. Features that are refused replace no previous ones."""
        state, params = self.server_state, self.method.params
        self.rejected = norm_outliers(self.sizes, self.limits.norm_factor)
        if self.local_modules is not None:
            state = replace(state, tensors=self.local_modules.finish().tensors)
            self.rejected = {**self.local_modules.rejected, **self.rejected}
            self.counted_samples = self.local_modules.counted_samples
        parts = dict(state.parts) if params.store == "all" else {}
        earlier = [count for client, count in self.earlier_samples.items() if client not in self.samples]
        known = usual(list(self.samples.values()), earlier)
        most_samples = MOST_SAMPLES * known if known and self.limits.defence == "clip" else math.inf
        for client in [client for client in self.received if client not in self.rejected]:
            received = self._cut(self.received[client], self.samples[client], most_samples)
            kept_bytes = sum(part.num_bytes for name, part in parts.items() if name != part_name(client))
            if kept_bytes + received.num_bytes <= params.store_mb * MEGABYTE:
                parts[part_name(client)] = received
            else:
                size = f"its {received.num_bytes} bytes of features"
                reason = f"{size} would exceed method.store_mb = {params.store_mb:g}"
                self.rejected = {**self.rejected, client: reason}
        return replace(state, parts=parts)

    def _cut(self, received: State, samples: int, most_samples: float) -> State:
        """Return a client's features: of each class no more rows than of so many samples."""
        if samples <= most_samples:
            return received
        labels = received.tensors[LABELS]
        present = torch.bincount(labels.long()).nonzero().flatten()
        most = self.method.most_per_class(int(most_samples), len(present))
        rows = torch.cat([(labels == label).nonzero().flatten()[:most] for label in present])
        return replace(received, tensors={name: tensor[rows] for name, tensor in received.tensors.items()})


def part_name(client: int) -> str:
    """Return the name of the part of the server's state with a client's features."""
    return f"features-{client:06d}"


def features_of(tensors: Tensors) -> Features:
    """Return the features that a client sent."""
    return Features(tensors[FEATURES], tensors[LABELS], tensors.get(SCALES))
