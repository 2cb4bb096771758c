"""A comparison: several configurations × seeds, each a run in a folder of its own below one folder."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitfleet.config.load import validate
from vitfleet.config.schema import Config
from vitfleet.data import manifest, tasks
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.run.folder import next_free

MANIFEST = "compare.json"


@dataclass(frozen=True)
class Member:
    """One run of a comparison: what it is compared as, and its configuration."""

    name: str
    config: Config

    def folder(self, comparison: Path) -> Path:
        """Return where the run lies."""
        return comparison / f"{self.name}-s{self.config.seed}"


def begin(members: Sequence[Member], out: Path | None, command: str) -> Path:
    """Make a comparison's folder and write down what it compares."""
    path = out or next_free(Path("runs"), "compare")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        hint = f"`vitfleet resume {path}` goes on with it" if (path / MANIFEST).exists() else "choose another --out"
        raise UserError(f"--out {path}: is not empty; {hint}")
    names = [member.folder(path).name for member in members]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} would be compared with itself; name each configuration once")
    path.mkdir(parents=True, exist_ok=True)
    tree = {
        "command": command,
        "members": [{"name": one.name, "config": one.config.model_dump(mode="json")} for one in members],
    }
    write_atomically(path / MANIFEST, json.dumps(tree, indent=2).encode())
    return path


def members_of(path: Path) -> list[Member]:
    """Read back what a comparison compares."""
    tree = json.loads((path / MANIFEST).read_text())
    return [Member(one["name"], validate(one["config"])) for one in tree["members"]]


def command_of(path: Path) -> str:
    """Return the command that asked for a comparison."""
    command: str = json.loads((path / MANIFEST).read_text())["command"]
    return command


@dataclass(frozen=True)
class Row:
    """One configuration of a comparison, over its seeds."""

    name: str
    summaries: list[dict[str, Any]]

    def mean(self, table: str, key: str) -> float | None:
        """Return the mean of a figure of the summaries; ``None`` where one lacks it."""
        values = [summary[table][key] for summary in self.summaries]
        return None if None in values else statistics.mean(values)

    def spread(self, table: str, key: str) -> float | None:
        """Return its standard deviation over the seeds; ``None`` for a single one."""
        values = [summary[table][key] for summary in self.summaries]
        return None if None in values or len(values) < 2 else statistics.stdev(values)


def rows_of(path: Path) -> list[Row]:
    """Gather a finished comparison's summaries and write them as ``compare.csv``."""
    rows: dict[str, Row] = {}
    members = members_of(path)
    for member in members:
        summary = json.loads((member.folder(path) / "summary.json").read_text())
        rows.setdefault(member.name, Row(member.name, [])).summaries.append(summary)
    with (path / "compare.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        flat = [_flat(summary) for row in rows.values() for summary in row.summaries]
        names = [row.name for row in rows.values() for _ in row.summaries]
        writer.writerow(["name", *flat[0]])
        writer.writerows([name, *values.values()] for name, values in zip(names, flat, strict=True))
    return list(rows.values())


def shards_differ(path: Path) -> bool:
    """Whether runs of one seed were dealt different images: then their accuracies do not compare."""
    deals: dict[int, set[str]] = {}
    for member in members_of(path):
        deal = json.loads((member.folder(path) / _deal_of(member.config)).read_text())
        deals.setdefault(member.config.seed, set()).add(deal["sha256"])
    return any(len(found) > 1 for found in deals.values())


def _deal_of(config: Config) -> str:
    """Return the name of the file that says what a run's clients hold."""
    return tasks.SUMMARY_FILE if config.data.tasks else manifest.SUMMARY_FILE


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
