"""Which rows of a table may be compared: those whose accuracies were measured on the same images in the same way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vitfleet.report.runs import RunData, RunGroup

# Keys that change how a run trains or what it keeps, but not the images that its accuracies are measured on.
_TRAINING_KEYS = ("augment", "dir")
_TASK_TRAINING_KEYS = ("rounds_per_task", "keep_models")

COMPARABLE_NOTE = "bold: the best of the rows that have the same data, partition, tasks and evaluation images"


def comparable_rows(groups: Sequence[RunGroup]) -> list[int]:
    """Return a number for each row; rows with the same number are comparable."""
    keys = [_evaluation(group.runs[0]) for group in groups]
    return [keys.index(key) for key in keys]


def best_rows(means: Sequence[float | None], comparable: Sequence[int], highest: bool) -> frozenset[int]:
    """Return the rows with the best mean among those that are comparable with them.

    Parameters
    ----------
    means
        The mean of each row; ``None`` where it has none.
    comparable
        From :func:`comparable_rows`.

    Returns
    -------
    All rows that share a best mean; none where all comparable rows have the same.
    """
    best: set[int] = set()
    for number in set(comparable):
        known = {row: mean for row, mean in enumerate(means) if comparable[row] == number and mean is not None}
        if len(set(known.values())) > 1:
            winner = (max if highest else min)(known.values())
            best |= {row for row, mean in known.items() if mean == winner}
    return frozenset(best)


def _evaluation(run: RunData) -> str:
    data: dict[str, Any] = {key: value for key, value in run.config["data"].items() if key not in _TRAINING_KEYS}
    if tasks := data.get("tasks"):
        data["tasks"] = {key: value for key, value in tasks.items() if key not in _TASK_TRAINING_KEYS}
    fleet = run.config["fleet"]
    return json.dumps([data, fleet["clients"], fleet.get("unseen", 0.0), fleet["kind"]], sort_keys=True)
