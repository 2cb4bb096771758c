"""Limits on the size of an update, judged as it arrives: relative to the weights it started from, and to other updates.

Only norms are kept, never updates, so the limits cost no memory and a mean can still be summed as updates arrive. The
price is that the first three updates of a run are not compared with others. ``aggregate.norm_factor`` compares all
updates of a round with each other, and keeps them until its end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

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

    def check(self, client: int, weights: Tensors, earlier: Sequence[float]) -> None:
        """Reject an update that is not finite or too large. Its names, shapes and types have been checked.

        ``earlier`` are the root mean squares of updates that were accepted in the round before.
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
