"""Decoded images, resident on the training device as uint8."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """A set of equally sized images.

    Attributes
    ----------
    images
        uint8, ``[count, channels, side, side]``.
    labels
        int64, ``[count]``.
    sources
        Where each image came from (folder, session, writer), int64; ``None`` where the set does not say.
    """

    images: Tensor
    labels: Tensor
    sources: Tensor | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def channels(self) -> int:
        """Colour channels."""
        return self.images.shape[1]

    @property
    def side(self) -> int:
        """Pixels a side, as stored."""
        return self.images.shape[-1]

    def to(self, device: torch.device) -> ImageSet:
        """Move pixels and labels to a device; sources stay on the host, where partitions are made."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def take(self, index: Tensor) -> ImageSet:
        """Return the images at these positions."""
        return ImageSet(self.images[index], self.labels[index], None if self.sources is None else self.sources[index])


@dataclass(frozen=True)
class DataSet:
    """A training and a test set over the same classes."""

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    skipped: tuple[str, ...] = ()

    def to(self, device: torch.device) -> DataSet:
        """Move both sets to a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


@dataclass(frozen=True)
class Shard:
    """One client's own images: a view into a set (in a simulation) or a set of its own (on a device)."""

    images: ImageSet
    index: Tensor

    def __len__(self) -> int:
        return self.index.shape[0]

    @property
    def labels(self) -> Tensor:
        """Their labels, in the shard's order."""
        return self.images.labels[self.index]
