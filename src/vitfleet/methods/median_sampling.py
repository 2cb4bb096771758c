"""EFTViT's median sampling (section 3.4): which features of a client are recorded and sent.

A class with fewer samples than the threshold (the median count of the classes present) is a minority: its features of
every epoch are candidates. Of a majority class those of the last epoch are. Every class is then brought to the
threshold: down at random, or, where all epochs together cannot reach it, up by drawing again. What leaves the client
has the same number of samples of every class.

Which samples of which epoch will be kept does not depend on the features, only on the labels and on addressed
randomness. So it is drawn before the training starts: exactly what will be sent is recorded and nothing else, as a
reservoir would end up with, in bounded memory and with static shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What to record.

    Attributes
    ----------
    slots
        Where the features of each sample in each epoch go, ``[epochs, samples]``; ``recorded`` for nowhere.
    recorded
        How many (epoch, sample) pairs are recorded.
    order
        The recorded ones that are sent, in order; one that had to be drawn again stands there more than once.
    labels
        The labels of what is sent.
    """

    slots: Ints
    recorded: int
    order: Ints
    labels: Ints


def threshold_of(counts: Ints, quantile: float) -> int:
    """Return how many samples of each class are sent: a quantile (0.5: the median) of the counts of classes present."""
    return int(np.quantile(counts, quantile)) if len(counts) else 0


def draw_plan(labels: Ints, epochs: int, threshold: float, rng: np.random.Generator) -> Plan:
    """Draw what a client with these labels records and sends."""
    samples = len(labels)
    classes, counts = np.unique(labels, return_counts=True)
    target = threshold_of(counts, threshold)
    chosen: list[Ints] = []
    for label, count in zip(classes, counts, strict=True):
        own = np.flatnonzero(labels == label)
        first = 0 if count < target else epochs - 1
        candidates = (np.arange(first, epochs)[:, None] * samples + own).ravel()
        picks = rng.permutation(candidates)[:target]
        again = rng.choice(candidates, target - len(picks)) if len(picks) < target else picks[:0]
        chosen.append(np.concatenate([picks, again]))
    pairs = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    unique, order = np.unique(pairs, return_inverse=True)
    slots = np.full(epochs * samples, len(unique), dtype=np.int64)
    slots[unique] = np.arange(len(unique))
    return Plan(slots.reshape(epochs, samples), len(unique), order.astype(np.int64), np.repeat(classes, target))
