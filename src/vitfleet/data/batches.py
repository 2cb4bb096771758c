"""How an image reaches the model: an epoch's draws, made in bulk, and batched work on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import AugmentConfig
from vitfleet.randomness import Address, Purpose

Draws: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class EpochDraws:
    """Everything random about one client's epoch, on the host, one row a sample.

    Attributes
    ----------
    order
        Position in the shard of the sample that is visited first, second, …
    shift
        Rows and columns by which each visited image is moved, ``[samples, 2]``.
    flip, brightness
        Whether it is mirrored; the factor of its brightness.
    noise
        A number a patch, ``[samples, patches]``: those with the smallest are kept.
    """

    order: Draws
    shift: Draws | None = None
    flip: Draws | None = None
    brightness: Draws | None = None
    noise: Draws | None = None


@dataclass(frozen=True)
class Batch:
    """One step's images, of one client or stacked on a leading axis, on the training device.

    Attributes
    ----------
    index
        Their places in the set, ``[…, batch]``.
    positions
        Their places among the client's own samples.
    share
        Each sample's share of the batch's mean; a padded sample has none.
    active
        Whether the client has this step at all, ``[…]``, as 1 or 0.
    shift, flip, brightness, keep
        What is done to each: see :class:`EpochDraws`; ``keep`` are the patches kept, ``[…, batch, kept]``.
    """

    index: Tensor
    positions: Tensor
    sample_weight: Tensor
    active: Tensor
    shift: Tensor | None = None
    flip: Tensor | None = None
    brightness: Tensor | None = None
    keep: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor changed."""
        there = {field.name: one for field in fields(self) if (one := getattr(self, field.name)) is not None}
        return Batch(**{name: change(one) for name, one in there.items()})

    def tensors(self) -> list[Tensor]:
        """Return what there is of it."""
        return [one for field in fields(self) if (one := getattr(self, field.name)) is not None]


@dataclass(frozen=True)
class EpochBatches:
    """An epoch of one client or of several together, step by step.

    Attributes
    ----------
    all
        Every step's batch, stacked on an axis before all others: ``[steps, (clients,) batch, …]``.
    widths
        How much of each step's batch is used by any client.
    active
        How many clients have each step, the first so many, known on the host.
    """

    all: Batch
    widths: list[int]
    active: list[int]

    def __len__(self) -> int:
        return len(self.widths)

    def step(self, place: int, clients: int | None) -> Batch:
        """Return one step's batch, no wider than it needs to be.

        Parameters
        ----------
        clients
            Of how many clients, the first so many; ``None`` where there is no axis of clients.
        """
        width, axis = self.widths[place], 0 if clients is None else 1

        def cut(table: Tensor) -> Tensor:
            row = table[place] if clients is None else table[place, :clients]
            return row.narrow(axis, 0, width) if row.dim() > axis else row

        return self.all.map(cut)


def make_epoch_batches(
    draws: Sequence[EpochDraws], batch_size: int, kept: int, device: torch.device, many: bool, multiple: int = 1
) -> EpochBatches:
    """Lay several clients' epochs side by side in steps of one size; who has fewer samples has padded ones.

    Parameters
    ----------
    draws
        Those of the clients with most samples first, so that who has a step is always the first few.
    kept
        How many patches of an image are kept, where draws say which.
    many
        Whether there is an axis of clients; without it there is one client.
    multiple
        The batch's width is a multiple of this, or the whole ``batch_size``.

    The places in the set are still those among the client's own samples.
    """
    sizes = [len(one.order) for one in draws]
    width = min(batch_size, -(-max(sizes) // multiple) * multiple)
    steps = -(-max(sizes) // width)

    def lay(rows: Sequence[Draws]) -> Tensor:
        """``[clients][samples, …]`` → ``[steps, (clients,) width, …]``."""
        padded = np.zeros((len(rows), steps * width, *rows[0].shape[1:]), dtype=rows[0].dtype)
        for place, one in enumerate(rows):
            padded[place, : len(one)] = one
        table = padded.reshape(len(rows), steps, width, *rows[0].shape[1:]).swapaxes(0, 1)
        return _send(np.ascontiguousarray(table if many else table[:, 0]), device)

    def lay_all(column: Sequence[Draws | None]) -> Tensor | None:
        rows = [one for one in column if one is not None]
        return lay(rows) if rows else None

    counts = np.array([[min(width, max(0, size - step * width)) for size in sizes] for step in range(steps)])
    real = np.arange(width) < counts[..., None]
    share = (real / np.maximum(counts, 1)[..., None]).astype(np.float32)
    active = counts > 0
    noise = lay_all([one.noise for one in draws])
    positions = lay([one.order for one in draws])
    batch = Batch(
        index=positions,
        positions=positions,
        sample_weight=_send(share if many else share[:, 0], device),
        active=_send(np.ascontiguousarray(active if many else active[:, 0]).astype(np.float32), device),
        shift=lay_all([one.shift for one in draws]),
        flip=lay_all([one.flip for one in draws]),
        brightness=lay_all([one.brightness for one in draws]),
        keep=None if noise is None else noise.argsort(dim=-1, stable=True)[..., :kept].contiguous(),
    )
    return EpochBatches(batch, counts.max(axis=1).tolist(), active.sum(axis=1).tolist())


def _send(array: Draws, device: torch.device) -> Tensor:
    """Move an array to the device without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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

    order = at(Purpose.ORDER).permutation(samples)
    shift = flip = brightness = noise = None
    if augment.active:
        rng = at(Purpose.AUGMENT)
        # Always drawn in full, and the shift last (an empty range consumes nothing), so that switching one on
        # leaves the others' numbers alone.
        reach = round_half_up(augment.crop * side)
        drawn_flip = rng.random(samples, dtype=np.float32) < 0.5
        drawn_light = 1 + augment.brightness * (2 * rng.random(samples, dtype=np.float32) - 1)
        drawn_shift = rng.integers(-reach, reach + 1, size=(samples, 2))
        if reach:
            shift = drawn_shift
        if augment.flip:
            flip = drawn_flip
        if augment.brightness:
            brightness = drawn_light
    if kept < patches:
        noise = at(Purpose.MASK).random((samples, patches), dtype=np.float32)
    return EpochDraws(order, shift, flip, brightness, noise)


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

    def __call__(self, pixels: Tensor, batch: Batch | None = None) -> Tensor:
        """Turn uint8 ``[…, channels, side, side]`` into the model's float input."""
        if batch is not None and (batch.shift is not None or batch.flip is not None):
            pixels = _move(pixels, batch.shift, batch.flip)
        images = pixels.float().div_(255)
        if images.shape[-1] != self.side:
            flat = images.flatten(0, -4)
            flat = F.interpolate(flat, (self.side, self.side), mode="bilinear", antialias=flat.shape[-1] > self.side)
            images = flat.reshape(*images.shape[:-2], self.side, self.side)
        if batch is not None and batch.brightness is not None:
            images = (images * batch.brightness[..., None, None, None]).clamp_(0, 1)
        return (images - self.mean[:, None, None]) / self.std[:, None, None]


def _move(pixels: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
    """Shift each image (black comes in from outside) and mirror it, in one gather."""
    *lead, channels, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device).expand(*lead, height)
    columns = torch.arange(width, device=pixels.device).expand(*lead, width)
    if flip is not None:
        columns = torch.where(flip[..., None], width - 1 - columns, columns)
    if shift is not None:
        rows = rows + shift[..., :1]
        columns = columns + shift[..., 1:]
    places = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
    wanted = places.flatten(-2).unsqueeze(-2).expand(*lead, channels, height * width)
    moved = pixels.flatten(-2).gather(-1, wanted).reshape(pixels.shape)
    if shift is None:
        return moved
    inside_rows, inside_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    return moved * (inside_rows[..., :, None] & inside_columns[..., None, :]).unsqueeze(-3)
