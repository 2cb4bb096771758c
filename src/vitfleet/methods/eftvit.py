"""EFTViT: Wu et al., "Efficient Federated Training of Vision Transformers with Masked Images …", ICCV 2025.

The model is parted: the local module (embedding and the first M layers) belongs to a client, the global module (the
other layers) and the head to the server. A client drops most patches of every image (``train.mask_ratio``), passes
the rest through its local module, the frozen global module and the head, and trains the local module and the head
(Algorithm 1). What it sends is not weights but the patch features its local module made, as many of every class. The
server keeps every client's latest features, trains global module and head on them and sends both back (Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping
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
from vitfleet.message import Message, State, Tensors, to_device
from vitfleet.methods.aggregation import norm_outliers
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientJob,
    ClientUpdate,
    Method,
    MethodContext,
    RejectedUpdateError,
    ServerGenerator,
    check_layers,
    train_metrics,
)
from vitfleet.methods.median_sampling import Plan, draw_plan
from vitfleet.models.anatomy import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.objective import Fit, Objective, Step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
RECORDED_AT_ONCE = 32  # what is recorded is a multiple of this long


class EftVitParams(MethodParams):
    """Masked images on the client, features instead of weights (EFTViT). The mask is ``train.mask_ratio``."""

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


@register_method("eftvit", EftVitParams)
class EftVit(Method[EftVitParams]):
    """Train on some of the patches, send features instead of weights."""

    usual_mask_ratio = 0.75

    @classmethod
    def check_config(cls, params: EftVitParams, config: Config) -> None:
        """Check the local layers M against the number of layers, where the configuration sets it."""
        super().check_config(params, config)
        check_layers("local_layers", params.local_layers, config.model.depth, spare=1)

    has_global_model = False
    figures = ("balanced-labels",)

    def __init__(self, params: EftVitParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if not self.anatomy.is_plain_vit:
            raise ConfigError("method.name", self.name, "needs a plain ViT (vit_*, deit_*), which can be parted")
        if params.local_layers >= self.anatomy.depth:
            raise ConfigError(
                "method.local_layers",
                params.local_layers,
                f"must be between 1 and {self.anatomy.depth - 1}: the global module needs a layer",
            )
        blocks = self.anatomy.blocks
        self.local_module = self.anatomy.union(self.anatomy.embed, *blocks[: params.local_layers])
        self.global_module = self.anatomy.union(*blocks[params.local_layers :], self.anatomy.norm)

    @property
    def trainable(self) -> Selection:
        """A client's local module, and the head."""
        layers = self.anatomy.blocks[: self.params.local_layers]
        local = self.local_module if self.params.train_embedding else self.anatomy.union(*layers)
        return self.anatomy.union(local, self.anatomy.head)

    @property
    def state_on_disk(self) -> bool:
        """Whether the store lies on disk."""
        return self.params.store_on == "disk"

    # The server half

    def base_message(self, initial: Tensors) -> Message:
        """Give every client the same local module to start from."""
        return Message(self.local_module.take(initial))

    def initial_state(self, initial: Tensors) -> State:
        """Start with the initial global module and head, and no features."""
        return State(self.anatomy.union(self.global_module, self.anatomy.head).take(initial))

    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Send the global module and the head."""
        return Message(server.tensors)

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Take each client's features in, in the place of its old ones."""
        return FeatureStore(server, self.params, self.context)

    def server_update(self, server: State, round: int) -> ServerGenerator:
        """Train the global module and the head on everybody's features."""
        parts = [_features(part) for part in server.parts.values()]
        if self.params.store_on == "device":
            parts = [part.to(self.context.device) for part in parts]
        if not parts:
            return server
        objective = Objective(self.anatomy.union(self.global_module, self.anatomy.head), split=self.params.local_layers)
        features = FeatureSet(parts, self.context.device, equal_clients=self.params.balance == "clients")
        fitted = yield Fit(server.tensors, objective, self.params.server_epochs, features=features)
        return replace(server, tensors=fitted.weights)

    # The client half

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train the local module and the head through the frozen global module; send balanced features."""
        epochs = self.context.train.epochs
        received = {
            **(job.base_weights if job.client_state is None else job.client_state.tensors),
            **job.message.tensors,
        }
        rng = Address(self.context.seed, Purpose.RECORD, job.round, job.client).generator()
        plan = draw_plan(job.shard.labels.cpu().numpy(), epochs, self.params.threshold, rng)
        objective = Objective(
            self.trainable, observer=FeatureRecorder(self.params.values), split=self.params.local_layers
        )
        fitted = yield Fit(
            received, objective, epochs, observer_state=empty_record(plan, self.params.values, self.context)
        )
        model = {**received, **fitted.weights}
        up = Message(recorded(plan, fitted.observed) if plan.recorded else {}, train_metrics(fitted))
        return ClientUpdate(up, model, State(self.local_module.take(model)))

    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the client's own local module under the server's global module and head."""
        return {**(base if own is None else own.tensors), **server.tensors}


def empty_record(plan: Plan, values: str, context: MethodContext) -> dict[str, Tensor]:
    """Return room for the features that the plan wants, and at least one row more for what is not.

    Rows and samples are rounded up: shapes stay static, and recur from client to client.
    """
    rows = _evened(plan.recorded + 1)
    room = {"features": torch.zeros(rows, context.tokens, context.width, dtype=DTYPES[values], device=context.device)}
    if values == "int8":
        room["scales"] = torch.ones(rows, context.tokens, device=context.device)
    slots = torch.from_numpy(plan.slots)
    return {**room, "slots": F.pad(slots, (0, _evened(slots.shape[1]) - slots.shape[1])).to(context.device)}


def _evened(count: int) -> int:
    return -(-count // RECORDED_AT_ONCE) * RECORDED_AT_ONCE


@dataclass(frozen=True)
class FeatureRecorder:
    """Keeps the features that the plan wants, as they will travel, on the device."""

    values: str

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Put the step's wanted features into their places."""
        assert step.features is not None
        features = step.features.detach().float()
        # The last row is nobody's; that is where padding goes.
        last = observer_state["features"].shape[0] - 1
        # (A scalar as an index would be read by the host; a row of one is not.)
        planned = observer_state["slots"].index_select(0, step.epoch.reshape(1)).squeeze(0)[step.positions]
        slots = torch.where(step.sample_weight > 0, planned, last)
        if self.values == "int8":
            features, scales = quantize(features)
            observer_state["scales"].index_put_((slots,), scales)
        observer_state["features"].index_put_((slots,), features.to(DTYPES[self.values]))
        return observer_state


def recorded(plan: Plan, observer_state: Tensors) -> dict[str, Tensor]:
    """Return what is sent: every class equally often."""
    order = torch.from_numpy(plan.order).to(observer_state["features"].device)
    tensors = {name: observer_state[name][order] for name in ("features", "scales") if name in observer_state}
    return {**tensors, "labels": torch.from_numpy(plan.labels).to(torch.int16)}


class FeatureStore(Aggregator):
    """The server's store: every client's latest features (section 3.6), or only this round's (section 3.5)."""

    def __init__(self, server: State, params: EftVitParams, context: MethodContext) -> None:
        self.server = server
        self.params = params
        self.context = context
        self.parts: dict[str, State] = dict(server.parts) if params.store == "all" else {}
        self.before = dict(self.parts)
        self.sizes: dict[int, float] = {}

    def add(self, client: int, up: Message) -> None:
        """Put a client's features in the place of its old ones, if they are sound."""
        if not up.tensors:
            return
        self.check(up.tensors)
        device = self.context.device if self.params.store_on == "device" else torch.device("cpu")
        part = State(to_device(up.tensors, device))
        self.parts[_place(client)] = part
        if self.context.aggregate.norm_factor is not None:
            self.sizes[client] = _features(part).rms()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse what would not train, or would ruin what does."""
        features, labels, scales = (tensors.get(name) for name in ("features", "labels", "scales"))
        if features is None or labels is None:
            raise RejectedUpdateError("its message holds no features and labels")
        strange = sorted(set(tensors) - {"features", "labels", *(["scales"] if self.params.values == "int8" else [])})
        if strange:
            raise RejectedUpdateError(f"it sent {strange[0]!r}, which is no part of features")
        if labels.dim() != 1 or labels.dtype != torch.int16:
            raise RejectedUpdateError(f"its labels are {labels.dtype} {tuple(labels.shape)}, not a row of torch.int16")
        wanted = (len(labels), self.context.tokens, self.context.width)
        if tuple(features.shape) != wanted:
            raise RejectedUpdateError(f"its features are of shape {tuple(features.shape)}, not {wanted}")
        if features.dtype != DTYPES[self.params.values]:
            raise RejectedUpdateError(f"its features are {features.dtype}, not {DTYPES[self.params.values]}")
        if self.params.values == "int8" and (scales is None or tuple(scales.shape) != wanted[:2]):
            raise RejectedUpdateError("its features have no scales of their own")
        floating = [one for one in (features, scales) if one is not None and one.is_floating_point()]
        if not all(bool(one.isfinite().all()) for one in floating):
            raise RejectedUpdateError("its features are not finite")
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= self.context.classes):
            raise RejectedUpdateError(f"its labels are not all between 0 and {self.context.classes - 1}")

    def finish(self) -> State:
        """Return the server's state with the new store; who sent outsized features keeps the old ones in it, if any."""
        self.rejected = norm_outliers(self.sizes, self.context.aggregate.norm_factor)
        for place in map(_place, self.rejected):
            if place in self.before:
                self.parts[place] = self.before[place]
            else:
                del self.parts[place]
        return replace(self.server, parts=self.parts)


def _place(client: int) -> str:
    return f"features-{client:06d}"


def _features(part: State) -> Features:
    return Features(part.tensors["features"], part.tensors["labels"], part.tensors.get("scales"))
