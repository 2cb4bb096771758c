"""TransFL: Kim, Kim and Park, "Selective Transformer Layer Sharing for Efficient Federated Learning".

Every client trains its own copy of the whole model. During training it measures the mean absolute gradient G_ℓ of each
transformer layer ℓ (equation 1). It sends only the k layers with the largest G_ℓ, and all weights outside the layers.
The server averages each layer over the clients that sent it. Clients receive only what has changed since their last
round. A layer that no client sent differs from client to client.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitfleet.config.base import AggregationParams, MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientJob,
    ClientUpdate,
    Method,
    RejectedUpdateError,
    train_metrics,
)
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.context import MethodContext
from vitfleet.methods.gradient_magnitude import GradientMagnitude
from vitfleet.methods.param_checks import check_layers
from vitfleet.models.anatomy import Anatomy, Selection
from vitfleet.training.objective import Fit, Objective


class TransFLParams(MethodParams):
    """Clients send only the k layers with the largest gradients (TransFL)."""

    k: int = Field(3, ge=1, description="layers sent, 1 … the model's layers")
    statistic: Literal["mean-abs", "rms"] = Field(
        "mean-abs", description="what ranks a layer: the mean |gradient| (as in the paper), or its root mean square"
    )
    always_send: tuple[Literal["embed", "norm", "head"], ...] = Field(
        ("embed", "norm", "head"), strict=False, description="the parts besides layers that are sent in every round"
    )


@register_method("transfl", TransFLParams)
class TransFL(Method[TransFLParams]):
    """Each client shares the k layers with the largest gradients."""

    figures = ("sent-layers", "head-gradients")
    client_metrics = (
        ClientMetric("layers", "layers sent"),
        ClientMetric("gradients", "mean |gradient| of each layer"),
        ClientMetric("head_gradients", "mean |gradient| of each attention head, layer by layer"),
    )

    @classmethod
    def check_config(cls, params: TransFLParams, config: Config) -> None:
        """Check k against the number of layers, if the configuration sets it."""
        super().check_config(params, config)
        check_layers("k", params.k, config.model.depth)

    def __init__(self, params: TransFLParams, context: MethodContext) -> None:
        super().__init__(params, context)
        check_layers("k", params.k, self.anatomy.depth)
        parts = {"embed": self.anatomy.embed, "norm": self.anatomy.norm, "head": self.anatomy.head}
        self.always_sent = self.anatomy.union(*(parts[part] for part in params.always_send))

    @property
    def trainable(self) -> Selection:
        """The whole model."""
        return self.anatomy.whole

    # Server

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial model; ``updated`` is the last round in which each layer changed."""
        return State(initial_weights, {"updated": [0] * self.anatomy.depth})

    def client_message(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return what has changed since the client's last round; for a new client, the whole model."""
        if last_round is None:
            return Message(server_state.tensors)
        return Message(self._updated_since(server_state, last_round).take(server_state.tensors))

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the mean of each layer over the clients that sent it."""
        return LayerwiseMean(server_state, self.context.aggregation, self.anatomy, round)

    # Client

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train the whole model; send the top-k layers and the weights that are always sent; keep the model."""
        own_weights = {} if job.client_state is None else job.client_state.tensors
        observer = GradientMagnitude(self.anatomy, self.params.statistic)
        result = yield Fit(
            {**own_weights, **job.message.tensors},
            Objective(self.trainable, observer=observer),
            self.context.train.epochs,
            observer_state=observer.initial_state(self.context.device),
        )
        client_state = State(result.weights, {"round": job.round})
        if not result.steps:
            return ClientUpdate(Message(numbers=train_metrics(result)), result.weights, client_state)
        magnitudes = (result.observed["layers"] / result.steps).tolist()
        layers = top_k(magnitudes, self.params.k)
        sent = self.anatomy.union(self.always_sent, *(self.anatomy.blocks[layer] for layer in layers))
        numbers = {**train_metrics(result), "layers": layers, "gradients": magnitudes}
        if self.anatomy.attention:
            numbers["head_gradients"] = (result.observed["heads"] / result.steps).flatten().tolist()
        return ClientUpdate(Message(sent.take(result.weights), numbers), result.weights, client_state)

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the client's own layers, overridden by what has changed since its last round."""
        if client_state is None:
            return server_state.tensors
        last_round = client_state.numbers["round"]
        assert isinstance(last_round, int)
        changed = self._updated_since(server_state, last_round).take(server_state.tensors)
        return {**client_state.tensors, **changed}

    def _updated_since(self, server_state: State, last_round: int) -> Selection:
        """Return the layers that changed in a round or later, and the weights that are always sent."""
        updated = server_state.numbers["updated"]
        assert isinstance(updated, list)
        changed = [block for block, round in zip(self.anatomy.blocks, updated, strict=True) if round >= last_round]
        return self.anatomy.union(self.always_sent, *changed)


def top_k(magnitudes: list[float], k: int) -> list[int]:
    """Return the k layers with the largest magnitudes, in the model's order; of equal ones, the earlier."""
    ranked = sorted(range(len(magnitudes)), key=lambda layer: -magnitudes[layer])
    return sorted(ranked[:k])


class LayerwiseMean(WeightedMean):
    """The weighted mean of each layer. The new state records which layers changed."""

    def __init__(self, server_state: State, config: AggregationParams, anatomy: Anatomy, round: int) -> None:
        super().__init__(server_state, config)
        self.anatomy = anatomy
        self.round = round

    def add(self, client: int, message: Message) -> None:
        """Add one client's layers. The reported numbers are checked, because they are written to the records."""
        depth = self.anatomy.depth
        heads = self.anatomy.attention[0].heads if self.anatomy.attention else 0
        for name, length in (("gradients", depth), ("head_gradients", depth * heads)):
            values = message.numbers.get(name)
            if values is not None and not (isinstance(values, list) and len(values) == length):
                raise RejectedUpdateError(f"its number {name!r} is not a list of {length} values")
        layers = message.numbers.get("layers", [])
        if not isinstance(layers, list) or any(layer not in range(depth) for layer in layers):
            raise RejectedUpdateError(f"its layers {layers} are not all between 0 and {depth - 1}")
        super().add(client, message)

    def finish(self) -> State:
        """Return the server's state with the means; ``updated`` is this round for the layers that changed."""
        weights = super().finish().tensors
        previous = self.server_state.numbers["updated"]
        assert isinstance(previous, list)
        updated = [
            self.round if any(name in self.updated_names for name in block) else int(last)
            for block, last in zip(self.anatomy.blocks, previous, strict=True)
        ]
        return State(weights, {"updated": updated})
