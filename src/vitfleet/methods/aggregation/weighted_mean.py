"""Aggregation of the weights that clients send: streamed means, robust rules, and the rejection of unusable updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.config.registry import AGGREGATIONS
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation.limits import PendingUpdate, RoundMeasure, UpdateLimits
from vitfleet.methods.aggregation.rules import AggregationRule, MeanParams, weighted_mean
from vitfleet.methods.base import Aggregator
from vitfleet.methods.reported import RejectedUpdateError

MEASURED = 8  # updates of a round that are held until they are compared; later ones are compared with these, and summed


def check_weights(received: Tensors, expected: Tensors) -> None:
    """Reject weights that do not fit the model."""
    for name, tensor in received.items():
        if name not in expected:
            raise RejectedUpdateError(f"its weight {name!r} is not part of the model")
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise RejectedUpdateError(
                f"its weight {name!r} is {_dtype_and_shape(tensor)}; expected: {_dtype_and_shape(expected[name])}"
            )


def _dtype_and_shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def update_norm(weights: Tensors, reference: Tensors) -> float:
    """Return the Euclidean norm of the difference between received weights and the server's."""
    squares = (
        (tensor.double() - reference[name].double()).square().sum().item()
        for name, tensor in weights.items()
        if tensor.is_floating_point()
    )
    return math.sqrt(sum(squares))


class WeightedMean(Aggregator):
    """The sample-weighted mean of each tensor over the clients that sent it, or another aggregation rule.

    A tensor that no client sent keeps its value. The mean is a running sum per tensor, in float64: the mean of equal
    weights is exactly these weights, whatever their number. Updates count as the measure of the round allows
    (:class:`RoundMeasure`), which the first of them give; other rules need all updates at once. The table
    ``[aggregate]`` has the rule and the limits on updates.
    """

    def __init__(self, server_state: State, config: AggregationParams | None = None) -> None:
        self.server_state = server_state
        self.config = config or MeanParams()
        self.rule: AggregationRule = AGGREGATIONS.entry_of(self.config).target
        self.is_streaming = self.rule is weighted_mean  # then running sums suffice
        self.updated_names: set[str] = set()  # after `finish`: the tensors that at least one client sent
        self.sums: dict[str, Tensor] = {}
        self.sample_counts: dict[str, float] = {}
        self.pending: dict[int, PendingUpdate] = {}
        self.measure: RoundMeasure | None = None  # once there are enough updates
        self.limits = UpdateLimits(server_state.tensors, self.config)
        self.sizes = self.limits.rms
        self.rejected = {}
        self.counted = {}

    def add(self, client: int, message: Message) -> None:
        """Add one client's weights; an update of a client without samples is ignored."""
        samples = message.numbers.get("samples")
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise RejectedUpdateError(f"its number of samples is {samples}")
        if not samples:
            return
        check_weights(message.tensors, self.server_state.tensors)
        changes = self.limits.check(client, message.tensors, self.earlier_sizes)
        update = PendingUpdate(samples, message.tensors, changes, self.limits.rms[client])
        if self.measure is not None:
            if (reason := self.measure.outlier(update.rms, self.config)) is not None:
                raise RejectedUpdateError(reason)
            self._accumulate(*self._bounded(client, update))
            return
        self.pending[client] = update
        if self.is_streaming and len(self.pending) == MEASURED:
            self._take_measure()

    def _take_measure(self) -> None:
        """Compare the updates so far with each other: those that are used leave ``pending`` for the sums."""
        self.measure = RoundMeasure.of(self.pending.values(), self.earlier_sizes, self.earlier_samples.values())
        for client, update in list(self.pending.items()):
            if (reason := self.measure.outlier(update.rms, self.config)) is not None:
                self.rejected = {**self.rejected, client: reason}
                del self.pending[client]
            elif self.is_streaming:
                self._accumulate(*self._bounded(client, update))
                del self.pending[client]

    def _bounded(self, client: int, update: PendingUpdate) -> tuple[int, Tensors]:
        """Return with how many samples an update counts, and its weights as they count."""
        assert self.measure is not None
        samples = self.measure.counted_samples(update.samples, self.earlier_samples.get(client), self.config)
        if samples < update.samples and not self.config.equal_weights:
            self.counted = {**self.counted, client: samples}
        return samples, self.measure.clipped(update, self.server_state.tensors, self.config)

    def _accumulate(self, samples: int, weights: Tensors) -> None:
        for name, tensor in weights.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
            self.sample_counts[name] = self.sample_counts.get(name, 0) + samples
        if weights:
            torch._foreach_add_([self.sums[name] for name in weights], list(weights.values()), alpha=samples)

    def finish(self) -> State:
        """Return the server's state with the aggregated weights."""
        if self.measure is None:
            self._take_measure()
        used = {client: self._bounded(client, update) for client, update in self.pending.items()}
        least = self.config.least_replies
        if used and len(used) < least:
            reason = f"set aside: aggregate.rule = {self.config.rule} needs {least} replies; {len(used)} are usable"
            self.rejected = {**self.rejected, **dict.fromkeys(used, reason)}
            used = {}
        senders = Counter(name for _, weights in used.values() for name in weights)
        names = [*self.sums, *(name for name, count in senders.items() if count >= least)]
        self.updated_names = set(names)
        previous = self.server_state.tensors
        # One tensor after the other: a whole model in float64, besides the sums, would double the memory.
        aggregated = {name: self._aggregate(name, used.values()).to(previous[name].dtype) for name in names}
        return State({**previous, **aggregated}, self.server_state.numbers)

    def _aggregate(self, name: str, used: Collection[tuple[int, Tensors]]) -> Tensor:
        """Return one aggregated tensor in float64. Its running sum is freed."""
        if self.is_streaming:
            return self.sums.pop(name).div_(self.sample_counts[name])
        values = torch.stack([weights[name] for _, weights in used if name in weights]).double()
        samples = [samples for samples, weights in used if name in weights]
        return self.rule(self.config, values, torch.tensor(samples, dtype=torch.float64, device=values.device))
