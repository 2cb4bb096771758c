"""A comparison: configurations × sweeps × seeds, each a run in a folder of its own below one folder."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitfleet.config.load import validate
from vitfleet.config.registry import method_label
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import read_json, write_atomically
from vitfleet.run.data_info import DATA_FILE
from vitfleet.run.folder import next_free_folder
from vitfleet.run.partitions import partition_file
from vitfleet.run.records import read_records

MANIFEST = "compare.json"


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: the name of its configuration, and the configuration with a seed.

    Attributes
    ----------
    group
        What the configuration is called without the swept values: the configurations of a group differ in them only.
    swept
        The swept keys, with their values.
    """

    name: str
    config: Config
    group: str = ""
    swept: Mapping[str, Any] = field(default_factory=dict)

    def folder(self, comparison: Path) -> Path:
        """Return the run's folder."""
        return comparison / f"{self.name}-s{self.config.seed}"


def create_comparison(
    members: Sequence[ComparedRun],
    out: Path | None,
    command: str,
    target: float | None = None,
    best_of: dict[str, Any] | None = None,
) -> Path:
    """Create a comparison's folder with its manifest and return the folder.

    Parameters
    ----------
    out
        The folder; ``None``: the next free ``runs/compare-NNN``.
    command
        The command that started the comparison.
    target
        An accuracy: when does each run reach it?
    best_of
        Where the values of the configurations were chosen, and how good they were there.
    """
    path = out or next_free_folder(Path("runs"), "compare")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        hint = f"`vitfleet resume {path}` resumes it" if (path / MANIFEST).exists() else "choose another --out"
        raise UserError(f"--out {path}: is not empty; {hint}")
    names = [member.folder(path).name for member in members]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{duplicates[0]} would be compared with itself; name each configuration once")
    path.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {
        "command": command,
        "target": target,
        "members": [
            {
                "name": member.name,
                "group": member.group,
                "swept": dict(member.swept),
                "config": member.config.model_dump(mode="json"),
            }
            for member in members
        ],
    }
    if best_of is not None:
        tree["best_of"] = best_of
    write_atomically(path / MANIFEST, json.dumps(tree, indent=2).encode())
    return path


def discard_comparison(path: Path) -> None:
    """Remove the folder of a comparison none of whose runs has been created."""
    (path / MANIFEST).unlink()
    path.rmdir()


def read_members(path: Path) -> list[ComparedRun]:
    """Return the runs of a comparison."""
    return [
        ComparedRun(member["name"], validate(member["config"]), member.get("group", ""), member.get("swept", {}))
        for member in _read_manifest(path)["members"]
    ]


def read_best_of(path: Path) -> dict[str, Any] | None:
    """Return where the values of a comparison were chosen; ``None`` if they were given."""
    found: dict[str, Any] | None = _read_manifest(path).get("best_of")
    return found


def read_command(path: Path) -> str:
    """Return the command that started a comparison."""
    command: str = _read_manifest(path)["command"]
    return command


def _read_manifest(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = read_json(path / MANIFEST)
    return tree


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

    def mean(self, table: str, key: str) -> float | None:
        """Return the mean of a value of the summaries; ``None`` if one of them has none.

        Parameters
        ----------
        table
            Name of the table in a summary; a dotted name for a table in a table.
        """
        return self._aggregate(statistics.mean, table, key)

    def spread(self, table: str, key: str) -> float | None:
        """Return the standard deviation over the seeds; ``None`` for a single seed."""
        return self._aggregate(statistics.stdev, table, key) if len(self.summaries) > 1 else None

    def _aggregate(self, function: Callable[[list[float]], float], table: str, key: str) -> float | None:
        values: list[Any] = [_table(summary, table).get(key) for summary in self.summaries]
        return None if None in values else function(values)


def _table(summary: dict[str, Any], name: str) -> dict[str, Any]:
    for part in name.split("."):
        summary = summary.get(part) or {}
    return summary


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
    summaries = [read_json(folder / "summary.json") for folder in folders]
    chosen = _read_manifest(path).get("target")
    if chosen is None:
        best = [summary["accuracy"]["best"] for summary in summaries if "continual" not in summary]
        target = default_target(best, chance=max(map(_chance, folders)))
    else:
        target = float(chosen)
    rows: dict[str, ComparisonRow] = {}
    for member, folder, summary in zip(members, folders, summaries, strict=True):
        summary["to_target"] = cost_to_target(folder, target)
        rows.setdefault(member.name, ComparisonRow(member.name, [])).summaries.append(summary)
    _write_csv(path / "compare.csv", list(rows.values()))
    return ComparisonResult(list(rows.values()), target)


def default_target(best: Sequence[float | None], chance: float) -> float | None:
    """Return the best accuracy that all runs reached, in whole percent, if that is an achievement.

    It is at least halfway from chance to the best of all: a run that learned nothing would else make it meaningless.

    Parameters
    ----------
    best
        The best accuracy of each run; ``None`` for a run without a global accuracy.
    chance
        The accuracy of guessing.

    Returns
    -------
    ``None`` where a run has no accuracy, or none is better than guessing.
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


def cost_to_target(folder: Path, target: float | None) -> dict[str, float | None]:
    """Return the rounds, bytes and virtual seconds after which a run reached a global accuracy."""
    for record in read_records(folder):
        accuracy = record.accuracy.global_ if record.accuracy else None
        if target is not None and accuracy is not None and accuracy >= target:
            total_bytes = record.total_up_bytes + record.total_down_bytes
            return {"rounds": record.round, "bytes": total_bytes, "virtual_seconds": record.virtual_seconds}
    return {"rounds": None, "bytes": None, "virtual_seconds": None}


def _write_csv(path: Path, rows: Sequence[ComparisonRow]) -> None:
    """Write one line per run, with the columns of all of them."""
    lines = [(row.name, _flatten(summary)) for row in rows for summary in row.summaries]
    columns = list(dict.fromkeys(key for _, values in lines for key in values))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *columns])
        writer.writerows([name, *(values.get(key) for key in columns)] for name, values in lines)


def partitions_differ(path: Path) -> bool:
    """Whether runs of the same seed have different partitions, so that their accuracies are not comparable."""
    hashes: dict[tuple[int, str], set[str]] = {}
    for member in read_members(path):
        name = partition_file(member.config)  # runs on tasks are compared with each other
        hashes.setdefault((member.config.seed, name), set()).add(read_json(member.folder(path) / name)["sha256"])
    return any(len(different) > 1 for different in hashes.values())


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
