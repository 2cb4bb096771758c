"""Limits on an update: relative to the weights it started from, to earlier updates, and to the others of its round.

What is judged as an update arrives (:class:`UpdateLimits`) needs only norms. The price is that the first three updates
of a run are not compared with others. What an update counts with is judged by the measure of its round
(:class:`RoundMeasure`): the medians of what other devices sent, which up to half of them cannot raise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.message import Tensors, all_finite
from vitfleet.methods.aggregation.rules import MIN_COMPARED
from vitfleet.methods.reported import RejectedUpdateError

MAX_COUNT_STEP = 2**40  # a counter, such as that of the batches that a batch norm has seen, rises by less in a round
CHUNK_BYTES = 2**26  # differences are computed for tensors of at most so many bytes at once


class UpdateLimits:
    """The limits on one round's updates of the server's weights, the reference."""

    def __init__(self, reference: Tensors, config: AggregationParams) -> None:
        self.reference = reference
        self.config = config
        self.rms: dict[int, float] = {}  # of each update within the limits: the root mean square of its change
        self._reference_norms: dict[str, float] = {}

    def check(self, client: int, weights: Tensors, earlier: Sequence[float]) -> dict[str, float]:
        """Reject an update that is not finite or too large. Its names, shapes and types have been checked.

        ``earlier`` are the root mean squares of updates that were accepted in the round before. Return the Euclidean
        norm of each weight's change.
        """
        self._check_statistics(weights)
        names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        changes = dict(zip(names, _change_norms(names, weights, self.reference), strict=True))
        if not all(map(math.isfinite, changes.values())) and not all_finite(weights.values()):
            raise RejectedUpdateError("its weights are not finite")
        given = self._norms_given(names)
        factor = self.config.max_change
        for name, change in changes.items():
            # A weight that starts at zero may change too: sizes around 1 are usual.
            limit = math.inf if factor is None else factor * (given[name] + math.sqrt(weights[name].numel()))
            if not change <= limit:
                raise RejectedUpdateError(
                    f"its weight {name!r} has changed by {change:.3g} (norm); aggregate.max_change = {factor:g} allows "
                    f"{limit:.3g} from the norm {given[name]:.3g} that it was given"
                )
        size = math.sqrt(max(1, sum(weights[name].numel() for name in names)))
        rms = math.hypot(*changes.values()) / size
        check_rms(rms, [*earlier, *self.rms.values()], self.config, floor=math.hypot(*given.values()) / size)
        self.rms[client] = rms
        return changes

    def _check_statistics(self, weights: Tensors) -> None:
        """Reject running statistics that no training makes: negative variances, counters that fall or leap."""
        for name, tensor in weights.items():
            if name.endswith("running_var"):
                possible = bool((tensor >= 0).all())
            elif not tensor.is_floating_point() and tensor.dtype != torch.bool:
                risen = tensor.double() - self.reference[name].double()
                possible = bool(((risen >= 0) & (risen < MAX_COUNT_STEP)).all())
            else:
                continue
            if not possible:
                raise RejectedUpdateError(f"its weight {name!r} has values that no training makes")

    def _norms_given(self, names: Sequence[str]) -> dict[str, float]:
        missing = [name for name in names if name not in self._reference_norms]
        self._reference_norms |= dict(zip(missing, _norms([self.reference[name] for name in missing]), strict=True))
        return {name: self._reference_norms[name] for name in names}


def check_rms(rms: float, accepted: Sequence[float], config: AggregationParams, floor: float) -> None:
    """Reject what is larger than ``aggregate.max_ratio`` times the median of what was accepted before.

    The lower median is used: up to half of the clients cannot raise it. What is not larger than ``floor`` is accepted.
    """
    if config.max_ratio is None or len(accepted) < MIN_COMPARED:
        return
    median = statistics.median_low(accepted)
    if rms > config.max_ratio * median and rms > floor:
        raise RejectedUpdateError(
            f"its size {rms:.3g} is over aggregate.max_ratio = {config.max_ratio:g} times {median:.3g}, the median of "
            f"the {len(accepted)} accepted before it"
        )


class PendingUpdate(NamedTuple):
    """An update that waits for the measure of its round."""

    samples: int
    weights: Tensors
    changes: Mapping[str, float]  # Euclidean norm of each weight's change
    rms: float  # of the change of all weights: comparable between clients that sent different layers


@dataclass(frozen=True)
class RoundMeasure:
    """What a round's updates are compared with: medians of what its devices sent.

    The lower median is used: up to half of the clients cannot raise it. Of fewer than three updates nobody knows which
    one is wrong: then those of the round before are counted too.
    """

    samples: float | None  # None: nothing to compare with
    rms: float | None
    changes: Mapping[str, float]  # by weight

    @classmethod
    def of(
        cls, updates: Collection[PendingUpdate], earlier_sizes: Sequence[float], earlier_samples: Iterable[int]
    ) -> RoundMeasure:
        """Return the measure of these updates."""
        few = len(updates) < MIN_COMPARED
        samples = _median([update.samples for update in updates] + (list(earlier_samples) if few else []))
        rms = _median([update.rms for update in updates] + (list(earlier_sizes) if few else []))
        by_weight: dict[str, list[float]] = {}
        for update in updates:
            for name, change in update.changes.items():
                by_weight.setdefault(name, []).append(change)
        medians = {name: _median(changes) for name, changes in by_weight.items()}
        return cls(samples, rms, {name: median for name, median in medians.items() if median is not None})

    def counted_samples(self, samples: int, earlier: int | None, config: AggregationParams) -> int:
        """Return with how many samples a device counts that reports so many now and ``earlier`` ones before."""
        if config.equal_weights:
            return 1
        known = [bound for bound in (self.samples, earlier) if bound]
        if config.samples_factor is None or not known:
            return samples
        return min(samples, int(config.samples_factor * min(known)))

    def outlier(self, rms: float, config: AggregationParams) -> str | None:
        """Return why an update of this size is rejected; ``None`` if it is not."""
        factor, median = config.norm_factor, self.rms
        if factor is None or median is None or rms <= factor * median:
            return None
        return f"its size {rms:.3g} is over aggregate.norm_factor = {factor:g} times the round's median {median:.3g}"

    def clipped(self, update: PendingUpdate, reference: Tensors, config: AggregationParams) -> Tensors:
        """Return an update's weights; changes that are too long are scaled down, towards the server's weights."""
        shares = {name: self._share(update, name, config.clip_factor) for name in update.changes}
        if config.clip_update is not None:
            norm = math.hypot(*(share * update.changes[name] for name, share in shares.items()))
            whole = min(1.0, config.clip_update / norm) if norm else 1.0
            shares = {name: share * whole for name, share in shares.items()}
        return {
            name: torch.lerp(reference[name], tensor, shares[name]) if shares.get(name, 1.0) < 1 else tensor
            for name, tensor in update.weights.items()
        }

    def _share(self, update: PendingUpdate, name: str, factor: float | None) -> float:
        """Return by how much a weight's change is scaled, at most 1."""
        change, median = update.changes[name], self.changes.get(name)
        if median is None and self.rms is not None:  # too few sent it: changes of all weights are of about one size
            median = self.rms * math.sqrt(update.weights[name].numel())
        if factor is None or median is None or change <= factor * median:
            return 1.0
        return factor * median / change


def _median(values: Sequence[float]) -> float | None:
    """Return the lower median of those that are not 0, as of weights that only some train; ``None`` of too few."""
    changed = [value for value in values if value]
    return statistics.median_low(changed) if len(changed) >= MIN_COMPARED else None


def _change_norms(names: Sequence[str], weights: Tensors, reference: Tensors) -> list[float]:
    """Return the Euclidean norm of each weight's change."""
    norms: list[Tensor] = []
    for group in _groups(names, weights):
        changes = torch._foreach_sub([weights[name] for name in group], [reference[name] for name in group])
        norms += torch._foreach_norm(changes)
    return _to_floats(norms)


def _norms(tensors: list[Tensor]) -> list[float]:
    return _to_floats(torch._foreach_norm(tensors) if tensors else [])


def _to_floats(values: Sequence[Tensor]) -> list[float]:
    """Return numbers from a device, in one transfer."""
    return torch.stack([value.double() for value in values]).tolist() if values else []


def _groups(names: Iterable[str], weights: Tensors) -> Iterator[list[str]]:
    """Yield the names in groups whose tensors have at most :data:`CHUNK_BYTES`, or are one tensor."""
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + weights[name].nbytes > CHUNK_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += weights[name].nbytes
    if group:
        yield group
