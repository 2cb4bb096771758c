"""Draws a report's figures to files, SVG and PNG, for papers and slides."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitfleet.report.figure_types import Bars, Figure, Heat, Lines, Picture, Spans, View

# The page's own colours on white, in its order; after six, dashes tell curves apart.
COLOURS = ("#0072b2", "#d55e00", "#00805c", "#a8457b", "#806600", "#4b5563")
DASHES: tuple[Any, ...] = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)))
_INK = "#334155"
_TICKS = 24


def draw_files(figure: Figure, folder: Path) -> list[Path]:
    """Draw a figure into a folder and return its files."""
    if isinstance(figure, Picture):
        path = folder / f"{figure.id}.png"
        path.write_bytes(base64.b64decode(figure.png))
        return [path]
    written = []
    for name, view in _sheets(figure):
        canvas = _sheet(figure, view)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once, for both files
        for kind in ("svg", "png"):
            written.append(folder / f"{name}.{kind}")
            # No date: equal runs make equal files.
            canvas.savefig(written[-1], metadata={"Date": None} if kind == "svg" else None)
    return written


def _sheets(figure: Figure) -> Iterator[tuple[str, View | None]]:
    if isinstance(figure, Lines) and len(figure.views) > 1:
        yield from ((f"{figure.id}-by-{view.name.replace(' ', '-')}", view) for view in figure.views)
    else:
        yield figure.id, figure.views[0] if isinstance(figure, Lines) else None


def _sheet(figure: Figure, view: View | None) -> Any:
    # A Figure of its own, without pyplot: no display is needed and no global state is left behind.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as CostReport

    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "vitfleet"
    sheet = CostReport(figsize=(7, _height(figure)), dpi=130, layout="constrained")
    FigureCanvasAgg(sheet)
    axes: Any = sheet.subplots()
    axes.set_title(figure.title, fontsize=11, color=_INK, loc="left")
    axes.tick_params(colors=_INK, labelsize=8)
    match figure:
        case Lines():
            assert view is not None
            _lines(axes, figure, view)
        case Heat():
            image = _heat(axes, figure)
            sheet.colorbar(image, ax=axes, shrink=0.8)
        case Bars():
            _bars(axes, figure)
        case Spans():
            _spans(axes, figure)
    return sheet


def _height(figure: Figure) -> float:
    match figure:
        case Heat():
            return float(np.clip(1.4 + 0.25 * len(figure.values), 2.6, 8))
        case Spans():
            return float(np.clip(1.4 + 0.2 * len(figure.rows), 2.4, 10))
        case _:
            return 4.2


def _lines(axes: Any, figure: Lines, view: View) -> None:
    from matplotlib.ticker import PercentFormatter

    for series in view.series:
        look = {"color": COLOURS[series.style % len(COLOURS)], "linestyle": _dash(series.style)}
        x, y = _floats(series.x), _floats(series.y)
        axes.plot(x, y, label=series.name, linewidth=1.6, marker="o" if len(x) <= 12 else None, markersize=3.5, **look)
        if series.low:
            axes.fill_between(
                x, _floats(series.low), _floats(series.high), color=look["color"], alpha=0.14, linewidth=0
            )
    axes.set_xlabel(view.label, color=_INK, fontsize=9)
    axes.set_ylabel(figure.label, color=_INK, fontsize=9)
    axes.grid(color="#e2e8f0", linewidth=0.7)
    if figure.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if len(view.series) > 1:
        axes.legend(fontsize=8, frameon=False)
    _open(axes)


def _dash(style: int) -> Any:
    return DASHES[style // len(COLOURS) % len(DASHES)]


def _heat(axes: Any, figure: Heat) -> Any:
    from matplotlib.colors import PowerNorm

    width = max(len(row) for row in figure.values)
    values = np.full((len(figure.values), width), np.nan)
    for row, line in enumerate(figure.values):
        values[row, : len(line)] = _floats(line)
    top = 1.0 if figure.percent else max(float(np.nanmax(values)), 1e-12)
    shade = PowerNorm(1.0 if figure.percent or figure.warm else 0.6, vmin=0, vmax=top)
    image = axes.imshow(
        values, aspect="auto", cmap="Oranges" if figure.warm else "Blues", norm=shade, interpolation="nearest"
    )
    _ticks(axes.set_xticks, figure.columns, width, turned=True)
    _ticks(axes.set_yticks, figure.rows, len(values), turned=False)
    axes.set_xlabel(figure.column_label, color=_INK, fontsize=9)
    axes.set_ylabel(figure.row_label, color=_INK, fontsize=9)
    return image


def _ticks(put: Any, names: Any, count: int, turned: bool) -> None:
    """Name rows or columns, as many as there is room for."""
    if not names:
        put([])
        return
    every = range(0, count, max(1, -(-count // _TICKS)))
    labels = [names[i] for i in every]
    long = turned and max(map(len, labels)) > 4
    put(list(every), labels, **({"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if long else {}))


def _bars(axes: Any, figure: Bars) -> None:
    places = np.arange(len(figure.names))
    width = 0.8 / len(figure.series)
    for position, (name, values) in enumerate(figure.series):
        shift = (position + 0.5) * width - 0.4
        axes.bar(places + shift, _floats(values), width, label=name, color=COLOURS[position % len(COLOURS)])
    _ticks(axes.set_xticks, figure.names, len(figure.names), turned=True)
    axes.set_xlabel(figure.column_label, color=_INK, fontsize=9)
    axes.set_ylabel(figure.label, color=_INK, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    _open(axes)


def _spans(axes: Any, figure: Spans) -> None:
    from matplotlib.collections import PolyCollection

    for used in (True, False):
        # One collection: a thousand separate bars would take seconds.
        boxes = [
            [(start, row - 0.35), (stop, row - 0.35), (stop, row + 0.35), (start, row + 0.35)]
            for row, start, stop, kept in figure.spans
            if kept is used
        ]
        axes.add_collection(PolyCollection(boxes, facecolor=COLOURS[0], alpha=1 if used else 0.3, linewidth=0))
    axes.autoscale_view()
    _ticks(axes.set_yticks, figure.rows, len(figure.rows), turned=False)
    axes.invert_yaxis()
    axes.set_xlabel(figure.label, color=_INK, fontsize=9)
    _open(axes)


def _open(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _floats(values: Any) -> Any:
    return np.array([np.nan if value is None else float(value) for value in values])
