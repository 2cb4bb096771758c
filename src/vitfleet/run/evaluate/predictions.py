"""A model's predictions for labelled images, and what follows from them alone: confusion, calibration, AUROC, top k."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

CALIBRATION_BINS = 15  # as in Guo et al., "On Calibration of Modern Neural Networks", 2017


@dataclass(frozen=True)
class Predictions:
    """True class of each image, and the model's logits ``[images, classes]``; −∞: the class is known to be wrong."""

    labels: NDArray[np.int64]
    logits: NDArray[np.float32]

    @cached_property
    def predicted(self) -> NDArray[np.int64]:
        """The predicted class of each image."""
        predicted: NDArray[np.int64] = self.logits.argmax(axis=1)
        return predicted

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """The probability of each class, ``[images, classes]``: the softmax of the logits."""
        shifted = np.exp(self.logits - self.logits.max(axis=1, keepdims=True).astype(np.float64))
        probabilities: NDArray[np.float64] = shifted / shifted.sum(axis=1, keepdims=True)
        return probabilities


@dataclass(frozen=True)
class CalibrationBin:
    """Images whose predicted class has a probability within an interval: their number, mean probability, accuracy."""

    low: float
    high: float
    images: int
    confidence: float | None
    accuracy: float | None


def confusion_matrix(predictions: Predictions) -> NDArray[np.int64]:
    """Count images by true class (row) and predicted class (column)."""
    classes = predictions.logits.shape[1]
    cells = predictions.labels * classes + predictions.predicted
    return np.bincount(cells, minlength=classes**2).astype(np.int64).reshape(classes, classes)


def calibration_bins(predictions: Predictions) -> list[CalibrationBin]:
    """Sort predictions into intervals of equal width by the probability of the predicted class."""
    confidence, correct = predictions.probabilities.max(axis=1), predictions.predicted == predictions.labels
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    # Intervals are open below and closed above: a probability of exactly 1 belongs to the last one.
    which = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    bins = []
    for index in range(CALIBRATION_BINS):
        inside = which == index
        count = int(inside.sum())
        mean = (float(confidence[inside].mean()), float(correct[inside].mean())) if count else (None, None)
        bins.append(CalibrationBin(float(edges[index]), float(edges[index + 1]), count, *mean))
    return bins


def calibration_error(bins: list[CalibrationBin]) -> float:
    """Return the distance of accuracy and mean probability in each bin, averaged with the bins' images as weights."""
    gaps = [bin.images * abs((bin.accuracy or 0.0) - (bin.confidence or 0.0)) for bin in bins]
    return sum(gaps) / sum(bin.images for bin in bins)


def area_under_roc(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float | None:
    """Return the probability that a positive has a higher score than a negative; ``None`` without one of either."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return None
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[group]  # from 1; equal scores share their mean rank
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
