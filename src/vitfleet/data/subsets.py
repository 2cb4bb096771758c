"""Stratified subsets of a split: a hold-out for testing, and a limited number of images.

They are the same for every seed of a run, so that runs with different seeds have the same test set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitfleet.randomness import Address, Purpose

_FIXED_ADDRESS = Address(0, Purpose.PARTITION)


def draw_holdout(labels: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return which samples are held out: a share of every class, which keeps at least one sample for training."""
    order = _FIXED_ADDRESS.generator().permutation(len(labels))
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held_out[members[:count]] = True
    return held_out


def draw_subset(labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices of ``count`` samples in ascending order, every class in proportion."""
    if count >= len(labels):
        return np.arange(len(labels))
    order = _FIXED_ADDRESS.generator().permutation(len(labels))
    quantile = np.empty(len(labels))  # position of a sample within its class, in 0…1
    for label in np.unique(labels):
        members = np.flatnonzero(labels[order] == label)
        quantile[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.sort(order[np.argsort(quantile, kind="stable")[:count]])
