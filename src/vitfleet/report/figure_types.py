"""Figures as data. The page draws them in the browser, :mod:`vitfleet.report.plotting` writes them to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

Numbers: TypeAlias = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """A curve; ``style`` is its place among the configurations: the same colour in every figure.

    ``low`` and ``high`` bound the band around a mean over several seeds.
    """

    name: str
    style: int
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class View:
    """The same curves over one of several horizontal axes."""

    name: str
    label: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Lines:
    """Curves, over one axis or several to choose from."""

    id: str
    title: str
    label: str
    views: Sequence[View]
    percent: bool = False
    note: str = ""
    kind: str = field(default="lines", init=False)


@dataclass(frozen=True)
class Heat:
    """A table of shades, ``values[row][column]``; ``None`` is left blank.

    ``rows`` and ``columns`` name them; without names they stand unlabelled.
    """

    id: str
    title: str
    values: Sequence[Numbers]
    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    percent: bool = False
    warm: bool = False
    note: str = ""
    kind: str = field(default="heat", init=False)


@dataclass(frozen=True)
class Bars:
    """Groups of bars: one group a name, one bar of it a series."""

    id: str
    title: str
    label: str
    column_label: str
    names: Sequence[str]
    series: Sequence[tuple[str, Numbers]]
    note: str = ""
    kind: str = field(default="bars", init=False)


@dataclass(frozen=True)
class Spans:
    """Who was busy when: ``spans`` are (row, from, to, whether its work was used)."""

    id: str
    title: str
    label: str
    rows: Sequence[str]
    spans: Sequence[tuple[int, float, float, bool]]
    note: str = ""
    kind: str = field(default="spans", init=False)


@dataclass(frozen=True)
class Picture:
    """A picture as it is: PNG bytes in base64."""

    id: str
    title: str
    png: str
    note: str = ""
    kind: str = field(default="picture", init=False)


Figure: TypeAlias = Lines | Heat | Bars | Spans | Picture


def plain(figure: Figure) -> dict[str, Any]:
    """Return a figure as plain values, with no more digits than a reader can see."""
    tree = _short(asdict(figure))
    assert isinstance(tree, dict)
    return tree


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return value
