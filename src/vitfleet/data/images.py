"""Decoded images as uint8 tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images of equal size with their labels.

    Attributes
    ----------
    images
        uint8, ``[count, channels, height, width]``; height and width are equal.
    labels
        int64, ``[count]``.
    sources
        Origin of each image (folder, session, writer) as a number, int64, ``[count]``; ``None`` if unknown.
    """

    images: Tensor
    labels: Tensor
    sources: Tensor | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return self.images.shape[1]

    @property
    def image_size(self) -> int:
        """Height and width of the stored images, in pixels."""
        return self.images.shape[-1]

    def to(self, device: torch.device) -> ImageSet:
        """Move images and labels to a device. Sources stay on the host, where partitions are made."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def take(self, indices: Tensor) -> ImageSet:
        """Return the images at these indices."""
        sources = None if self.sources is None else self.sources[indices]
        return ImageSet(self.images[indices], self.labels[indices], sources)


@dataclass(frozen=True)
class DataSet:
    """A training and a test set over the same classes.

    Attributes
    ----------
    name
        Name of the data set in messages and reports.
    classes
        Class names; a label is an index into them.
    train, test
        The images to train on and those to measure accuracy on; with ``data.validation`` the latter are the validation
        images.
    skipped
        Names of the images that could not be read.
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    skipped: tuple[str, ...] = ()

    def to(self, device: torch.device) -> DataSet:
        """Move both splits to a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


@dataclass(frozen=True)
class Shard:
    """The images of one client."""

    images: ImageSet  # in a simulation the whole training set, shared by all clients; on a device the client's own
    index: Tensor  # of the client's images in `images`

    def __len__(self) -> int:
        return self.index.shape[0]

    @property
    def labels(self) -> Tensor:
        """Labels of the client's images, in the shard's order."""
        return self.images.labels[self.index]
