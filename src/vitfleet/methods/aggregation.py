"""How the weights that clients send are made one: streamed means, robust rules, and what is refused."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.config.registry import AGGREGATIONS
from vitfleet.message import Message, State, Tensors, all_finite
from vitfleet.methods.aggregation_rules import AggregationRule, MeanParams, is_weighted_mean
from vitfleet.methods.base import Aggregator, RejectedUpdateError

PLAIN_MEAN = MeanParams()


def check_weights(sent: Tensors, known: Tensors) -> None:
    """Refuse weights that are not the model's, or not finite: one of them would ruin everybody's mean."""
    for name, tensor in sent.items():
        if name not in known:
            raise RejectedUpdateError(f"it sent {name!r}, which the model does not have")
        if tensor.shape != known[name].shape or tensor.dtype != known[name].dtype:
            found, wanted = (f"{one.dtype} {tuple(one.shape)}" for one in (tensor, known[name]))
            raise RejectedUpdateError(f"it sent {name!r} as {found}, not {wanted}")
    if not all_finite(sent.values()):
        raise RejectedUpdateError("it sent weights that are not finite")


def update_norm(sent: Tensors, known: Tensors) -> float:
    """Return the Euclidean norm of the step from the known weights to those that were sent."""
    squares = (
        (tensor.double() - known[name].double()).square().sum().item()
        for name, tensor in sent.items()
        if tensor.is_floating_point()
    )
    return math.sqrt(sum(squares))


def norm_outliers(sizes: Mapping[int, float], factor: float | None) -> dict[int, str]:
    """Name those whose size is more than so many times the median, and say so. Nobody stands out of fewer than three.

    The median is the lower one of two: half of the clients may lie and still not move the bound.
    """
    if factor is None or len(sizes) < 3:
        return {}
    median = statistics.median_low(sizes.values())
    return {
        client: f"its size {size:.3g} is over aggregate.norm_factor = {factor:g} times the round's median {median:.3g}"
        for client, size in sizes.items()
        if size > factor * median
    }


@dataclass(frozen=True)
class PendingUpdate:
    """A reply that waits for the others.

    Attributes
    ----------
    size
        Root mean square of its update: comparable between clients that sent different layers.
    """

    samples: int
    tensors: Tensors
    size: float


class WeightedMean(Aggregator):
    """The sample-weighted mean of each tensor over the clients that sent it; a tensor nobody sent stays.

    Only a running sum is held, in float64: the mean of equal weights is those weights, whatever their number. A rule
    that must see all replies beside each other (trimmed, median, a bound by the round's median) holds them all.

    Attributes
    ----------
    moved
        Once finished: the tensors that somebody sent.
    """

    def __init__(self, server: State, config: AggregationParams = PLAIN_MEAN) -> None:
        self.server = server
        self.config = config
        self.rule: AggregationRule = AGGREGATIONS.entry_of(config).target
        self.streams = is_weighted_mean(self.rule)
        self.moved: set[str] = set()
        self.sums: dict[str, Tensor] = {}
        self.shares: dict[str, float] = {}
        self.held: dict[int, PendingUpdate] = {}

    def add(self, client: int, up: Message) -> None:
        """Fold in one client's weights by its samples; a client without samples has no say."""
        samples = up.numbers.get("samples")
        if not isinstance(samples, int) or samples < 0:
            raise RejectedUpdateError(f"it says it has {samples} samples")
        if self.config.max_samples is not None and samples > self.config.max_samples:
            raise RejectedUpdateError(
                f"it says it has {samples} samples; aggregate.max_samples = {self.config.max_samples}"
            )
        if not samples:
            return
        check_weights(up.tensors, self.server.tensors)
        tensors, norm = self._bounded(up.tensors)
        if not self.streams or self.config.norm_factor is not None:
            count = sum(tensor.numel() for tensor in tensors.values())
            self.held[client] = PendingUpdate(samples, tensors, norm / math.sqrt(max(1, count)))
        else:
            self._fold(samples, tensors)

    def _bounded(self, sent: Tensors) -> tuple[Tensors, float]:
        """Refuse or shorten an update that is too long; return it with its norm."""
        config = self.config
        if config.max_norm is None and config.clip is None and config.norm_factor is None:
            return sent, 0.0
        norm = update_norm(sent, self.server.tensors)
        if config.max_norm is not None and not norm <= config.max_norm:
            raise RejectedUpdateError(f"its update has the norm {norm:.3g}; aggregate.max_norm = {config.max_norm:g}")
        if config.clip is None or norm <= config.clip:
            return sent, norm
        known = self.server.tensors
        shortened = {
            name: torch.lerp(known[name], tensor, config.clip / norm) if tensor.is_floating_point() else tensor
            for name, tensor in sent.items()
        }
        return shortened, norm

    def _fold(self, samples: int, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
            self.shares[name] = self.shares.get(name, 0) + samples
        if tensors:
            torch._foreach_add_([self.sums[name] for name in tensors], list(tensors.values()), alpha=samples)

    def finish(self) -> State:
        """Return the server's state with the new weights in it."""
        sizes = {client: held.size for client, held in self.held.items()}
        self.rejected = norm_outliers(sizes, self.config.norm_factor)
        kept = [held for client, held in self.held.items() if client not in self.rejected]
        if self.streams:
            for held in kept:
                self._fold(held.samples, held.tensors)
            names = list(self.sums)
        else:
            names = list(dict.fromkeys(name for held in kept for name in held.tensors))
        self.moved = set(names)
        known = self.server.tensors
        # One after the other: a model in float64 takes twice its room, and its sums are there already.
        made = {name: self._made(name, kept).to(known[name].dtype) for name in names}
        return State({**known, **made}, self.server.numbers)

    def _made(self, name: str, kept: list[PendingUpdate]) -> Tensor:
        """Return the aggregated tensor and free its running sum."""
        if self.streams:
            return self.sums.pop(name).div_(self.shares[name])
        senders = [update for update in kept if name in update.tensors]
        values = torch.stack([update.tensors[name] for update in senders]).double()
        samples = torch.tensor([update.samples for update in senders], dtype=torch.float64, device=values.device)
        return self.rule(self.config, values, samples)
