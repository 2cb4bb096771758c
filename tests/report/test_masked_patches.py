from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from conftest import MakeConfig
from vitfleet.data.batches import draw_epoch, make_epoch_batches
from vitfleet.report.figures.folder import contact_sheet, draw_masked_patches
from vitfleet.run.setup import open_run


def test_contact_sheet_greys_out_dropped_patches_and_keeps_the_others() -> None:
    pixels = np.full((1, 8, 8, 1), 255, dtype=np.uint8)
    sheet = contact_sheet(pixels, np.array([[0, 3]]), grid=2)
    half = sheet.shape[1] // 2
    below = sheet[-2 * half :]
    assert (below[:half, :half] == 255).all()
    assert (below[half:, half:] == 255).all()
    assert (below[:half, half:] == 128).all()
    assert (sheet[: 2 * half] == 255).all()


def test_drawn_masks_equal_those_of_the_training(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("train.mask_ratio=0.5")
    context = open_run(config, tmp_path)
    draw_masked_patches(context)
    client = int(context.partition.class_counts.sum(axis=1).argmax())
    samples = len(context.partition.train.for_client(client))
    kept = context.net.num_kept_patches(0.5)
    image_size = context.data.train.image_size
    drawn = draw_epoch(
        config.seed, 1, client, 0, samples, image_size, config.data.augment, context.net.num_patches, kept
    )
    batch = make_epoch_batches([drawn], samples, kept, context.machine.device, stacked=False).batch(0, None)
    assert batch.keep is not None
    sheet = np.asarray(Image.open(tmp_path / "patches.png"))
    grid = round(context.net.num_patches**0.5)
    tile = (sheet.shape[0] - 6) // 2
    cell = tile // grid
    first = sheet[-tile:, :tile]
    grey = {
        row * grid + column
        for row in range(grid)
        for column in range(grid)
        if (first[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] == 128).all()
    }
    assert grey == set(range(grid * grid)) - set(batch.keep[0].tolist())


def test_no_figure_without_masking(tiny_config: MakeConfig, tmp_path: Path) -> None:
    draw_masked_patches(open_run(tiny_config(), tmp_path))
    assert not (tmp_path / "patches.png").exists()
