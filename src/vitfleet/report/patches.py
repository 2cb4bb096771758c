"""What a client sees of its images when most patches are dropped: above the images, below the patches that are kept."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.epoch_draws import draw_epoch
from vitfleet.run.context import RunContext

SHOWN = 8
TILE = 84  # pixels a side of an image in the picture, at least
_GAP = 6
_DROPPED = 128  # a grey that stands out from black and from white paper


def draw_patches(context: RunContext) -> None:
    """Draw the first images that the client with most of them visits, under the very masks it will draw."""
    net, config = context.net, context.config
    if not config.train.mask_ratio:
        return
    client = int(context.partition.class_counts.sum(axis=1).argmax())
    mine = torch.from_numpy(context.partition.train.for_client(client))  # of the first task
    kept = net.num_kept_patches(config.train.mask_ratio)
    draws = draw_epoch(
        config.seed,
        1,
        client,
        0,
        samples=len(mine),
        image_size=context.data.train.image_size,
        augment=AugmentConfig(),
        num_patches=net.num_patches,
        num_kept=kept,
    )
    assert draws.mask_noise is not None
    keep = draws.mask_noise[:SHOWN].argsort(axis=1, kind="stable")[:, :kept]
    chosen = mine[torch.from_numpy(draws.order[:SHOWN])].to(context.data.train.images.device)
    pixels = context.data.train.images[chosen].cpu().numpy().transpose(0, 2, 3, 1)
    sheet = contact_sheet(pixels, keep, round(net.num_patches**0.5))
    Image.fromarray(sheet).save(context.folder / "patches.png", optimize=True)


def contact_sheet(pixels: NDArray[np.uint8], keep: NDArray[np.int64], grid: int) -> NDArray[np.uint8]:
    """Lay images out in a row, and below them what is left of each.

    Parameters
    ----------
    pixels
        ``[images, side, side, channels]``.
    keep
        The patches kept of each, ``[images, kept]``, counted row by row.
    grid
        Patches a side.
    """
    cell = -(-TILE // grid)  # whole pixels a patch, so that its edges are sharp
    side = cell * grid
    columns = []
    for picture, kept in zip(pixels, keep, strict=True):
        whole = Image.fromarray(picture.squeeze()).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
        image = np.asarray(whole)
        seen = np.zeros(grid * grid, dtype=bool)
        seen[kept] = True
        mask = np.kron(seen.reshape(grid, grid), np.ones((cell, cell), dtype=bool))
        left = np.where(mask[:, :, None], image, np.uint8(_DROPPED)).astype(np.uint8)
        gap = np.full((_GAP, side, 3), 255, dtype=np.uint8)
        columns.append(np.concatenate([image, gap, left]))
    upright = np.full((len(columns[0]), _GAP, 3), 255, dtype=np.uint8)
    return np.concatenate([part for column in columns for part in (column, upright)][:-1], axis=1)
