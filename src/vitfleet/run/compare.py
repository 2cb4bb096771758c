"""A comparison: several configurations × sweeps × seeds, each a run in a folder of its own below one folder."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from vitfleet.config.load import validate
from vitfleet.config.schema import Config
from vitfleet.data import partition_io, tasks_io
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.run.folder import next_free
from vitfleet.run.records import read_records

MANIFEST = "compare.json"


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: what it is compared as, and its configuration."""

    name: str
    config: Config

    def folder(self, comparison: Path) -> Path:
        """Return where the run lies."""
        return comparison / f"{self.name}-s{self.config.seed}"


def sweep_of(texts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield every combination of swept values: what it is called, and the overrides that make it.

    ``method.k=1,2`` and ``train.lr=1e-3,1e-4`` are four combinations, the first called ``k=1 lr=1e-3``. Without a sweep
    there is one, without a name.
    """
    axes: list[list[tuple[str, str]]] = []
    for text in texts:
        key, sign, values = text.partition("=")
        if not sign or not key.strip() or not all(value.strip() for value in values.split(",")):
            raise UserError(f"-s {text}: must look like key=value,value,…, for example -s method.k=1,2,3")
        axes.append([(key.strip(), value.strip()) for value in values.split(",")])
    for combination in product(*axes):
        called = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in combination)
        yield called, [f"{key}={value}" for key, value in combination]


def variants_of(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return what each text makes of a configuration: what it is called, and the overrides.

    ``fed-full train.lr=3e-4`` is a method with what it alone is given; one that is named several times is called by
    that too: ``fed-full lr=3e-4``. Without any there is one, without a name.
    """
    variants = []
    names = [(text.split() or [""])[0] for text in texts]
    for text, name in zip(texts, names, strict=True):
        given = text.split()[1:]
        if not name or "=" in name or not all("=" in one for one in given):
            example = "--method 'fed-full train.lr=3e-4 train.mask_ratio=0'"
            raise UserError(
                f"--method {text!r}: must be a method's name, and key=value after it; for example {example}"
            )
        keys = [one.partition("=")[0].rpartition(".")[2] + "=" + one.partition("=")[2] for one in given]
        called = " ".join([name, *keys]).replace("/", "_") if names.count(name) > 1 else name  # a folder's name too
        variants.append((called, [f"method.name={name}", *given]))
    return variants or [("", [])]


def begin(members: Sequence[ComparedRun], out: Path | None, command: str, target: float | None = None) -> Path:
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
        "target": target,
        "members": [{"name": one.name, "config": one.config.model_dump(mode="json")} for one in members],
    }
    write_atomically(path / MANIFEST, json.dumps(tree, indent=2).encode())
    return path


def read_members(path: Path) -> list[ComparedRun]:
    """Read back what a comparison compares."""
    return [ComparedRun(one["name"], validate(one["config"])) for one in _manifest(path)["members"]]


def command_of(path: Path) -> str:
    """Return the command that asked for a comparison."""
    command: str = _manifest(path)["command"]
    return command


def _manifest(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return tree


@dataclass(frozen=True)
class Row:
    """One configuration of a comparison, over its seeds: the summaries of its runs.

    Every summary has a table ``to_target`` besides: the first round that reached the target, the bytes of all clients
    until then, and, where the fleet has devices, the virtual seconds; ``None`` where it was not reached.
    """

    name: str
    summaries: list[dict[str, Any]]

    def mean(self, table: str, key: str) -> float | None:
        """Return the mean of a figure of the summaries; ``None`` where one lacks it."""
        return self._over(statistics.mean, table, key)

    def spread(self, table: str, key: str) -> float | None:
        """Return its standard deviation over the seeds; ``None`` for a single one."""
        return self._over(statistics.stdev, table, key) if len(self.summaries) > 1 else None

    def _over(self, figure: Callable[[list[float]], float], table: str, key: str) -> float | None:
        values = [summary[table].get(key) for summary in self.summaries]
        return None if None in values else figure(values)


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its rows, and the accuracy that their ``to_target`` is about."""

    rows: list[Row]
    target: float | None


def read_comparison(path: Path) -> Comparison:
    """Gather a finished comparison's summaries and write them as ``compare.csv``.

    Where no target was asked for, it is the best that all of the runs reached, in whole per cent.
    """
    members = read_members(path)
    folders = [member.folder(path) for member in members]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    best = [summary["accuracy"]["best"] for summary in summaries]
    common = None if None in best else int(100 * min(best)) / 100
    asked = _manifest(path).get("target")
    target = common if asked is None else float(asked)
    rows: dict[str, Row] = {}
    for member, folder, summary in zip(members, folders, summaries, strict=True):
        summary["to_target"] = reach(folder, target)
        rows.setdefault(member.name, Row(member.name, [])).summaries.append(summary)
    _write_csv(path / "compare.csv", list(rows.values()))
    return Comparison(list(rows.values()), target)


def reach(folder: Path, target: float | None) -> dict[str, float | None]:
    """Return what a run needed to reach an accuracy on the common test set."""
    for record in read_records(folder):
        reached = record.accuracy.global_ if record.accuracy else None
        if target is not None and reached is not None and reached >= target:
            sent = record.total_up_bytes + record.total_down_bytes
            return {"rounds": record.round, "bytes": sent, "virtual_seconds": record.virtual_seconds}
    return {"rounds": None, "bytes": None, "virtual_seconds": None}


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write a line a run; columns are those of any of them."""
    flat = [(row.name, _flat(summary)) for row in rows for summary in row.summaries]
    columns = list(dict.fromkeys(key for _, values in flat for key in values))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *columns])
        writer.writerows([name, *(values.get(key) for key in columns)] for name, values in flat)


def shards_differ(path: Path) -> bool:
    """Whether runs of one seed were dealt different images: then their accuracies do not compare."""
    deals: dict[int, set[str]] = {}
    for member in read_members(path):
        deal = json.loads((member.folder(path) / _deal_of(member.config)).read_text())
        deals.setdefault(member.config.seed, set()).add(deal["sha256"])
    return any(len(found) > 1 for found in deals.values())


def _deal_of(config: Config) -> str:
    """Return the name of the file that says what a run's clients hold."""
    return tasks_io.SUMMARY_FILE if config.data.tasks else partition_io.SUMMARY_FILE


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
