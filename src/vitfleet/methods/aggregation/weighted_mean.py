"""Aggregation of the weights that clients send: streamed means, robust rules, and the rejection of unusable updates."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.config.registry import AGGREGATIONS
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.aggregation import defence
from vitfleet.methods.aggregation.limits import UpdateLimits
from vitfleet.methods.aggregation.rules import MIN_COMPARED, AggregationRule, MeanParams, weighted_mean
from vitfleet.methods.base import Aggregator
from vitfleet.methods.reported import RejectedUpdateError


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


def norm_outliers(norms: Mapping[int, float], factor: float | None) -> dict[int, str]:
    """Return the clients whose norm is more than ``factor`` times the round's median, with the reason.

    The median of an even number of norms is the lower one of the two: then up to half of the clients cannot raise the
    bound. Fewer than three norms have no outliers.
    """
    if factor is None or len(norms) < MIN_COMPARED:
        return {}
    median = statistics.median_low(norms.values())
    return {
        client: f"its size {norm:.3g} is over aggregate.norm_factor = {factor:g} times the round's median {median:.3g}"
        for client, norm in norms.items()
        if norm > factor * median
    }


class PendingUpdate(NamedTuple):
    """An update that is kept until the end of the round."""

    samples: int
    weights: Tensors
    rms: float  # of the difference to the server's weights: comparable between clients that sent different layers


class WeightedMean(Aggregator):
    """The sample-weighted mean of each tensor over the clients that sent it, or another aggregation rule.

    A tensor that no client sent keeps its value. The mean needs only a running sum per tensor, in float64: the mean of
    equal weights is exactly these weights, whatever their number. Other rules, the defence and the bound on the norm
    relative to the round's median need all updates at once. The table ``[aggregate]`` has the rule, the defence and the
    limits.
    """

    def __init__(self, server_state: State, config: AggregationParams | None = None) -> None:
        self.server_state = server_state
        self.config = config or MeanParams()
        self.rule: AggregationRule = AGGREGATIONS.entry_of(self.config).target
        self.defends = self.config.defence == "clip"
        self.is_streaming = self.rule is weighted_mean and not self.defends  # then running sums suffice
        self.updated_names: set[str] = set()  # after `finish`: the tensors that at least one client sent
        self.sums: dict[str, Tensor] = {}
        self.sample_counts: dict[str, float] = {}
        self.pending: dict[int, PendingUpdate] = {}
        self.limits = UpdateLimits(server_state.tensors, self.config)
        self.sizes = self.limits.rms

    def add(self, client: int, message: Message) -> None:
        """Add one client's weights; an update of a client without samples is ignored."""
        samples = self._checked_samples(message)
        if not samples:
            return
        check_weights(message.tensors, self.server_state.tensors)
        self.limits.check(client, message.tensors, self.earlier_sizes)
        weights, norm = self._clipped(message.tensors)
        if not self.is_streaming or self.config.norm_factor is not None:
            size = sum(tensor.numel() for tensor in weights.values())
            self.pending[client] = PendingUpdate(samples, weights, norm / math.sqrt(max(1, size)))
        else:
            self._accumulate(samples, weights)

    def _checked_samples(self, message: Message) -> int:
        samples, limit = message.numbers.get("samples"), self.config.max_samples
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise RejectedUpdateError(f"its number of samples is {samples}")
        if limit is not None and samples > limit:
            raise RejectedUpdateError(f"its number of samples is {samples}; aggregate.max_samples = {limit}")
        return 1 if samples and self.config.equal_weights else samples

    def _clipped(self, weights: Tensors) -> tuple[Tensors, float]:
        """Return the weights, scaled towards the server's if the update exceeds ``clip_update``, and its norm."""
        config, reference = self.config, self.server_state.tensors
        if config.clip_update is None and config.norm_factor is None:
            return weights, 0.0
        norm = update_norm(weights, reference)
        if config.clip_update is None or norm <= config.clip_update:
            return weights, norm
        share = config.clip_update / norm
        clipped = {
            name: torch.lerp(reference[name], tensor, share) if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }
        return clipped, norm

    def _accumulate(self, samples: int, weights: Tensors) -> None:
        for name, tensor in weights.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
            self.sample_counts[name] = self.sample_counts.get(name, 0) + samples
        if weights:
            torch._foreach_add_([self.sums[name] for name in weights], list(weights.values()), alpha=samples)

    def finish(self) -> State:
        """Return the server's state with the aggregated weights."""
        norms = {client: update.rms for client, update in self.pending.items()}
        self.rejected = norm_outliers(norms, self.config.norm_factor)
        used = {client: update for client, update in self.pending.items() if client not in self.rejected}
        least = self.config.least_replies
        if used and len(used) < least:
            reason = f"set aside: aggregate.rule = {self.config.rule} needs {least} replies; {len(used)} are usable"
            self.rejected = {**self.rejected, **dict.fromkeys(used, reason)}
            used = {}
        accepted = self._counted(used)
        if self.is_streaming:
            for update in accepted:
                self._accumulate(update.samples, update.weights)
            names = list(self.sums)
        else:
            senders = Counter(name for update in accepted for name in update.weights)
            names = [name for name, count in senders.items() if count >= least]
        self.updated_names = set(names)
        previous = self.server_state.tensors
        others = self.earlier_samples.keys() - used.keys()
        rms = defence.usual([self.sizes[client] for client in used], self.earlier_sizes if others else ())
        # One tensor after the other: a whole model in float64, besides the sums, would double the memory.
        aggregated = {name: self._aggregate(name, accepted, rms).to(previous[name].dtype) for name in names}
        return State({**previous, **aggregated}, self.server_state.numbers)

    def _counted(self, used: Mapping[int, PendingUpdate]) -> list[PendingUpdate]:
        """Return the updates with the samples with which they count."""
        if not self.defends:
            return list(used.values())
        reported = [update.samples for update in used.values()]
        others = [count for client, count in self.earlier_samples.items() if client not in used]
        samples = defence.capped(reported, defence.usual(reported, others))
        self.counted_samples = {
            client: count for client, count in zip(used, samples, strict=True) if count < used[client].samples
        }
        return [update._replace(samples=count) for update, count in zip(used.values(), samples, strict=True)]

    def _aggregate(self, name: str, accepted: Sequence[PendingUpdate], rms: float | None) -> Tensor:
        """Return one aggregated tensor in float64. Its running sum is freed."""
        if self.is_streaming:
            return self.sums.pop(name).div_(self.sample_counts[name])
        senders = [update for update in accepted if name in update.weights]
        values = torch.stack([update.weights[name] for update in senders]).double()
        if self.defends:
            values = defence.defend(values, self.server_state.tensors[name], rms)
        samples = torch.tensor([update.samples for update in senders], dtype=torch.float64, device=values.device)
        return self.rule(self.config, values, samples)
