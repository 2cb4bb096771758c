"""The figures that a run writes into its folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from vitfleet.report.masked_patches import draw_masked_patches
from vitfleet.report.method_figures import method_figures
from vitfleet.report.partition_plot import draw_partition
from vitfleet.report.plotting import draw_files
from vitfleet.report.runs import read_run
from vitfleet.run.context import RunContext


def can_draw() -> bool:
    """Return whether matplotlib, an extra, is installed; a run without it writes no figures."""
    return find_spec("matplotlib") is not None


def draw_setup(context: RunContext) -> None:
    """Draw the data partition, and masked images if there are any, before the first round."""
    if can_draw():
        draw_partition(context.partition.class_counts, context.data.classes, context.folder / "partition.png")
    draw_masked_patches(context)


def draw_results(folder: Path) -> None:
    """Draw the figures that the run's method declares, from the records of a finished run."""
    if can_draw():
        for figure in method_figures(read_run(folder)):
            draw_files(figure, folder, endings=("png",))
