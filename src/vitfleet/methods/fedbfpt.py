"""FEDBFPT: Wang et al., "An Efficient Federated Learning Framework for BERT Further Pre-training", IJCAI 2023.

A client's model is shallow: L_k of the server's L layers. One layer trains at a time, from the first on; the
layers before it are the server's own, those after it a random sample of the server's deeper ones, sorted. Only
that layer and the head are trained and sent. Each layer gets half of the rounds that are left; the last one that
fits into the client's model gets the rest. The whole model is what is evaluated.
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
    MethodContext,
    check_layers,
    train_metrics,
)
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.models.anatomy import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.objective import Fit, Objective


def schedule(rounds: int, local_layers: int) -> list[int]:
    """Return the layer that trains in each round."""
    layer, remaining = 0, rounds
    trains = []
    for round in range(rounds):
        if round == rounds - remaining // 2 and layer < local_layers - 1:
            layer += 1
            remaining = rounds - round
        trains.append(layer)
    return trains


class FedBfptParams(MethodParams):
    """Layer after layer, through a shallow local model (FEDBFPT)."""

    local_layers: int = Field(6, ge=2, description="layers of a client's model, 2 … the model's layers")


@register_method("fedbfpt", FedBfptParams)
class FedBfpt(Method[FedBfptParams]):
    """Layer after layer through a shallow local model."""

    client_metrics = (ClientMetric("layer", "layer trained"),)

    @classmethod
    def check_config(cls, params: FedBfptParams, config: Config) -> None:
        """Check the local layers against the number of layers, where the configuration sets it."""
        super().check_config(params, config)
        check_layers("local_layers", params.local_layers, config.model.depth)

    def __init__(self, params: FedBfptParams, context: MethodContext) -> None:
        super().__init__(params, context)
        if params.local_layers > self.anatomy.depth:
            raise ConfigError(
                "method.local_layers",
                params.local_layers,
                f"must be between 2 and {self.anatomy.depth}, the model's layers",
            )
        if not self.anatomy.is_plain_vit:
            raise ConfigError("method.name", self.name, "needs a plain ViT, whose layers can be left out")
        self.schedule = schedule(context.rounds, params.local_layers)

    @property
    def trainable(self) -> Selection:
        """One layer and the head; all layers are of one size."""
        return self._trains(0)

    # The server half

    def base_message(self, initial: Tensors) -> Message:
        """Give every client the initial model: embeddings stay as they are, so do deeper layers until their turn."""
        return Message(initial)

    def initial_state(self, initial: Tensors) -> State:
        """Start from the initial model."""
        return State(initial)

    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Send the layers trained so far, and the head."""
        trained = self.anatomy.blocks[: self.schedule[round - 1] + 1]
        return Message(self.anatomy.union(*trained, self.anatomy.head).take(server.tensors))

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Average the one layer and the head."""
        return WeightedMean(server, self.context.aggregate)

    # The client half

    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Train one layer of a shallow model, and the head."""
        layer = self.schedule[job.round - 1]
        received = {**job.base_weights, **job.message.tensors}
        shallow = self.shallow(received, self.route(layer, job.round, job.client))
        objective = Objective(self._trains(layer), depth=self.params.local_layers)
        fitted = yield Fit(shallow, objective, self.context.train.epochs)
        return ClientUpdate(
            Message(fitted.weights, {**train_metrics(fitted), "layer": layer}), {**received, **fitted.weights}
        )

    def route(self, layer: int, round: int, client: int) -> tuple[int, ...]:
        """Return the server's layers that a client's model is made of."""
        rng = Address(self.context.seed, Purpose.LAYERS, round, client).generator()
        free = self.params.local_layers - layer - 1
        deeper: list[int] = rng.integers(layer + 1, self.anatomy.depth, size=free).tolist() if free else []
        return (*range(layer + 1), *sorted(deeper))

    def shallow(self, weights: Tensors, route: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the weights of a client's model: those of the server's with the layers of the route as its own."""
        blocks = self.anatomy.blocks
        local = {name: weights[name] for name in self.anatomy.non_blocks}
        for place, layer in enumerate(route):
            local |= {name: weights[origin] for name, origin in zip(blocks[place], blocks[layer], strict=True)}
        return local

    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the server's whole model."""
        return server.tensors

    def _trains(self, layer: int) -> Selection:
        return self.anatomy.union(self.anatomy.blocks[layer], self.anatomy.head)
