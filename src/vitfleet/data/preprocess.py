"""Augmentation and normalisation: from stored uint8 pixels to the model's input, batched on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Augmentation(Protocol):
    """How each image is augmented: see :class:`~vitfleet.data.batches.EpochDraws`; ``None``: not at all."""

    @property
    def shift(self) -> Tensor | None:
        """Rows and columns by which an image is shifted."""

    @property
    def flip(self) -> Tensor | None:
        """Whether an image is mirrored."""

    @property
    def brightness(self) -> Tensor | None:
        """The factor of an image's brightness."""


@dataclass(frozen=True)
class Preprocess:
    """Shift, mirror, resize, brighten and normalise."""

    image_size: int  # height and width of the model's input, in pixels
    mean: Tensor  # with std: normalisation per channel, for pixels in 0…1
    std: Tensor

    def __call__(self, pixels: Tensor, augmentation: Augmentation | None = None) -> Tensor:
        """Turn uint8 ``[…, channels, height, width]`` into the model's float input, augmented or not."""
        return self.transform(pixels, *_per_image(augmentation))

    def transform(
        self,
        pixels: Tensor,
        shift: Tensor | None = None,
        flip: Tensor | None = None,
        brightness: Tensor | None = None,
    ) -> Tensor:
        """Turn stored pixels into the model's input; each augmentation is given for each image, or not at all."""
        if shift is not None or flip is not None:
            pixels = _shift_and_flip(pixels, shift, flip)
        images = pixels.float().div_(255)
        if images.shape[-1] != self.image_size:
            size = (self.image_size, self.image_size)
            flat = images.flatten(0, -4)
            flat = F.interpolate(flat, size, mode="bilinear", antialias=flat.shape[-1] > self.image_size)
            images = flat.reshape(*images.shape[:-2], *size)
        if brightness is not None:
            images = (images * brightness[..., None, None, None]).clamp_(0, 1)
        return (images - self.mean[:, None, None]) / self.std[:, None, None]


class CompiledPreprocess:
    """:class:`Preprocess`, compiled to one kernel instead of one pass over all pixels per operation.

    With a quarter of the patches and a small model, those passes are a quarter of a training step.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self._transform = torch.compile(preprocess.transform, dynamic=False)

    def __call__(self, pixels: Tensor, augmentation: Augmentation | None = None) -> Tensor:
        """Turn stored pixels into the model's input, compiled once for any number of images."""
        lead = pixels.shape[:-3]
        given = _per_image(augmentation)
        tensors = [None if tensor is None else tensor.flatten(0, len(lead) - 1) for tensor in given]
        flat = pixels.flatten(0, -4)
        for tensor in (flat, *tensors):
            if tensor is not None and len(tensor) > 1:  # torch always compiles a size of 1 by itself
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        images: Tensor = self._transform(flat, *tensors)
        return images.reshape(*lead, *images.shape[1:])


def _per_image(augmentation: Augmentation | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if augmentation is None:
        return None, None, None
    return augmentation.shift, augmentation.flip, augmentation.brightness


def _shift_and_flip(pixels: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
    """Shift each image (pixels from outside are black) and mirror it, in one gather."""
    *lead, channels, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device).expand(*lead, height)
    columns = torch.arange(width, device=pixels.device).expand(*lead, width)
    if flip is not None:
        columns = torch.where(flip[..., None], width - 1 - columns, columns)
    if shift is not None:
        rows = rows + shift[..., :1]
        columns = columns + shift[..., 1:]
    flat_index = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
    flat_index = flat_index.flatten(-2).unsqueeze(-2).expand(*lead, channels, height * width)
    moved = pixels.flatten(-2).gather(-1, flat_index).reshape(pixels.shape)
    if shift is None:
        return moved
    row_inside, column_inside = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    return moved * (row_inside[..., :, None] & column_inside[..., None, :]).unsqueeze(-3)
