"""TransFL: Kim, Kim and Park, "Selective Transformer Layer Sharing for Efficient Federated Learning".

Every client trains its own copy of the whole model. While it trains it measures each transformer layer's mean
absolute gradient (equation 1); afterwards it sends only the k layers where that is largest, and everything that
is not a layer. The server averages each layer over the clients that sent it. Only what was updated goes back;
a layer that nobody sent stays each client's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import AggregationParams, MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientJob,
    ClientUpdate,
    Method,
    MethodContext,
    RejectedUpdateError,
    check_layers,
    train_metrics,
)
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.models.anatomy import Anatomy, Selection
from vitfleet.training.objective import Fit, Objective, Step


class TransFLParams(MethodParams):
    """Clients send only the k layers with the largest gradients (TransFL)."""

    k: int = Field(3, ge=1, description="layers sent, 1 … the model's layers")
    statistic: Literal["mean-abs", "rms"] = Field(
        "mean-abs", description="what ranks a layer: the mean |gradient| (the paper's), or its root mean square"
    )
    always: tuple[Literal["embed", "norm", "head"], ...] = Field(
        ("embed", "norm", "head"), strict=False, description="the parts besides layers that travel every round"
    )


@register_method("transfl", TransFLParams)
class TransFL(Method[TransFLParams]):
    """Share the layers that learn most."""

    client_metrics = (
        ClientMetric("layers", "layers sent"),
        ClientMetric("gradients", "mean |gradient| of each layer"),
        ClientMetric("head_gradients", "mean |gradient| of each attention head, layer by layer"),
    )
    figures = ("sent-layers", "head-gradients")

    @classmethod
    def check_config(cls, params: TransFLParams, config: Config) -> None:
        """Check k against the number of layers, where the configuration sets it."""
        super().check_config(params, config)
        check_layers("k", params.k, config.model.depth)

    def __init__(self, params: TransFLParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if params.k > self.anatomy.depth:
            raise ConfigError("method.k", params.k, f"must be between 1 and {self.anatomy.depth}, the model's layers")
        parts = {"embed": self.anatomy.embed, "norm": self.anatomy.norm, "head": self.anatomy.head}
        self.always = self.anatomy.union(*(parts[part] for part in params.always))

    @property
    def trainable(self) -> Selection:
        """The whole model."""
        return self.anatomy.whole

    # The server half

    def initial_state(self, initial: Tensors) -> State:
        """Start from the initial model; ``updated`` holds the last round in which each layer was."""
        return State(initial, {"updated": [0] * self.anatomy.depth})

    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Send a newcomer the whole model, anybody else what was updated since they took part."""
        if last_round is None:
            return Message(server.tensors)
        return Message(self._updated(server, last_round).take(server.tensors))

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Average each layer over those who sent it."""
        return LayerMean(server, self.context.aggregate, self.anatomy, round)

    # The client half

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train the whole model, send the top-k layers and what always travels, keep the model."""
        own = {} if job.client_state is None else job.client_state.tensors
        observer = GradientMagnitude(self.anatomy, self.params.statistic)
        objective = Objective(self.trainable, observer=observer)
        observer_state = observer.start(self.context.device)
        fitted = yield Fit(
            {**own, **job.message.tensors}, objective, self.context.train.epochs, observer_state=observer_state
        )
        kept = State(fitted.weights, {"round": job.round})
        if not fitted.steps:
            return ClientUpdate(Message(numbers=train_metrics(fitted)), fitted.weights, kept)
        magnitudes = (fitted.observed["layers"] / fitted.steps).tolist()
        layers = top(magnitudes, self.params.k)
        sends = self.anatomy.union(self.always, *(self.anatomy.blocks[layer] for layer in layers))
        numbers = {**train_metrics(fitted), "layers": layers, "gradients": magnitudes}
        if self.anatomy.attention:
            numbers["head_gradients"] = (fitted.observed["heads"] / fitted.steps).flatten().tolist()
        return ClientUpdate(Message(sends.take(fitted.weights), numbers), fitted.weights, kept)

    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the client's own layers under what was updated since it took part."""
        if own is None:
            return server.tensors
        last_round = own.numbers["round"]
        assert isinstance(last_round, int)
        return {**own.tensors, **self._updated(server, last_round).take(server.tensors)}

    def _updated(self, server: State, last_round: int) -> Selection:
        updated = server.numbers["updated"]
        assert isinstance(updated, list)
        fresh = [block for block, round in zip(self.anatomy.blocks, updated, strict=True) if round >= last_round]
        return self.anatomy.union(self.always, *fresh)


def top(magnitudes: list[float], k: int) -> list[int]:
    """Return the k layers of largest magnitude, in the model's order; of equals, the earlier."""
    ranked = sorted(range(len(magnitudes)), key=lambda layer: -magnitudes[layer])
    return sorted(ranked[:k])


class LayerMean(WeightedMean):
    """The weighted mean, noting which layers it moved."""

    def __init__(self, server: State, config: AggregationParams, anatomy: Anatomy, round: int) -> None:
        super().__init__(server, config)
        self.anatomy = anatomy
        self.round = round

    def add(self, client: int, up: Message) -> None:
        """Fold in one client's layers; what it says of them goes into the records and must be of the model's form."""
        depth = self.anatomy.depth
        heads = self.anatomy.attention[0].heads if self.anatomy.attention else 0
        for name, length in (("gradients", depth), ("head_gradients", depth * heads)):
            told = up.numbers.get(name)
            if told is not None and not (isinstance(told, list) and len(told) == length):
                raise RejectedUpdateError(f"what it sent as {name!r} is not {length} numbers")
        layers = up.numbers.get("layers", [])
        if not isinstance(layers, list) or any(layer not in range(depth) for layer in layers):
            raise RejectedUpdateError(f"it says it sent the layers {layers}, of {depth}")
        super().add(client, up)

    def finish(self) -> State:
        """Return the server's state with the means in it and the moved layers marked."""
        means = super().finish().tensors
        before = self.server.numbers["updated"]
        assert isinstance(before, list)
        updated = [
            self.round if any(name in self.moved for name in block) else int(last)
            for block, last in zip(self.anatomy.blocks, before, strict=True)
        ]
        return State(means, {"updated": updated})


@dataclass(frozen=True)
class GradientMagnitude:
    """Equation 1, summed over the steps on the device: G of every layer, and of every head for the paper's figure 2.

    A head's share of a layer is its rows of the query-key-value weights and its columns of the output projection.
    """

    anatomy: Anatomy
    statistic: str

    def start(self, device: torch.device) -> Tensors:
        """Return zeros."""
        observer_state = {"layers": torch.zeros(self.anatomy.depth, device=device)}
        if self.anatomy.attention:
            heads = self.anatomy.attention[0].heads
            observer_state["heads"] = torch.zeros(self.anatomy.depth, heads, device=device)
        return observer_state

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Add one step's magnitudes."""
        seen = {
            "layers": observer_state["layers"] + torch.stack([self._layer(gradients, block) for block in self._blocks])
        }
        if self.anatomy.attention:
            seen["heads"] = observer_state["heads"] + torch.stack(
                [
                    head_magnitudes(gradients[one.qkv], gradients[one.projection], one.heads)
                    for one in self.anatomy.attention
                ]
            )
        return seen

    @property
    def _blocks(self) -> list[Selection]:
        return [self.anatomy.trainable(block) for block in self.anatomy.blocks]

    def _layer(self, gradients: Tensors, block: Selection) -> Tensor:
        parts = [gradients[name] for name in block]
        count = self.anatomy.count_parameters(block)
        if self.statistic == "rms":
            return (torch.stack([torch.linalg.vector_norm(part, 2) for part in parts]).square().sum() / count).sqrt()
        return torch.stack([torch.linalg.vector_norm(part, 1) for part in parts]).sum() / count


def head_magnitudes(qkv: Tensor, projection: Tensor, heads: int) -> Tensor:
    """Return the mean absolute gradient of each head."""
    width = projection.shape[1]
    rows = qkv.abs().view(3, heads, -1, qkv.shape[1]).sum(dim=(0, 2, 3))
    columns = projection.abs().view(projection.shape[0], heads, -1).sum(dim=(0, 2))
    return (rows + columns) / ((3 * qkv.shape[1] + projection.shape[0]) * width // heads)
