"""What came out of a comparison: its configurations, each with the summaries of its runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitfleet.config.registry import method_label
from vitfleet.files import COMPARISON_TABLE, DATA_FILE, PARTITION_FILE, TASKS_FILE, read_json
from vitfleet.run.comparison.manifest import read_members, read_target
from vitfleet.run.output.summary import MeanStd, cost_to_target, flatten, mean_std, read_summary, seed_values
from vitfleet.run.records import read_records


@dataclass(frozen=True)
class ComparisonRow:
    """One configuration of a comparison: the summaries of its runs, one per seed.

    Every summary has an additional table ``to_target``: the first round that reached the target, the bytes of all
    clients until then and, on simulated devices, the virtual seconds; ``None`` if the target was not reached.
    """

    name: str
    summaries: list[dict[str, Any]]

    @property
    def has_tasks(self) -> bool:
        """Whether its runs learned one task after the other."""
        return all("continual" in summary for summary in self.summaries)

    @property
    def label(self) -> str:
        """The name in tables: with a method's title."""
        return method_label(self.name)

    def mean_std(self, *path: str) -> MeanStd | None:
        """Return a number over the seeds, by its tables and key; ``None`` if a summary does not have it."""
        return mean_std(seed_values(self.summaries, path))

    def mean(self, *path: str) -> float | None:
        """Return the mean of a number over the seeds; ``None`` if a summary does not have it."""
        found = self.mean_std(*path)
        return found and found.mean


@dataclass(frozen=True)
class ComparisonResult:
    """A finished comparison: its rows, and the target accuracy of their ``to_target``."""

    rows: list[ComparisonRow]
    target: float | None


def read_comparison(path: Path) -> ComparisonResult:
    """Return a finished comparison and write its summaries to ``compare.csv``.

    Without a target of its own it has that of :func:`default_target`.
    """
    members = read_members(path)
    folders = [member.folder(path) for member in members]
    summaries = [read_summary(folder) for folder in folders]
    target = read_target(path)
    if target is None:
        best = [summary["accuracy"]["best"] for summary in summaries if "continual" not in summary]
        target = default_target(best, chance=max(map(_chance, folders)))
    rows: dict[str, ComparisonRow] = {}
    for member, folder, summary in zip(members, folders, summaries, strict=True):
        summary["to_target"] = cost_to_target(read_records(folder), target)
        rows.setdefault(member.name, ComparisonRow(member.name, [])).summaries.append(summary)
    _write_csv(path / COMPARISON_TABLE, list(rows.values()))
    return ComparisonResult(list(rows.values()), target)


def default_target(best: Sequence[float | None], chance: float) -> float | None:
    """Return the best accuracy that all runs reached, in whole percent, if that is an achievement.

    It is at least halfway from chance, the accuracy of guessing, to the best of all: a run that learned nothing would
    else make it meaningless. ``None`` where a run has no global accuracy, or none is better than guessing.
    """
    known = [accuracy for accuracy in best if accuracy is not None]
    if len(known) < len(best) or not known or max(known) <= chance:
        return None
    return int(100 * max(min(known), (chance + max(known)) / 2)) / 100


def _chance(folder: Path) -> float:
    """Return the accuracy of guessing in a run; 0 if its classes are not known."""
    path = folder / DATA_FILE
    classes = read_json(path)["classes"] if path.exists() else ()
    return 1 / len(classes) if classes else 0.0


def _write_csv(path: Path, rows: Sequence[ComparisonRow]) -> None:
    """Write one line per run, with the columns of all of them."""
    lines = [{"name": row.name, **flatten(summary)} for row in rows for summary in row.summaries]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)))
        writer.writeheader()
        writer.writerows(lines)


def partitions_differ(path: Path) -> bool:
    """Return whether runs of the same seed have different partitions, so that their accuracies are not comparable."""
    hashes: dict[tuple[int, str], set[str]] = {}
    for member in read_members(path):
        name = TASKS_FILE if member.config.data.tasks else PARTITION_FILE  # runs on tasks are compared with each other
        hashes.setdefault((member.config.seed, name), set()).add(read_json(member.folder(path) / name)["sha256"])
    return any(len(different) > 1 for different in hashes.values())
