"""What a report knows of its runs: read from their folders, finished or not."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from vitfleet.data import partition_io, tasks_io
from vitfleet.errors import UserError
from vitfleet.report.layers import LayerMaps, layer_maps
from vitfleet.run.compare import MANIFEST
from vitfleet.run.records import RoundRecord, read_records


@dataclass(frozen=True)
class RunView:
    """One run, as far as it is.

    Attributes
    ----------
    label
        What it is compared as: runs that differ only in their seed share it.
    records
        Its rounds so far.
    summary
        Its summary, once it is finished.
    partition
        Who holds how many images of which class (``counts``, ``classes``), and what tells this deal from others
        (``sha256``); of a run of tasks, over all of them.
    patches
        The picture of what its clients see of an image, if they see only a part: PNG in base64.
    """

    path: Path
    label: str
    config: dict[str, Any]
    about: dict[str, Any]
    records: list[RoundRecord]
    summary: dict[str, Any] | None
    partition: dict[str, Any] | None
    patches: str | None

    @property
    def seed(self) -> int:
        """Return its seed."""
        return int(self.config["seed"])

    @property
    def layers(self) -> LayerMaps | None:
        """Which layers its clients sent, if they chose."""
        return layer_maps(self.records)


@dataclass(frozen=True)
class Group:
    """A configuration and its runs, one a seed."""

    label: str
    runs: list[RunView] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all of its runs are."""
        return all(run.summary is not None for run in self.runs)


def find_runs(paths: Sequence[Path]) -> list[tuple[Path, str | None]]:
    """Return the run folders that these paths mean, and the names that a comparison gave them."""
    found: list[tuple[Path, str | None]] = []
    for path in paths:
        if (path / MANIFEST).is_file():
            for member in json.loads((path / MANIFEST).read_text())["members"]:
                folder = path / f"{member['name']}-s{member['config']['seed']}"
                if (folder / "config.json").is_file():
                    found.append((folder, member["name"]))
        elif (path / "config.json").is_file():
            found.append((path, None))
        else:
            raise UserError(f"{path}: holds neither a run nor a comparison (no config.json, no {MANIFEST} in it)")
    if not found:
        raise UserError(f"{paths[0]}: none of its runs has begun yet")
    return found


def read_groups(paths: Sequence[Path]) -> list[Group]:
    """Read runs and comparisons, and put runs that differ only in their seed together."""
    runs = [_read(path, name) for path, name in find_runs(paths)]
    by_content: dict[str, list[RunView]] = {}
    for run in runs:
        by_content.setdefault(_identity(run), []).append(run)
    groups: dict[str, Group] = {}
    for alike in by_content.values():
        label = alike[0].label
        if label in groups:  # two configurations of one method: their folders tell them apart
            label = _stem(alike[0].path)
        while label in groups:
            label += "′"
        groups[label] = Group(label, sorted(alike, key=lambda run: run.seed))
    return list(groups.values())


def _read(path: Path, name: str | None) -> RunView:
    config = json.loads((path / "config.json").read_text())
    summary, patches = path / "summary.json", path / "patches.png"
    return RunView(
        path=path,
        label=name or config["method"]["name"],
        config=config,
        about=json.loads((path / "about.json").read_text()) if (path / "about.json").exists() else {},
        records=list(read_records(path)),
        summary=json.loads(summary.read_text()) if summary.exists() else None,
        partition=_deal(path),
        patches=base64.b64encode(patches.read_bytes()).decode() if patches.exists() else None,
    )


def _deal(path: Path) -> dict[str, Any] | None:
    if (path / partition_io.SUMMARY_FILE).exists():
        deal: dict[str, Any] = json.loads((path / partition_io.SUMMARY_FILE).read_text())
        return deal
    if not (path / tasks_io.SUMMARY_FILE).exists():
        return None
    with safe_open(path / tasks_io.ARRAYS_FILE, "numpy") as file:
        counts = file.get_tensor("counts")
    sha256 = json.loads((path / tasks_io.SUMMARY_FILE).read_text())["sha256"]
    return {"sha256": sha256, "counts": counts.tolist(), "classes": [str(one) for one in range(counts.shape[1])]}


def _identity(run: RunView) -> str:
    """Return what makes a run itself, apart from its seed and from where it was computed."""
    rest = {key: value for key, value in run.config.items() if key not in {"seed", "machine", "title"}}
    return json.dumps([run.label, rest], sort_keys=True)


def _stem(path: Path) -> str:
    return re.sub(r"-s\d+$", "", path.resolve().name)


def devices_of(run: RunView) -> list[str] | None:
    """Return the name of each client's device, where the fleet has devices."""
    path = run.path / "devices.json"
    if not path.exists():
        return None
    names: list[str] = json.loads(path.read_text())["clients"]
    return names


def finished(groups: Iterable[Group]) -> bool:
    """Whether every run of a report is."""
    return all(group.finished for group in groups)
