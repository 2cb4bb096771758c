"""Aggregation rules: how the values that several clients sent for one tensor become one.

A rule is a function of its parameters, the clients' values ``[clients, …]`` in float64 and their numbers of samples
``[clients]``. It is applied to each tensor of the model separately. The weighted mean alone can be computed as updates
arrive; every other rule sees all updates of a round at once, and memory grows with their number.
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
    """The mean without the extremes, per coordinate; all clients count alike (Yin et al., 2018)."""

    trim: float = Field(0.1, ge=0, lt=0.5, description="fraction of the clients dropped at either end")


class MedianParams(AggregationParams):
    """The median, per coordinate; all clients count alike (Yin et al., 2018)."""


@register_aggregation("mean", MeanParams)
def weighted_mean(params: MeanParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean, weighted by samples."""
    mean: Tensor = torch.tensordot(samples / samples.sum(), values, dims=1)
    return mean


@register_aggregation("trimmed", TrimmedMeanParams)
def trimmed_mean(params: TrimmedMeanParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the mean of what is left when the largest and the smallest values are dropped."""
    return _middle(values, int(params.trim * len(values)))


@register_aggregation("median", MedianParams)
def median(params: MedianParams, values: Tensor, samples: Tensor) -> Tensor:
    """Return the median; of an even number of values, the mean of the two in the middle."""
    return _middle(values, (len(values) - 1) // 2)


def _middle(values: Tensor, dropped: int) -> Tensor:
    ranked = values.sort(dim=0).values
    return ranked[dropped : len(values) - dropped].mean(dim=0)


def is_weighted_mean(rule: AggregationRule) -> bool:
    """Whether a rule is the weighted mean, which needs only a running sum."""
    return rule is weighted_mean
