"""Data sets whose images are still encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EncodedSplit:
    """The encoded images of one split.

    Attributes
    ----------
    items
        For each image its encoded bytes or the path of its file.
    names
        The name of each image in error messages.
    labels
        The class of each image.
    sources
        The origin of each image as a number; ``None`` if unknown.
    """

    items: Sequence[bytes | Path]
    names: Sequence[str]
    labels: NDArray[np.int64]
    sources: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices: NDArray[np.int64]) -> EncodedSplit:
        """Return the images at these indices."""
        return EncodedSplit(
            [self.items[i] for i in indices],
            [self.names[i] for i in indices],
            self.labels[indices],
            None if self.sources is None else self.sources[indices],
        )


@dataclass(frozen=True)
class RawDataset:
    """A data set before decoding; both splits number classes and sources alike.

    Attributes
    ----------
    classes
        Class names.
    train, test
        The splits; ``test`` is ``None`` if the data set has no test split.
    """

    classes: tuple[str, ...]
    train: EncodedSplit
    test: EncodedSplit | None
