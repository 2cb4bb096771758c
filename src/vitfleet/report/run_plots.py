"""The pictures that a run leaves in its folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from vitfleet.report.layers import draw_layers, layer_maps
from vitfleet.report.partition_plot import draw
from vitfleet.report.patches import draw_patches
from vitfleet.run.context import RunContext
from vitfleet.run.records import read_records


def can_draw() -> bool:
    """Whether matplotlib, an extra, is there: a run without it leaves no pictures and is otherwise the same."""
    return find_spec("matplotlib") is not None


def draw_partition(context: RunContext) -> None:
    """Draw who holds what, and what of an image a client sees, once a run is set up."""
    if can_draw():
        draw(context.partition.class_counts, context.data.classes, context.folder / "partition.png")
    draw_patches(context)


def draw_rounds(folder: Path) -> None:
    """Draw what a finished run's records show."""
    maps = layer_maps(read_records(folder)) if can_draw() else None
    if maps is not None:
        draw_layers(maps, folder / "layers.png")
