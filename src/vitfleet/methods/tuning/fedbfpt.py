"""FEDBFPT: Wang et al., "An Efficient Federated Learning Framework for BERT Further Pre-training", IJCAI 2023.

A client's model is shallow: L_k of the server's L layers. One layer l is trained at a time, from the first layer on.
The client's layers up to l are the server's. Its layers after l are a sorted random sample, with replacement, of the
server's layers after l. Only layer l and the head are trained and sent. Each layer is trained for half of the remaining
rounds, the last layer of the client's model for all of them. The whole model of L layers is evaluated.

Three keys are not in the paper. They are ours, for a classifier with a new head on a pretrained ViT, where the paper's
clients go on with BERT's own pretraining task and head. Each is off by default.

- ``head_rounds``: in the first rounds only the head is trained and sent, through all L layers. The schedule of the
  layers covers the remaining rounds.
- ``keep_last``: the last layers of the server's model end every client's model, so that the head sees their outputs.
  The sampled layers lie between the trained layer and these, and these are never trained.
- ``center_features``: where layers are left out, the features that enter the head are mostly one vector that all images
  share. A client measures the mean of its images' features in its shallow model, by one more pass before training, and
  subtracts it: it changes the bias of the final norm, so the model's function remains a ViT. In one more pass after
  training it measures the mean in the whole model, and sends that model's bias; the average of the biases centres the
  server's model. The mean of a client with few classes is also a mean of its classes, and subtracting it removes what
  tells them from others: it is meant for clients that have most of the classes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
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
    Work,
    train_metrics,
)
from vitfleet.methods.params import check_layers
from vitfleet.methods.reported import ClientMetric, RejectedUpdateError
from vitfleet.models.parts import Selection
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

MIN_LOCAL_LAYERS = 2


class FedBfptParams(MethodParams):
    """Layer after layer, through a shallow local model (FEDBFPT)."""

    local_layers: int = Field(
        6, ge=MIN_LOCAL_LAYERS, description="layers L_k of a client's model, 2 … the model's layers"
    )
    head_rounds: int = Field(
        0, ge=0, description="first rounds, which train only the head through all layers (not in the paper)"
    )
    keep_last: int = Field(
        0, ge=0, description="last layers of the model that end every client's model (not in the paper)"
    )
    center_features: bool = Field(False, description="subtract the features' mean before the head (not in the paper)")


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


def check_params(params: FedBfptParams, depth: int | None, rounds: int) -> None:
    """Check the parameters against the number of layers, if it is known, and of rounds."""
    check_layers("local_layers", params.local_layers, depth, MIN_LOCAL_LAYERS)
    if params.keep_last >= params.local_layers:
        remedy = f"must be below method.local_layers = {params.local_layers}: at least one other layer is trained"
        raise ConfigError("method.keep_last", params.keep_last, remedy)
    if params.head_rounds >= rounds:
        remedy = f"must be below rounds = {rounds}: the remaining rounds train the layers"
        raise ConfigError("method.head_rounds", params.head_rounds, remedy)


@register_method("fedbfpt", FedBfptParams, title="FEDBFPT")
class FedBfpt(Method[FedBfptParams]):
    """Trains layer after layer through a shallow local model."""

    client_metrics = (ClientMetric("layer", "layer trained", form="count"),)

    @classmethod
    def check_config(cls, params: FedBfptParams, config: Config) -> None:
        """Check the rounds, and the numbers of layers where the configuration sets the model's."""
        super().check_config(params, config)
        check_params(params, config.model.depth, config.rounds)

    @classmethod
    def takes_head(cls, params: FedBfptParams) -> bool:
        """Return true: the server has the head."""
        return True

    @classmethod
    def declared_work(cls, params: FedBfptParams, config: Config) -> Work:
        """Return the work with the epochs that measure the features' mean, before and after the training."""
        work = super().declared_work(params, config)
        return replace(work, epochs=work.epochs + 2 if params.center_features else work.epochs)

    def __init__(self, params: FedBfptParams, context: MethodContext) -> None:
        super().__init__(params, context)
        check_params(params, self.parts.depth, context.rounds)
        if not self.parts.uniform_blocks:
            raise ConfigError(
                "method.name",
                self.name,
                "needs a model whose layers are interchangeable; choose model.name = vit, deit or t2t",
            )
        layers = layer_schedule(context.rounds - params.head_rounds, params.local_layers - params.keep_last)
        # The layer that each round trains; None: only the head.
        self.schedule: list[int | None] = [*[None] * params.head_rounds, *layers]
        # A shift of the features is a shift of the last bias before the head, also where patches are averaged.
        norm_biases = [name for name in self.parts.norm if name in self.parts.biases]
        if params.center_features and not norm_biases:
            raise ConfigError(
                "method.center_features", True, "needs a model whose final norm has a bias; set it to false"
            )
        self.shift_name = norm_biases[-1] if params.center_features else None

    @property
    def trainable(self) -> Selection:
        """One layer and the head. All layers have the same size."""
        return self._layer_and_head(0)

    @property
    def cost_round(self) -> int:
        """The first round that trains a layer, and the head with it."""
        return max(self.params.head_rounds + 1, super().cost_round)

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial model: the embedding never changes, a layer not before it is trained."""
        return Message(initial_weights)

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial model."""
        return State(initial_weights)

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the layers trained so far and the head."""
        layer = self.schedule[round - 1]
        trained_blocks = () if layer is None else self.parts.blocks[: layer + 1]
        return Message(self.parts.union(*trained_blocks, self.parts.head).take(server_state.tensors))

    def check_update(self, expected: Message, update: Message) -> None:
        """Reject an update of another form, or one that names another layer than the round's."""
        super().check_update(expected, update)
        named, layer = update.numbers.get("layer"), expected.numbers.get("layer")
        if named is not None and named != layer:
            raise RejectedUpdateError(f"its number 'layer' is {named}; expected: {layer}")

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the sample-weighted mean of the trained layer and the head."""
        return WeightedMean(server_state, self.context.aggregation)

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train one layer of a shallow model, and the head; in the first ``head_rounds`` rounds the head alone."""
        layer = self.schedule[job.round - 1]
        received = {**job.base_weights, **job.message.tensors}
        if layer is None:
            local, trained, depth = received, self.parts.head, None
        else:
            local = self.shallow_weights(received, self.sample_layers(layer, job.round, job.client))
            trained, depth = self._layer_and_head(layer), self.params.local_layers
        shift = yield from self.center(local, depth)
        result = yield LocalTraining({**local, **shift}, trained, self.context.train.epochs, ShallowStep(depth))
        if layer is not None:
            shift = yield from self.center({**received, **result.weights}, None)
        # In a round of the head alone the shift is already that of the whole model, and the head does not change it.
        sent = {**result.weights, **shift}
        numbers = train_metrics(result) if layer is None else {**train_metrics(result), "layer": layer}
        # A client without images has no weight in the mean: it sends no weights.
        return ClientUpdate(Message(sent if result.samples else {}, numbers), {**received, **sent})

    def center(self, weights: Tensors, depth: int | None) -> Generator[LocalTraining, LocalResult, dict[str, Tensor]]:
        """Return the bias with which the client's features have the mean zero; nothing without ``center_features``.

        ``depth`` is the number of layers of the model that the weights are of; ``None``: all layers.
        """
        if self.shift_name is None:
            return {}
        bias = weights[self.shift_name]
        kept = {
            "feature_sum": torch.zeros(self.context.embed_dim, device=self.context.device),
            "feature_count": torch.zeros((), device=self.context.device),
        }
        result = yield LocalTraining(weights, self.parts.union(), 1, FeatureMeanStep(depth), kept=kept)
        mean = result.kept["feature_sum"] / result.kept["feature_count"].clamp(min=1)
        return {self.shift_name: bias - mean.to(bias)}

    def sample_layers(self, layer: int, round: int, client: int) -> tuple[int, ...]:
        """Return the server's layers that form a client's model while ``layer`` is trained."""
        rng = Address(self.context.seed, Purpose.LAYERS, round, client).generator()
        kept = range(self.parts.depth - self.params.keep_last, self.parts.depth)
        count = self.params.local_layers - layer - 1 - len(kept)
        sampled: list[int] = rng.integers(layer + 1, kept.start, size=count).tolist() if count else []
        return (*range(layer + 1), *sorted(sampled), *kept)

    def shallow_weights(self, weights: Tensors, layers: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the weights of a client's model, made of these layers of the server's model."""
        blocks = self.parts.blocks
        shallow = {name: weights[name] for name in self.parts.non_blocks}
        for local_layer, server_layer in enumerate(layers):
            names = zip(blocks[local_layer], blocks[server_layer], strict=True)
            shallow |= {local_name: weights[server_name] for local_name, server_name in names}
        return shallow

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the server's whole model."""
        return server_state.tensors

    def _layer_and_head(self, layer: int) -> Selection:
        return self.parts.union(self.parts.blocks[layer], self.parts.head)


@dataclass(frozen=True)
class ShallowStep:
    """Follows the gradient of the cross-entropy of a model with so many layers; ``None``: all layers."""

    depth: int | None

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(cross_entropy, batch, depth=self.depth)


@dataclass(frozen=True)
class FeatureMeanStep:
    """Adds up the features that enter the head; it changes no weight."""

    depth: int | None

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Add the features of one batch."""
        (outputs,) = view.forward(batch, depth=self.depth, representation=True)
        view.count(view.map(feature_sum, outputs))
        return {}


def feature_sum(outputs: Outputs) -> Tensors:
    """Return the sum of the features of a batch, and the number of its samples."""
    assert outputs.representation is not None
    present = (outputs.sample_weight > 0).float()
    return {"feature_sum": present @ outputs.representation.float(), "feature_count": present.sum()}
