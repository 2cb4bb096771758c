"""TransFL: Kim, Kim and Park, "Selective Transformer Layer Sharing for Efficient Federated Learning".

Every client trains its own copy of the whole model. During training it measures the mean absolute gradient G_ℓ of each
transformer layer ℓ (equation 1). It sends only the k layers with the largest G_ℓ, and all weights outside the layers.
The server averages each layer over the clients that sent it. Clients receive only what has changed since their last
round. A layer that no client sent differs from client to client.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.averaging.layer_sharing import (
    LAYER_FIGURES,
    LAYER_METRICS,
    LayerSharing,
    LayerwiseMean,
    MeasuredStep,
)
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    train_metrics,
)
from vitfleet.methods.params import check_layers
from vitfleet.training.local_training import LocalTraining


class TransFLParams(MethodParams):
    """Clients send only the k layers with the largest gradients (TransFL)."""

    k: int = Field(3, ge=1, description="layers sent, 1 … the model's layers")
    always_send: tuple[Literal["embed", "norm", "head"], ...] = Field(
        ("embed", "norm", "head"), strict=False, description="the parts besides layers that are sent in every round"
    )


@register_method("transfl", TransFLParams, title="TransFL")
class TransFL(Method[TransFLParams]):
    """Each client shares the k layers with the largest gradients."""

    figures = LAYER_FIGURES
    client_metrics = LAYER_METRICS

    @classmethod
    def check_config(cls, params: TransFLParams, config: Config) -> None:
        """Check k against the number of layers, if the configuration sets it."""
        super().check_config(params, config)
        check_layers("k", params.k, config.model.depth)

    @classmethod
    def takes_head(cls, params: TransFLParams) -> bool:
        """Return whether every client receives the server's head in every round."""
        return "head" in params.always_send

    def __init__(self, params: TransFLParams, context: MethodContext) -> None:
        super().__init__(params, context)
        check_layers("k", params.k, self.parts.depth)
        parts = {"embed": self.parts.embed, "norm": self.parts.norm, "head": self.parts.head}
        always_sent = self.parts.union(*(parts[part] for part in params.always_send))
        self.sharing = LayerSharing(self.parts, params.k, always_sent)

    # Server

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial model; ``updated`` is the last round in which each layer changed."""
        return State(initial_weights, self.sharing.initial_numbers())

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return what has changed since the client's last round; for a new client, the whole model."""
        return self.sharing.message_to_client(server_state, last_round)

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the mean of each layer over the clients that sent it."""
        return LayerwiseMean(server_state, self.context.aggregation, self.parts, round)

    def check_update(self, expected: Message, update: Message) -> None:
        """Reject an update that is not the layers that it names."""
        self.sharing.check_update(update)

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the whole model; send the top-k layers and the weights that are always sent; keep the model."""
        own_weights = {} if job.client_state is None else job.client_state.tensors
        magnitude = self.sharing.magnitude
        result = yield LocalTraining(
            {**own_weights, **job.message.tensors},
            self.trainable,
            self.context.train.epochs,
            MeasuredStep(magnitude),
            kept=magnitude.zeros(self.context.device),
        )
        client_state = State(result.weights, {"round": job.round})
        if not result.steps:
            return ClientUpdate(Message(numbers=train_metrics(result)), result.weights, client_state)
        sent, numbers = self.sharing.select(result)
        message = Message(sent.take(result.weights), {**train_metrics(result), **numbers})
        return ClientUpdate(message, result.weights, client_state)

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the client's own layers, overridden by what has changed since its last round."""
        if client_state is None:
            return server_state.tensors
        last_round = client_state.numbers["round"]
        assert isinstance(last_round, int)
        changed = self.sharing.updated_since(server_state, last_round).take(server_state.tensors)
        return {**client_state.tensors, **changed}
