"""Sharing of some layers: a client sends those with the largest gradients, and receives what has changed (TransFL).

During training a client measures the mean absolute gradient G_ℓ of each transformer layer ℓ. It sends the k layers with
the largest G_ℓ, and some weights outside the layers always. The server averages each layer over the clients that sent
it. A client receives only the layers that have changed since its last round; its other layers stay as it trained them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.reported import ClientMetric, RejectedUpdateError, check_complete
from vitfleet.models.parts import AttentionProjections, ModelParts, Selection
from vitfleet.training.local_training import LocalResult
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView

LAYER_FIGURES = ("sent-layers", "head-gradients")
LAYER_METRICS = (
    ClientMetric("layers", "layers sent", form="counts"),
    ClientMetric("gradients", "mean |gradient| of each layer", form="numbers", least=0),
    ClientMetric("head_gradients", "mean |gradient| of each attention head, layer by layer", form="numbers", least=0),
)


@dataclass(frozen=True)
class GradientMagnitude:
    """G_ℓ (equation 1) of every layer, and of every attention head (figure 2), in a step.

    The weights of a head are its rows of the query-key-value projection and its columns of the output projection.
    """

    blocks: tuple[Selection, ...]  # the weights of each layer
    sizes: tuple[int, ...]  # how many numbers they are
    attention: tuple[AttentionProjections, ...]  # of each layer; empty for models with other attention modules

    @classmethod
    def of_model(cls, parts: ModelParts) -> GradientMagnitude:
        """Return what is measured of a model."""
        blocks = tuple(parts.trainable(block) for block in parts.blocks)
        return cls(blocks, tuple(parts.count_parameters(block) for block in blocks), parts.attention)

    def zeros(self, device: torch.device) -> Tensors:
        """Return the sums before the first step: ``layers``, and ``heads`` ``[layers, heads]`` with plain attention."""
        sums = {"layers": torch.zeros(len(self.blocks), device=device)}
        if self.attention:
            sums["heads"] = torch.zeros(len(self.blocks), self.attention[0].heads, device=device)
        return sums

    def __call__(self, gradients: Tensors) -> Tensors:
        """Return the magnitudes of one step."""
        norms = [
            torch.stack([torch.linalg.vector_norm(gradients[name], 1) for name in block]).sum() for block in self.blocks
        ]
        layers = torch.stack([norm / size for norm, size in zip(norms, self.sizes, strict=True)])
        if not self.attention:
            return {"layers": layers}
        heads = [
            head_magnitudes(gradients[part.qkv], gradients[part.projection], part.heads) for part in self.attention
        ]
        return {"layers": layers, "heads": torch.stack(heads)}


def head_magnitudes(qkv: Tensor, projection: Tensor, heads: int) -> Tensor:
    """Return the mean absolute gradient of each attention head, ``[heads]``, from those of the two projections."""
    width = projection.shape[1]
    rows = qkv.abs().view(3, heads, -1, qkv.shape[1]).sum(dim=(0, 2, 3))
    columns = projection.abs().view(projection.shape[0], heads, -1).sum(dim=(0, 2))
    return (rows + columns) / ((3 * qkv.shape[1] + projection.shape[0]) * width // heads)


@dataclass(frozen=True)
class MeasuredStep:
    """Follows the gradient of the mean cross-entropy, and adds up its magnitude in every layer."""

    magnitude: GradientMagnitude

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        gradients = view.grad(cross_entropy, batch)
        view.count(view.map(self.magnitude, gradients))
        return gradients


@dataclass(frozen=True)
class LayerSharing:
    """Which weights are sent: the k layers with the largest gradients, and always some others."""

    parts: ModelParts
    k: int  # how many layers a client sends
    always_sent: Selection  # weights outside the layers that are sent in every round, in both directions

    @property
    def magnitude(self) -> GradientMagnitude:
        """What steps measure of their gradients, and add to what they keep."""
        return GradientMagnitude.of_model(self.parts)

    # Server

    def initial_numbers(self) -> Numbers:
        """Return what the server's state records besides weights: the last round in which each layer changed."""
        return {"updated": [0] * self.parts.depth}

    def message_to_client(self, server_state: State, last_round: int | None) -> Message:
        """Return what has changed since the client's last round; for a new client, all of the server's weights."""
        if last_round is None:
            return Message(server_state.tensors)
        return Message(self.updated_since(server_state, last_round).take(server_state.tensors))

    def updated_since(self, server_state: State, last_round: int) -> Selection:
        """Return the layers that changed in a round or later, and the weights that are always sent."""
        updated = server_state.numbers["updated"]
        assert isinstance(updated, list)
        changed = [block for block, round in zip(self.parts.blocks, updated, strict=True) if round >= last_round]
        return self.parts.union(self.always_sent, *changed)

    def check_update(self, update: Message) -> None:
        """Reject an update that is not the k layers that it names, and the weights that are always sent."""
        depth = self.parts.depth
        heads = self.parts.attention[0].heads if self.parts.attention else 0
        for name, length in (("gradients", depth), ("head_gradients", depth * heads)):
            values = update.numbers.get(name)
            if values is not None and not (isinstance(values, list) and len(values) == length):
                raise RejectedUpdateError(f"its number {name!r} is not a list of {length} values")
        for name, needed in (("gradients", "layers"), ("head_gradients", "gradients")):
            if name in update.numbers and needed not in update.numbers:
                raise RejectedUpdateError(f"it reports {name!r} without {needed!r}")
        layers = update.numbers.get("layers", [])
        if not update.tensors and not update.numbers["samples"] and not layers:
            return
        named = [layer for layer in range(depth) if isinstance(layers, list) and layer in layers]
        if layers != named or len(named) != self.k:
            raise RejectedUpdateError(f"its layers are not {self.k} rising numbers between 0 and {depth - 1}")
        sent = self.parts.union(self.always_sent, *(self.parts.blocks[layer] for layer in named))
        check_complete(update.tensors, sent)

    # Client

    def select(self, result: LocalResult) -> tuple[Selection, Numbers]:
        """Return the weights that a client sends after a training of at least one step, and the numbers to report."""
        magnitudes = (result.kept["layers"] / result.steps).tolist()
        layers = top_k(magnitudes, self.k)
        sent = self.parts.union(self.always_sent, *(self.parts.blocks[layer] for layer in layers))
        numbers: Numbers = {"layers": layers, "gradients": magnitudes}
        if not self.parts.attention:
            return sent, numbers
        return sent, {**numbers, "head_gradients": (result.kept["heads"] / result.steps).flatten().tolist()}


def top_k(magnitudes: list[float], k: int) -> list[int]:
    """Return the k layers with the largest magnitudes, in the model's order; of equal ones, the earlier."""
    ranked = sorted(range(len(magnitudes)), key=lambda layer: -magnitudes[layer])
    return sorted(ranked[:k])


class LayerwiseMean(WeightedMean):
    """The weighted mean of each layer. The new state records which layers changed."""

    def __init__(self, server_state: State, config: AggregationParams, parts: ModelParts, round: int) -> None:
        super().__init__(server_state, config)
        self.parts = parts
        self.round = round

    def finish(self) -> State:
        """Return the server's state with the means; ``updated`` is this round for the layers that changed."""
        weights = super().finish().tensors
        previous = self.server_state.numbers["updated"]
        assert isinstance(previous, list)
        updated = [
            self.round if any(name in self.updated_names for name in block) else int(last)
            for block, last in zip(self.parts.blocks, previous, strict=True)
        ]
        return State(weights, {"updated": updated})
