"""Stratified subsets of a split: a hold-out for testing or validation, and a limited number of images.

They are the same for every seed of a run, so that runs with different seeds have the same test or validation set.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.data.images import DataSet
from vitfleet.errors import DataError
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


def hold_out_validation(data: DataSet, share: float) -> DataSet:
    """Return a data set whose training images are split: a share of every class takes the place of the test images.

    The test images are dropped. With a share of 0 the data set is returned as it is.
    """
    if share == 0:
        return data
    held_out = torch.from_numpy(draw_holdout(data.train.labels.cpu().numpy(), share))
    if not held_out.any():
        raise DataError(f"{data.name}: {len(data.train)} training images are too few for data.validation = {share}")
    train, validation = (data.train.take(torch.nonzero(chosen).flatten()) for chosen in (~held_out, held_out))
    return replace(data, train=train, test=validation)


def limit_images(data: DataSet, limit: int | None) -> DataSet:
    """Return a data set with at most so many training images, and a fifth as many test images."""
    if limit is None:
        return data
    counts = training_and_test_limit(limit, len(data.classes))
    train, test = (
        images.take(torch.from_numpy(draw_subset(images.labels.cpu().numpy(), count)))
        for images, count in zip((data.train, data.test), counts, strict=True)
    )
    return replace(data, train=train, test=test)


def training_and_test_limit(limit: int, num_classes: int) -> tuple[int, int]:
    """Return how many training and test images ``data.limit`` leaves: a fifth as many for testing, one per class."""
    return limit, max(limit // 5, num_classes)


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
