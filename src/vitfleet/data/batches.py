"""How an image reaches the model: an epoch's draws, made in bulk, and batched work on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import AugmentConfig
from vitfleet.randomness import Address, Purpose


@dataclass(frozen=True)
class EpochDraws:
    """Everything random about one client's epoch, on the training device, one row a sample.

    Attributes
    ----------
    order
        Position in the shard of the sample that is visited first, second, …
    shift
        Rows and columns by which each visited image is moved, ``[samples, 2]``.
    flip, brightness
        Whether it is mirrored; the factor of its brightness.
    keep
        Patches kept of it, ``[samples, kept]``.
    """

    order: Tensor
    shift: Tensor | None = None
    flip: Tensor | None = None
    brightness: Tensor | None = None
    keep: Tensor | None = None

    def rows(self, start: int, stop: int) -> EpochDraws:
        """Return the draws of the samples visited from ``start`` to ``stop``."""

        def cut(draws: Tensor | None) -> Tensor | None:
            return None if draws is None else draws[start:stop]

        return EpochDraws(self.order[start:stop], cut(self.shift), cut(self.flip), cut(self.brightness), cut(self.keep))


def draw_epoch(
    seed: int,
    round: int,
    client: int,
    epoch: int,
    samples: int,
    side: int,
    augment: AugmentConfig,
    patches: int,
    kept: int,
    device: torch.device,
) -> EpochDraws:
    """Draw one client's epoch from its addresses.

    Parameters
    ----------
    samples, side
        Number of the client's images and their pixels a side.
    patches, kept
        Patches of an image and how many of them are kept; equal where nothing is masked.
    """

    def at(purpose: Purpose) -> np.random.Generator:
        return Address(seed, purpose, round, client, epoch).generator()

    order = torch.from_numpy(at(Purpose.ORDER).permutation(samples)).to(device)
    shift = flip = brightness = keep = None
    if augment.active:
        rng = at(Purpose.AUGMENT)
        # Always drawn in full, and the shift last (an empty range consumes nothing), so that switching one on
        # leaves the others' numbers alone.
        reach = round_half_up(augment.crop * side)
        drawn_flip = rng.random(samples, dtype=np.float32) < 0.5
        drawn_light = 1 + augment.brightness * (2 * rng.random(samples, dtype=np.float32) - 1)
        drawn_shift = rng.integers(-reach, reach + 1, size=(samples, 2))
        if reach:
            shift = torch.from_numpy(drawn_shift).to(device)
        if augment.flip:
            flip = torch.from_numpy(drawn_flip).to(device)
        if augment.brightness:
            brightness = torch.from_numpy(drawn_light).to(device)
    if kept < patches:
        noise = torch.from_numpy(at(Purpose.MASK).random((samples, patches), dtype=np.float32))
        keep = noise.to(device).argsort(dim=1, stable=True)[:, :kept]
    return EpochDraws(order, shift, flip, brightness, keep)


def round_half_up(value: float) -> int:
    """Round to the nearest whole number, halves upwards."""
    return int(value + 0.5)


@dataclass(frozen=True)
class Preprocess:
    """From stored pixels to the model's input: move, mirror, resize, brighten, normalise.

    Attributes
    ----------
    side
        Pixels a side that the model takes.
    mean, std
        Normalisation, one a channel, of pixels in 0…1.
    """

    side: int
    mean: Tensor
    std: Tensor

    def __call__(self, pixels: Tensor, draws: EpochDraws | None = None) -> Tensor:
        """Turn uint8 ``[batch, channels, side, side]`` into the model's float input."""
        if draws is not None and (draws.shift is not None or draws.flip is not None):
            pixels = _move(pixels, draws.shift, draws.flip)
        images = pixels.float().div_(255)
        if images.shape[-1] != self.side:
            images = F.interpolate(
                images, (self.side, self.side), mode="bilinear", antialias=images.shape[-1] > self.side
            )
        if draws is not None and draws.brightness is not None:
            images = (images * draws.brightness[:, None, None, None]).clamp_(0, 1)
        return (images - self.mean[:, None, None]) / self.std[:, None, None]


def _move(pixels: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
    """Shift each image (black comes in from outside) and mirror it, in one gather."""
    batch, _, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device).expand(batch, height)
    columns = torch.arange(width, device=pixels.device).expand(batch, width)
    if flip is not None:
        columns = torch.where(flip[:, None], width - 1 - columns, columns)
    if shift is None:
        inside = None
    else:
        rows = rows + shift[:, :1]
        columns = columns + shift[:, 1:]
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        rows = rows.clamp(0, height - 1)
        columns = columns.clamp(0, width - 1)
    each = torch.arange(batch, device=pixels.device)[:, None, None]
    moved = pixels.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return moved if inside is None else moved * inside[:, None]
