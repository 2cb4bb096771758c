"""Figures as data: the page draws them in the browser, :mod:`vitfleet.report.figures.files` writes them to files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

Numbers: TypeAlias = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """A curve of a line chart."""

    name: str
    style: int  # index of the configuration: it has the same colour and dashes in every figure
    x: Numbers
    y: Numbers
    low: Numbers = ()  # of the band around a mean over several seeds; empty without a band
    high: Numbers = ()


@dataclass(frozen=True)
class AxisView:
    """The curves of a line chart over one choice of horizontal axis."""

    name: str
    label: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Figure:
    """What every figure has; the page and the files draw it by its kind."""

    id: str
    title: str
    note: str = field(default="", kw_only=True)
    kind: ClassVar[str]


@dataclass(frozen=True)
class LineChart(Figure):
    """Curves over one horizontal axis, or over several to choose from."""

    label: str
    views: Sequence[AxisView]
    percent: bool = False
    kind = "line-chart"

    @property
    def floor(self) -> float:
        """Where the vertical axis begins: at 0, or near fractions that would leave more than a quarter of it empty."""
        shown = [value for view in self.views for curve in view.curves for value in (*curve.y, *curve.low)]
        values = [value for value in shown if value is not None]
        if not self.percent or not values or min(values) <= max(values) / 4:
            return 0.0
        return max(0.0, math.floor(round(10 * min(values) - 0.1, 6)) / 10)


@dataclass(frozen=True)
class HeatMap(Figure):
    """A matrix of shades, ``values[row][column]``; ``None`` is left blank."""

    values: Sequence[Numbers]
    row_label: str
    column_label: str
    rows: Sequence[str]  # labels of ticks; empty: no ticks
    columns: Sequence[str]
    percent: bool = False
    palette: Literal["blues", "oranges"] = "blues"
    sums_label: str = ""  # of bars beside the rows, the sums of their values; only in files
    kind = "heat-map"

    @property
    def shade_exponent(self) -> float:
        """Exponent from a value to its shade: counts below 1, so that one large count does not bleach the others."""
        return 1.0 if self.percent or self.palette == "oranges" else 0.6


@dataclass(frozen=True)
class BarChart(Figure):
    """Groups of bars: one group per category, one bar per series."""

    label: str
    category_label: str
    categories: Sequence[str]
    series: Sequence[tuple[str, Numbers]]
    kind = "bar-chart"


@dataclass(frozen=True)
class Timeline(Figure):
    """Busy intervals per row: ``intervals`` are (row, start, end, whether the work was used)."""

    label: str
    rows: Sequence[str]
    intervals: Sequence[tuple[int, float, float, bool]]
    kind = "timeline"


@dataclass(frozen=True)
class ImageFigure(Figure):
    """A PNG image, encoded in base64."""

    png: str
    kind = "image"


def to_json(figure: Figure) -> dict[str, Any]:
    """Return a figure as values for JSON, with five significant digits."""
    tree: dict[str, Any] = {"kind": figure.kind, **{key: _round(value) for key, value in asdict(figure).items()}}
    if isinstance(figure, HeatMap):
        tree["shade_exponent"] = figure.shade_exponent
    if isinstance(figure, LineChart):
        tree["floor"] = figure.floor
    return tree


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return value
