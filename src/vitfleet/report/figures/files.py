"""Draws the figures of a report to SVG, PDF and PNG files, for papers and slides."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitfleet.report.figures.types import AxisView, BarChart, Figure, HeatMap, ImageFigure, LineChart, Timeline

# The colours of the page on white, in the same order; from the seventh curve on, dashes distinguish the curves.
COLOURS = ("#0072b2", "#d55e00", "#00805c", "#a8457b", "#806600", "#4b5563")
DASHES: tuple[Any, ...] = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)))
INK = "#334155"
ROTATED = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}  # long labels of ticks
_MAX_TICKS = 24
_MAX_MARKED_POINTS = 12
_NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # equal runs write equal files


def draw_files(
    figure: Figure, folder: Path, names: str = "", endings: Sequence[str] = ("svg", "pdf", "png")
) -> list[Path]:
    """Draw a figure into a folder and return its files: one per ending and horizontal axis.

    ``names`` are appended to the files' names: the configurations that the figure shows, where its id does not name
    them.
    """
    suffix = f"-{names}" if names else ""
    if isinstance(figure, ImageFigure):
        path = folder / f"{figure.id}{suffix}.png"
        path.write_bytes(base64.b64decode(figure.png))
        return [path]
    written = []
    for name, view in _file_names(figure):
        canvas = _draw(figure, view)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # the layout is computed once for all files
        for ending in endings:
            written.append(folder / f"{name}{suffix}.{ending}")
            canvas.savefig(written[-1], metadata=_NO_DATE.get(ending))
    return written


def _file_names(figure: Figure) -> Iterator[tuple[str, AxisView | None]]:
    """Yield the name of each file, without ending, and the view that it shows."""
    if isinstance(figure, LineChart) and len(figure.views) > 1:
        yield from ((f"{figure.id}-by-{view.name.replace(' ', '-')}", view) for view in figure.views)
    else:
        yield figure.id, figure.views[0] if isinstance(figure, LineChart) else None


def _draw(figure: Figure, view: AxisView | None) -> Any:
    """Return a matplotlib figure, without pyplot: no display is needed, and no global state remains."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "vitfleet"
    mpl.rcParams["pdf.fonttype"] = 42  # TrueType: journals reject Type 3 fonts
    canvas = MatplotlibFigure(figsize=(7, _height(figure)), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    ratios = (5, 1) if isinstance(figure, HeatMap) and figure.sums_label else (1,)
    ((axes, *beside),) = canvas.subplots(1, len(ratios), squeeze=False, sharey=True, width_ratios=ratios)
    axes.set_title(figure.title, fontsize=11, color=INK, loc="left")
    axes.tick_params(colors=INK, labelsize=8)
    match figure:
        case LineChart():
            assert view is not None
            _draw_lines(axes, figure, view)
        case HeatMap():
            image = _draw_heat_map(axes, figure)
            if beside:
                _draw_sums(beside[0], figure)
            canvas.colorbar(image, ax=[axes, *beside], shrink=0.8)
        case BarChart():
            _draw_bars(axes, figure)
        case Timeline():
            _draw_timeline(axes, figure)
    return canvas


def _height(figure: Figure) -> float:
    match figure:
        case HeatMap():
            return float(np.clip(1.4 + 0.25 * len(figure.values), 2.6, 8))
        case Timeline():
            return float(np.clip(1.4 + 0.2 * len(figure.rows), 2.4, 10))
        case _:
            return 4.2


def _draw_lines(axes: Any, figure: LineChart, view: AxisView) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for curve in view.curves:
        colour = COLOURS[curve.style % len(COLOURS)]
        dashes = DASHES[curve.style // len(COLOURS) % len(DASHES)]
        x, y = _floats(curve.x), _floats(curve.y)
        marker = "o" if len(x) <= _MAX_MARKED_POINTS else None
        axes.plot(x, y, label=curve.name, linewidth=1.6, marker=marker, markersize=3.5, color=colour, linestyle=dashes)
        if curve.low:
            axes.fill_between(x, _floats(curve.low), _floats(curve.high), color=colour, alpha=0.14, linewidth=0)
    axes.set_xlabel(view.label, color=INK, fontsize=9)
    axes.set_ylabel(figure.label, color=INK, fontsize=9)
    axes.grid(color="#e2e8f0", linewidth=0.7)
    if figure.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if view.label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lowest = min((value for curve in view.curves for value in (*curve.y, *curve.low) if value is not None), default=0.0)
    if lowest >= 0:  # a band or a transfer may be below zero
        axes.set_ylim(bottom=0)
    if len(view.curves) > 1:
        axes.legend(fontsize=8, frameon=False)
    _hide_spines(axes)


def _draw_heat_map(axes: Any, figure: HeatMap) -> Any:
    from matplotlib.colors import PowerNorm

    width = max(len(row) for row in figure.values)
    values = np.full((len(figure.values), width), np.nan)
    for index, row in enumerate(figure.values):
        values[index, : len(row)] = _floats(row)
    top = 1.0 if figure.percent else max(float(np.nanmax(values)), 1e-12)
    shade = PowerNorm(figure.shade_exponent, vmin=0, vmax=top)
    palette = figure.palette.capitalize()
    image = axes.imshow(values, aspect="auto", cmap=palette, norm=shade, interpolation="nearest")
    _label_ticks(axes.set_xticks, figure.columns, width, rotate=True)
    _label_ticks(axes.set_yticks, figure.rows, len(values), rotate=False)
    axes.set_xlabel(figure.column_label, color=INK, fontsize=9)
    axes.set_ylabel(figure.row_label, color=INK, fontsize=9)
    return image


def _draw_sums(axes: Any, figure: HeatMap) -> None:
    """Draw the sums of a heat map's rows as bars beside it."""
    sums = [sum(value or 0 for value in row) for row in figure.values]
    # No gaps between many rows: between thin bars they cause moiré patterns.
    axes.barh(range(len(sums)), sums, height=0.8 if figure.rows else 1.0, color="#64748b")
    axes.set_xlabel(figure.sums_label, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.tick_params(axis="y", length=0, labelleft=False)
    _hide_spines(axes)


def _label_ticks(set_ticks: Any, names: Sequence[str], count: int, rotate: bool) -> None:
    """Label rows or columns, as many as fit."""
    if not names:
        set_ticks([])
        return
    positions = range(0, count, max(1, -(-count // _MAX_TICKS)))
    labels = [names[position] for position in positions]
    set_ticks(list(positions), labels, **(ROTATED if rotate and max(map(len, labels)) > 4 else {}))


def _draw_bars(axes: Any, figure: BarChart) -> None:
    positions = np.arange(len(figure.categories))
    width = 0.8 / len(figure.series)
    for index, (name, values) in enumerate(figure.series):
        shift = (index + 0.5) * width - 0.4
        axes.bar(positions + shift, _floats(values), width, label=name, color=COLOURS[index % len(COLOURS)])
    _label_ticks(axes.set_xticks, figure.categories, len(figure.categories), rotate=True)
    axes.set_xlabel(figure.category_label, color=INK, fontsize=9)
    axes.set_ylabel(figure.label, color=INK, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    _hide_spines(axes)


def _draw_timeline(axes: Any, figure: Timeline) -> None:
    from matplotlib.collections import PolyCollection

    for used in (True, False):
        # One collection: a thousand separate bars would take seconds.
        boxes = [
            [(start, row - 0.35), (end, row - 0.35), (end, row + 0.35), (start, row + 0.35)]
            for row, start, end, was_used in figure.intervals
            if was_used is used
        ]
        axes.add_collection(PolyCollection(boxes, facecolor=COLOURS[0], alpha=1 if used else 0.3, linewidth=0))
    axes.autoscale_view()
    _label_ticks(axes.set_yticks, figure.rows, len(figure.rows), rotate=False)
    axes.invert_yaxis()
    axes.set_xlabel(figure.label, color=INK, fontsize=9)
    _hide_spines(axes)


def _hide_spines(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _floats(values: Any) -> Any:
    return np.array([np.nan if value is None else float(value) for value in values])
