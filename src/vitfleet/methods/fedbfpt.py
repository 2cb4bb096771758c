"""FEDBFPT: Wang et al., "An Efficient Federated Learning Framework for BERT Further Pre-training", IJCAI 2023.

A client's model is shallow: L_k of the server's L layers. One layer l is trained at a time, from the first layer on.
The client's layers up to l are the server's. Its layers after l are a sorted random sample, with replacement, of the
server's layers after l. Only layer l and the head are trained and sent. Each layer is trained for half of the remaining
rounds, the last layer of the client's model for all of them. The whole model of L layers is evaluated.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
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
    train_metrics,
)
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.context import MethodContext
from vitfleet.methods.param_checks import check_layers
from vitfleet.models.anatomy import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.objective import Fit, Objective

MIN_LOCAL_LAYERS = 2


class FedBfptParams(MethodParams):
    """Layer after layer, through a shallow local model (FEDBFPT)."""

    local_layers: int = Field(
        6, ge=MIN_LOCAL_LAYERS, description="layers L_k of a client's model, 2 … the model's layers"
    )


def layer_schedule(rounds: int, local_layers: int) -> list[int]:
    """Return the layer that is trained in each round."""
    layer, remaining = 0, rounds
    schedule = []
    for round in range(rounds):
        if round == rounds - remaining // 2 and layer < local_layers - 1:
            layer += 1
            remaining = rounds - round
        schedule.append(layer)
    return schedule


@register_method("fedbfpt", FedBfptParams)
class FedBfpt(Method[FedBfptParams]):
    """Trains layer after layer through a shallow local model."""

    client_metrics = (ClientMetric("layer", "layer trained"),)

    @classmethod
    def check_config(cls, params: FedBfptParams, config: Config) -> None:
        """Check L_k against the number of layers, if the configuration sets it."""
        super().check_config(params, config)
        check_layers("local_layers", params.local_layers, config.model.depth, MIN_LOCAL_LAYERS)

    def __init__(self, params: FedBfptParams, context: MethodContext) -> None:
        super().__init__(params, context)
        check_layers("local_layers", params.local_layers, self.anatomy.depth, MIN_LOCAL_LAYERS)
        if not self.anatomy.is_plain_vit:
            raise ConfigError("method.name", self.name, "needs a plain ViT, whose layers can be skipped")
        self.schedule = layer_schedule(context.rounds, params.local_layers)

    @property
    def trainable(self) -> Selection:
        """One layer and the head. All layers have the same size."""
        return self._layer_and_head(0)

    # Server

    def base_message(self, initial_weights: Tensors) -> Message:
        """Return the initial model: the embedding never changes, a layer not before it is trained."""
        return Message(initial_weights)

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial model."""
        return State(initial_weights)

    def client_message(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the layers trained so far and the head."""
        trained_blocks = self.anatomy.blocks[: self.schedule[round - 1] + 1]
        return Message(self.anatomy.union(*trained_blocks, self.anatomy.head).take(server_state.tensors))

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the sample-weighted mean of the trained layer and the head."""
        return WeightedMean(server_state, self.context.aggregation)

    # Client

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train one layer of a shallow model, and the head."""
        layer = self.schedule[job.round - 1]
        received = {**job.base_weights, **job.message.tensors}
        shallow = self.shallow_weights(received, self.sample_layers(layer, job.round, job.client))
        objective = Objective(self._layer_and_head(layer), depth=self.params.local_layers)
        result = yield Fit(shallow, objective, self.context.train.epochs)
        message = Message(result.weights, {**train_metrics(result), "layer": layer})
        return ClientUpdate(message, {**received, **result.weights})

    def sample_layers(self, layer: int, round: int, client: int) -> tuple[int, ...]:
        """Return the server's layers that form a client's model while ``layer`` is trained."""
        rng = Address(self.context.seed, Purpose.LAYERS, round, client).generator()
        count = self.params.local_layers - layer - 1
        deeper: list[int] = rng.integers(layer + 1, self.anatomy.depth, size=count).tolist() if count else []
        return (*range(layer + 1), *sorted(deeper))

    def shallow_weights(self, weights: Tensors, layers: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the weights of a client's model, made of these layers of the server's model."""
        blocks = self.anatomy.blocks
        shallow = {name: weights[name] for name in self.anatomy.non_blocks}
        for local_layer, server_layer in enumerate(layers):
            names = zip(blocks[local_layer], blocks[server_layer], strict=True)
            shallow |= {local_name: weights[server_name] for local_name, server_name in names}
        return shallow

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the server's whole model."""
        return server_state.tensors

    def _layer_and_head(self, layer: int) -> Selection:
        return self.anatomy.union(self.anatomy.blocks[layer], self.anatomy.head)
