"""Aggregation rules: functions that combine the clients' values of one tensor.

A rule takes its parameters, the clients' values ``[clients, …]`` in float64 and their numbers of samples ``[clients]``.
It is applied to each tensor of the model separately. Only the weighted mean is computed as updates arrive. Every other
rule needs all updates of a round at once, and memory grows with their number. A tensor that fewer clients sent than a
rule needs (``least_replies`` of its parameters) keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.config.registry import register_aggregation

AggregationRule: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]
MIN_COMPARED = 3  # of fewer values nobody knows which one is wrong
WEISZFELD_STEPS = 100
WEISZFELD_TOLERANCE = 1e-9  # of the distances' mean: a step that moves less is the last


class MeanParams(AggregationParams):
    """The mean, weighted by samples."""


class RobustParams(AggregationParams):
    """Parameters of a rule that compares values: with fewer than three nobody knows which one is wrong."""

    @property
    def least_replies(self) -> int:
        """Three, of which one may be wrong."""
        return MIN_COMPARED


class TrimmedMeanParams(RobustParams):
    """The coordinate-wise mean without the largest and smallest values, unweighted (Yin et al., 2018)."""

    trim: float = Field(0.2, gt=0, lt=0.5, description="fraction of the clients dropped at either end")

    @property
    def least_replies(self) -> int:
        """So many that one is dropped at either end."""
        return max(MIN_COMPARED, math.ceil(1 / self.trim))


class MedianParams(RobustParams):
    """The coordinate-wise median, unweighted (Yin et al., 2018)."""


class GeometricMedianParams(RobustParams):
    """The point with the least sum of distances to all values, unweighted (RFA, Pillutla et al., 2022)."""


class MultiKrumParams(AggregationParams):
    """The mean of the values that are nearest to others, unweighted (Blanchard et al., 2017)."""

    liars: int = Field(1, ge=1, description="clients that may lie, and as many that are left out")

    @property
    def least_replies(self) -> int:
        """2f + 3 for f liars."""
        return 2 * self.liars + 3


@register_aggregation("mean", MeanParams)
def weighted_mean(params: MeanParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean, weighted by samples."""
    mean: Tensor = torch.tensordot(samples, values, dims=1) / samples.sum()  # of equal values exactly these
    return mean


@register_aggregation("trimmed", TrimmedMeanParams)
def trimmed_mean(params: TrimmedMeanParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean without the largest and smallest ``trim`` of the values."""
    return _mean_without_extremes(values, int(params.trim * len(values)))


@register_aggregation("median", MedianParams)
def median(params: MedianParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the median; for an even number of values, the mean of the two in the middle."""
    return coordinate_median(values)


def coordinate_median(values: Tensor) -> Tensor:
    """Return the median of every coordinate; of an even number of values, the mean of the two in the middle."""
    return _mean_without_extremes(values, (len(values) - 1) // 2)


def _mean_without_extremes(values: Tensor, dropped: int) -> Tensor:
    """Return the coordinate-wise mean without the ``dropped`` smallest and largest values."""
    ranked = values.sort(dim=0).values
    return ranked[dropped : len(values) - dropped].mean(dim=0)


@register_aggregation("geometric-median", GeometricMedianParams)
def geometric_median(params: GeometricMedianParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the geometric median by Weiszfeld's steps from the coordinate-wise one."""
    points = values.reshape(len(values), -1)
    found = coordinate_median(points)
    least = max(1e-300, WEISZFELD_TOLERANCE * float((points - found).norm(dim=1).mean()))
    for _ in range(WEISZFELD_STEPS):
        # A point at a distance of next to nothing would have an infinite weight.
        nearness = 1 / (points - found).norm(dim=1).clamp(min=least)
        step = nearness @ points / nearness.sum() - found
        found = found + step
        if float(step.norm()) <= least:
            break
    return found.reshape(values.shape[1:])


@register_aggregation("multi-krum", MultiKrumParams)
def multi_krum(params: MultiKrumParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean of all values but the ``liars`` whose distances to their nearest others are largest."""
    points = values.reshape(len(values), -1)
    distances = torch.stack([(points - point).square().sum(dim=1) for point in points])
    nearest = distances.sort(dim=1).values[:, 1 : len(points) - params.liars - 1]  # the first is the distance to itself
    kept = nearest.sum(dim=1).sort(stable=True).indices[: len(points) - params.liars]
    return values[kept.sort().values].mean(dim=0)
