"""The defence against devices that lie (``aggregate.defence``): nobody counts for more than is usual in its round.

A device may reply any number of samples and any weights. Each reply of a round is therefore compared with the others
before the rule combines them:

1. A device counts with at most the median of the samples that the round's devices report.
2. A weight w that three devices or more have sent is drawn to the coordinate-wise median m of what they sent, if it is
   further from it than the median distance τ: the further, the less it counts. (The centre is that of Yin et al., 2018.
   Clipping to τ itself, without the square, as Karimireddy, He and Jaggi do, 2021, leaves every liar the most.) ::

       w_i ← m + (w_i − m) · min(1, τ / ‖w_i − m‖)²,    τ = median_i ‖w_i − m‖

3. Of a weight that one or two devices have sent nobody knows who is right, and there is no median to compare with. Its
   change from the server's weight is scaled down to the size that changes usually have in this round: the median over
   devices of the root mean square of a device's whole change.

As long as fewer than half of the devices that sent a weight lie, m is between honest values in every coordinate and τ
is at most an honest distance: what a liar adds is not further away than an honest device may be, and less the further
it goes. Equal replies stay as they are. All medians but m are lower ones, which half of the devices cannot raise. In a
round of fewer than three replies, what other devices sent before is compared too. Of two devices alone nobody knows
which one lies: nothing is bounded then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from vitfleet.methods.aggregation.rules import MIN_COMPARED, coordinate_median


def usual(values: Collection[float], earlier: Iterable[float]) -> float | None:
    """Return the lower median of a round's values; of too few, with those of other devices; ``None``: unknown."""
    known = [*values, *(earlier if len(values) < MIN_COMPARED else ())]
    return statistics.median_low(known) if len(known) >= MIN_COMPARED else None


def clip_around_median(values: Tensor) -> Tensor:
    """Return the values of one weight, ``[devices, …]``: those beyond the median distance drawn to their median."""
    center = coordinate_median(values)
    return _shortened(values, center, lambda distances: distances.median(), power=2)


def clip_to_size(values: Tensor, reference: Tensor, rms: float) -> Tensor:
    """Return the values of one weight, none further from the server's than a root mean square of ``rms``."""
    longest = rms * reference.numel() ** 0.5
    return _shortened(values, reference, lambda distances: distances.new_tensor(longest), power=1)


def _shortened(values: Tensor, center: Tensor, longest_of: Callable[[Tensor], Tensor], power: int) -> Tensor:
    """Return the values with shorter changes from the centre where these are too long; others stay bit for bit."""
    changes = values - center
    distances = changes.reshape(len(values), -1).norm(dim=1)
    longest = longest_of(distances)
    shares = (longest / distances.clamp(min=torch.finfo(distances.dtype).tiny)).clamp(max=1) ** power
    shape = (-1, *[1] * (values.dim() - 1))
    return torch.where((distances <= longest).view(shape), values, center + shares.view(shape) * changes)


def defend(values: Tensor, reference: Tensor, rms: float | None) -> Tensor:
    """Return the values of one weight, ``[devices, …]`` in float64, as they may count.

    ``reference`` is the server's weight, ``rms`` the usual size of a device's change in this round.
    """
    if len(values) >= MIN_COMPARED:
        return clip_around_median(values)
    if rms is None or not reference.is_floating_point():  # how far a counter rises has nothing to do with sizes
        return values
    return clip_to_size(values, reference.double(), rms)


def capped(samples: Sequence[int], cap: float | None) -> list[int]:
    """Return with how many samples each device counts."""
    return [count if cap is None else min(count, int(cap)) for count in samples]
