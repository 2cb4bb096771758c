"""Rows as a pandas DataFrame where pandas is installed; without it, a list of dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def as_frame(rows: Iterable[Row]) -> Any:
    """Return a DataFrame of the rows, or the rows themselves where pandas is not installed."""
    listed = list(rows)
    try:
        import pandas as pd
    except ImportError:
        return listed
    return pd.DataFrame(listed)
