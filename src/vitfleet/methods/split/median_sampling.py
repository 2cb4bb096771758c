"""EFTViT's median sampling (section 3.4): which features of a client are recorded and sent.

A class with fewer samples than the threshold (the median class count over the client's classes) is a minority class.
The features of a minority class are candidates in every epoch, those of a majority class in the last epoch only. Every
class is brought to the threshold: by downsampling, or by drawing some candidates again if there are too few of them. A
client sends the same number of samples of every class. (Ours: several ``views`` of an image can be sent, masked
differently. Then majority classes are candidates in the last ``views`` epochs, and the threshold is ``views`` times as
high.)

The choice depends on the labels and on random draws, not on the features. It is therefore drawn before the training:
only what will be sent is recorded, in bounded memory and with static shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingPlan:
    """Which features to record, and which of them to send."""

    # The row of the recording that each sample's features of each epoch are written to, [epochs, samples];
    # `num_recorded` if they are not recorded.
    rows: Ints
    num_recorded: int  # (epoch, sample) pairs
    sent_rows: Ints  # in order; a pair that was drawn again occurs more than once
    sent_labels: Ints


def class_threshold(class_counts: Ints, quantile: float) -> int:
    """Return how many samples of each class are sent: a quantile of the counts of the classes that the client has."""
    return int(np.quantile(class_counts, quantile)) if len(class_counts) else 0


def draw_sampling_plan(
    labels: Ints, epochs: int, quantile: float, rng: np.random.Generator, views: int = 1
) -> SamplingPlan:
    """Draw what a client with these labels records and sends."""
    samples = len(labels)
    classes, class_counts = np.unique(labels, return_counts=True)
    threshold = class_threshold(class_counts, quantile)
    drawn_pairs: list[Ints] = []
    sent_per_class = views * threshold
    for label, count in zip(classes, class_counts, strict=True):
        positions = np.flatnonzero(labels == label)
        first_epoch = 0 if count < threshold else epochs - views
        candidates = (np.arange(first_epoch, epochs)[:, None] * samples + positions).ravel()
        drawn = rng.permutation(candidates)[:sent_per_class]
        again = rng.choice(candidates, sent_per_class - len(drawn)) if len(drawn) < sent_per_class else drawn[:0]
        drawn_pairs.append(np.concatenate([drawn, again]))
    pairs = np.concatenate(drawn_pairs) if drawn_pairs else np.empty(0, dtype=np.int64)
    recorded, sent_rows = np.unique(pairs, return_inverse=True)
    rows = np.full(epochs * samples, len(recorded), dtype=np.int64)
    rows[recorded] = np.arange(len(recorded))
    return SamplingPlan(
        rows.reshape(epochs, samples), len(recorded), sent_rows.astype(np.int64), np.repeat(classes, sent_per_class)
    )
