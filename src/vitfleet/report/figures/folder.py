"""The figures that a run writes into its folder: its partition, masked images, and those that its method declares."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.batches import draw_epoch
from vitfleet.files import PATCHES_FIGURE
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.methods import method_figures
from vitfleet.report.figures.runs import partition_heat_map
from vitfleet.report.runs import read_run
from vitfleet.run.context import RunContext

NUM_IMAGES = 8
MIN_IMAGE_PIXELS = 84  # side of an image in the figure
_GAP_PIXELS = 6
_MASK_GREY = 128  # visible next to black and next to white


def can_draw() -> bool:
    """Return whether matplotlib, an extra, is installed; a run without it writes no figures."""
    return find_spec("matplotlib") is not None


def draw_setup(context: RunContext) -> None:
    """Draw the data partition, and masked images if there are any, before the first round."""
    if can_draw():
        figure = partition_heat_map("partition", context.partition.class_counts, context.data.classes)
        draw_files(figure, context.folder, endings=("png",))
    draw_masked_patches(context)


def draw_results(folder: Path) -> None:
    """Draw the figures that the run's method declares, from the records of a finished run."""
    if can_draw():
        for figure in method_figures(read_run(folder)):
            draw_files(figure, folder, endings=("png",))


def draw_masked_patches(context: RunContext) -> None:
    """Write ``patches.png`` if the run masks patches.

    It shows the first images in the first epoch of the client with most images, with the masks of the training.
    """
    net, config = context.net, context.config
    if not config.train.mask_ratio:
        return
    client = int(context.partition.class_counts.sum(axis=1).argmax())
    indices = torch.from_numpy(context.partition.train.for_client(client))  # of the first task
    num_kept = net.num_kept_patches(config.train.mask_ratio)
    draws = draw_epoch(
        config.seed,
        1,
        client,
        0,
        samples=len(indices),
        image_size=context.data.train.image_size,
        augment=AugmentConfig(),
        num_patches=net.num_patches,
        num_kept=num_kept,
    )
    assert draws.mask_noise is not None
    kept = draws.mask_noise[:NUM_IMAGES].argsort(axis=1, kind="stable")[:, :num_kept]
    shown = indices[torch.from_numpy(draws.order[:NUM_IMAGES])].to(context.data.train.images.device)
    pixels = context.data.train.images[shown].cpu().numpy().transpose(0, 2, 3, 1)
    sheet = contact_sheet(pixels, kept, round(net.num_patches**0.5))
    Image.fromarray(sheet).save(context.folder / PATCHES_FIGURE, optimize=True)


def contact_sheet(pixels: NDArray[np.uint8], kept: NDArray[np.int64], grid: int) -> NDArray[np.uint8]:
    """Return an image with all images in a row, and each of them again below, masked.

    ``pixels`` are ``[images, side, side, channels]``; each image keeps the patches ``kept``, ``[images, kept]``, of a
    grid of so many per side, counted row by row.
    """
    cell = -(-MIN_IMAGE_PIXELS // grid)  # whole pixels per patch, so that its edges are sharp
    side = cell * grid
    columns = []
    for image, patches in zip(pixels, kept, strict=True):
        resized = Image.fromarray(image.squeeze()).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
        whole = np.asarray(resized)
        is_kept = np.zeros(grid * grid, dtype=bool)
        is_kept[patches] = True
        mask = np.kron(is_kept.reshape(grid, grid), np.ones((cell, cell), dtype=bool))
        masked = np.where(mask[:, :, None], whole, np.uint8(_MASK_GREY)).astype(np.uint8)
        gap = np.full((_GAP_PIXELS, side, 3), 255, dtype=np.uint8)
        columns.append(np.concatenate([whole, gap, masked]))
    separator = np.full((len(columns[0]), _GAP_PIXELS, 3), 255, dtype=np.uint8)
    return np.concatenate([part for column in columns for part in (column, separator)][:-1], axis=1)
