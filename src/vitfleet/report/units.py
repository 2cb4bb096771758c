"""Numbers as text: how each kind of number is printed, in the terminal, on the page, in tables and figures.

Bytes are printed in units of 1024 (KiB, MiB, GiB) everywhere, accuracies in percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vitfleet.run.output.summary import MeanStd

MEBIBYTE = 2**20
UNKNOWN = "–"


def format_bytes(count: float) -> str:
    """Return a number of bytes as text: ``18.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_count(count: float) -> str:
    """Return a large number as text: ``85.9 M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def format_target(target: float) -> str:
    """Return a target accuracy as a percentage with the digits that it has: ``85.5%``."""
    return f"{100 * target:g}%"


def format_fraction(fraction: float | None) -> str:
    """Return a fraction as a percentage: ``57.1%``; a dash where it is unknown."""
    return UNKNOWN if fraction is None else f"{fraction:.1%}"


def format_times(count: int) -> str:
    """Return how often something happens: ``once``, ``3 times``."""
    return "once" if count == 1 else f"{count} times"


@dataclass(frozen=True)
class Unit:
    """How the numbers of a column are printed."""

    name: str = ""
    scale: float = 1.0  # from a summary's number to this unit
    digits: int = 1  # after the decimal point
    # Costs of small models are far below one: more digits are printed until the smallest mean has this many.
    significant: int = 0
    auto: Callable[[float], str] | None = None  # prints a number in the unit that suits it, such as 18.2 MiB

    def heading(self, title: str) -> str:
        """Return the heading of a column, or the label of an axis, in this unit: ``upload, MiB``."""
        return f"{title}, {self.name}" if self.name else title

    def text(self, value: float) -> str:
        """Return a number, with its unit only where that depends on the number."""
        return f"{self.scale * value:.{self.digits}f}" if self.auto is None else self.auto(value)

    def spread(self, found: MeanStd | None, with_name: bool = False) -> str:
        """Return a mean ± its standard deviation: ``57.1 ± 0.7``, or ``57.1 ± 0.7 %``; a dash if there is none."""
        if found is None:
            return UNKNOWN
        text = self.text(found.mean) + ("" if found.std is None else f" ± {self.text(found.std)}")
        return f"{text} {self.name}" if with_name and self.name and self.auto is None else text


PERCENT = Unit("%", 100)
BYTES = Unit("MiB", 1 / MEBIBYTE, 2, 2, format_bytes)
SECONDS = Unit("s", auto=format_seconds)
COUNT = Unit("M", 1e-6, 2, 2, format_count)
GFLOPS = Unit("", 1, 2, 2, "{:.3g}".format)
NUMBER = Unit(auto="{:.4g}".format)
ROUNDS = Unit()
