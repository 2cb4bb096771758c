"""Numbers with units, for terminal and page."""

from __future__ import annotations


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
    return "–" if fraction is None else f"{fraction:.1%}"
