"""The figures that a run writes into its folder: its partition, masked images, and those that its method declares."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.batches import draw_epoch
from vitfleet.files import PARTITION_FIGURE, PATCHES_FIGURE
from vitfleet.report.figures.files import INK, ROTATED, draw_files, hide_spines, new_canvas
from vitfleet.report.figures.methods import method_figures
from vitfleet.report.runs import read_run
from vitfleet.run.context import RunContext

Ints = NDArray[np.int64]

# Up to these numbers every client has a labelled row, every class a labelled column.
LABELLED_CLIENTS = 60
LABELLED_CLASSES = 30
# A plot has fewer rows than a large fleet has clients: neighbours in the sorted order are averaged.
_MAX_ROWS = 600
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
        draw_partition(context.partition.class_counts, context.data.classes, context.folder / PARTITION_FIGURE)
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

    Parameters
    ----------
    pixels
        ``[images, side, side, channels]``.
    kept
        Indices of the patches that each image keeps, ``[images, kept]``, counted row by row.
    grid
        Number of patches per side.
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


def draw_partition(counts: Ints, class_names: Sequence[str], path: Path) -> None:
    """Draw a partition to a PNG file.

    Up to 60 clients are labelled and in order. A larger fleet is sorted by dominant class, which makes its structure
    visible, and has no labels.

    Parameters
    ----------
    counts
        Training images, ``[clients, classes]``.
    class_names
        Names of the classes; shown for up to 30 classes.
    path
        The PNG file.
    """
    from matplotlib.colors import PowerNorm

    clients, classes = counts.shape
    labelled = clients <= LABELLED_CLIENTS
    rows = counts.astype(np.float64) if labelled else average_neighbours(counts[by_dominant_class(counts)], _MAX_ROWS)
    height = float(np.clip(1.6 + 0.26 * clients, 3.2, 9.0)) if labelled else 6.5
    width = float(np.clip(3.6 + 0.42 * classes, 6.0, 10.5))

    figure = new_canvas(width, height)
    table, bars = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    # An exponent below 1, so that one large count does not bleach the others.
    shade = PowerNorm(0.6, vmin=0, vmax=max(float(rows.max()), 1.0))
    image = table.imshow(rows, aspect="auto", cmap="Blues", norm=shade, interpolation="nearest")
    _label_table(table, clients, class_names, labelled)
    _draw_sizes(bars, rows.sum(axis=1))
    # Below both parts: between them, the scale would separate the bars from their rows.
    scale = figure.colorbar(
        image, ax=[table, bars], location="bottom", shrink=0.5, aspect=40, pad=0.02, ticks=_whole_numbers()
    )
    averaged = len(rows) < clients
    scale.set_label("images, mean of neighbouring clients" if averaged else "images", fontsize=8, color=INK)
    scale.ax.tick_params(labelsize=7, colors=INK, length=2)
    scale.ax.xaxis.set_major_formatter("{x:,.0f}")
    scale.outline.set_visible(False)
    empty = int(np.count_nonzero(counts.sum(axis=1) == 0))
    note = f", {empty:,} without images" if empty else ""
    figure.suptitle(f"{int(counts.sum()):,} images on {clients:,} clients{note}", fontsize=11, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def by_dominant_class(counts: Ints) -> Ints:
    """Return the clients sorted by dominant class, then by their images of it; clients without images last.

    Ties between classes are resolved in favour of a class that changes from client to client. With a few images per
    client ties are common, and the first class would look larger than it is.
    """
    clients, classes = counts.shape
    tie_breaker = (np.arange(classes) + np.arange(clients)[:, None]) % classes / (2 * classes)
    sizes = counts.sum(axis=1)
    dominant = np.where(sizes > 0, (counts + tie_breaker).argmax(axis=1), classes)
    return np.lexsort((-sizes, -counts.max(axis=1), dominant)).astype(np.int64)


def average_neighbours(counts: Ints, rows: int) -> NDArray[np.float64]:
    """Average neighbouring clients so that at most ``rows`` rows remain."""
    clients = counts.shape[0]
    starts = np.arange(0, clients, -(-clients // rows))
    lengths = np.diff(starts, append=clients)
    means: NDArray[np.float64] = np.add.reduceat(counts, starts, axis=0) / lengths[:, None]
    return means


def _label_table(axes: Any, clients: int, class_names: Sequence[str], labelled: bool) -> None:
    for spine in axes.spines.values():
        spine.set_color("#cbd5e1")
    axes.tick_params(length=0, labelsize=8, colors=INK)
    classes = len(class_names)
    axes.set_xlabel("class" if classes <= LABELLED_CLASSES else f"{classes:,} classes", color=INK, fontsize=9)
    if classes <= LABELLED_CLASSES:
        long = max(len(name) for name in class_names) > 4
        axes.set_xticks(range(classes), [_shorten(name) for name in class_names], **(ROTATED if long else {}))
    else:
        axes.set_xticks([])
    if labelled:
        axes.set_ylabel("client", color=INK, fontsize=9)
        axes.set_yticks(range(clients), [str(client) for client in range(clients)])
        axes.set_yticks(np.arange(clients + 1) - 0.5, minor=True)
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.0 if classes <= LABELLED_CLASSES else 0.3)
        axes.tick_params(which="minor", length=0)
    else:
        axes.set_ylabel("clients, by dominant class", color=INK, fontsize=9)
        axes.set_yticks([])


def _draw_sizes(axes: Any, sizes: NDArray[np.float64]) -> None:
    # No gaps in a large fleet: between hundreds of thin bars they cause moiré patterns.
    axes.barh(range(len(sizes)), sizes, height=0.8 if len(sizes) <= LABELLED_CLIENTS else 1.0, color="#64748b")
    axes.set_xlim(0, max(float(sizes.max()), 1.0) * 1.05)
    axes.set_xlabel("images\nper client", color=INK, fontsize=8)
    axes.xaxis.set_major_locator(_whole_numbers(2))
    axes.tick_params(axis="x", labelsize=7, colors=INK, length=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", which="both", length=0, labelleft=False)
    hide_spines(axes, "left")
    axes.spines["bottom"].set_color("#cbd5e1")


def _whole_numbers(bins: int = 6) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(bins, integer=True)


def _shorten(name: str, limit: int = 16) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
