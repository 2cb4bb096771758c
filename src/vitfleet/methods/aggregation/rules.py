"""Aggregation rules: functions that combine the clients' values of one tensor.

A rule takes its parameters, the clients' values ``[clients, …]`` in float64 and their numbers of samples ``[clients]``.
It is applied to each tensor of the model separately. Only the weighted mean is computed as updates arrive. Every other
rule needs all updates of a round at once, and memory grows with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.config.registry import register_aggregation

AggregationRule: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]


class MeanParams(AggregationParams):
    """The mean, weighted by samples."""


class TrimmedMeanParams(AggregationParams):
    """The coordinate-wise mean without the largest and smallest values, unweighted (Yin et al., 2018)."""

    trim: float = Field(0.1, ge=0, lt=0.5, description="fraction of the clients dropped at either end")


class MedianParams(AggregationParams):
    """The coordinate-wise median, unweighted (Yin et al., 2018)."""


@register_aggregation("mean", MeanParams)
def weighted_mean(params: MeanParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean, weighted by samples."""
    mean: Tensor = torch.tensordot(samples / samples.sum(), values, dims=1)
    return mean


@register_aggregation("trimmed", TrimmedMeanParams)
def trimmed_mean(params: TrimmedMeanParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean without the largest and smallest ``trim`` of the values."""
    return _mean_without_extremes(values, int(params.trim * len(values)))


@register_aggregation("median", MedianParams)
def median(params: MedianParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the median; for an even number of values, the mean of the two in the middle."""
    return _mean_without_extremes(values, (len(values) - 1) // 2)


def _mean_without_extremes(values: Tensor, dropped: int) -> Tensor:
    """Return the coordinate-wise mean without the ``dropped`` smallest and largest values."""
    ranked = values.sort(dim=0).values
    return ranked[dropped : len(values) - dropped].mean(dim=0)
