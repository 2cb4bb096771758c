"""The runs of a report, read from their folders, finished or not."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from vitfleet import files
from vitfleet.config.data import EvalSplit
from vitfleet.config.registry import method_label
from vitfleet.errors import UserError
from vitfleet.files import read_json
from vitfleet.run.comparison.manifest import member_folders
from vitfleet.run.output.summary import (
    cost_to_target,
    is_finished,
    mean_std,
    read_summary,
    seed_values,
    summary_so_far,
)
from vitfleet.run.records import RoundRecord, read_records


@dataclass(frozen=True)
class RunData:
    """The content of one run folder."""

    path: Path
    label: str  # of the configuration; runs that differ only in their seed share it
    config: dict[str, Any]
    about: dict[str, Any]
    records: list[RoundRecord]  # of the rounds so far
    summary: dict[str, Any] | None  # None while the run is not finished
    # Images of each class on each client (counts, classes), summed over tasks, and a hash that identifies it (sha256).
    partition: dict[str, Any] | None
    patches: str | None  # the figure of masked images, PNG in base64, if the clients train on masked images
    devices: list[str] | None  # each client's hardware profile; None without a virtual clock
    class_names: Sequence[str] = ()  # empty if unknown
    compared: bool = False  # whether it is a run of a comparison

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def eval_split(self) -> EvalSplit:
        """The images that every accuracy is measured on."""
        return "validation" if self.config["data"].get("validation") else "test"

    def summary_until(self, target: float | None) -> dict[str, Any]:
        """Return the summary, or that of the rounds so far, with what it took to reach a target (``to_target``)."""
        summary = summary_so_far(self.records) if self.summary is None else self.summary
        return {**summary, "to_target": cost_to_target(self.records, target)}


@dataclass(frozen=True)
class RunGroup:
    """A configuration and its runs, one per seed."""

    label: str
    runs: list[RunData]

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.runs[0].config["method"]["name"])

    @property
    def has_tasks(self) -> bool:
        """Whether its runs learn one task after the other."""
        return self.runs[0].config["data"]["tasks"] is not None

    def mean(self, *path: str) -> float | None:
        """Return the mean of a number of the summaries over the seeds; ``None`` if one does not have it."""
        found = mean_std(seed_values([run.summary or {} for run in self.runs], path))
        return found and found.mean


def find_runs(paths: Sequence[Path]) -> list[tuple[Path, str | None]]:
    """Return the run folders at these paths, each with the name that its comparison gave it, if any."""
    folders: list[tuple[Path, str | None]] = []
    for path in paths:
        if (path / files.COMPARISON_FILE).is_file():
            folders += [
                (folder, name) for name, folder in member_folders(path) if (folder / files.CONFIG_FILE).is_file()
            ]
        elif (path / files.CONFIG_FILE).is_file():
            folders.append((path, None))
        else:
            missing = f"no {files.CONFIG_FILE} and no {files.COMPARISON_FILE}"
            raise UserError(f"{path}: contains neither a run nor a comparison ({missing})")
    if not folders:
        raise UserError(f"{paths[0]}: none of its runs has started yet")
    return folders


def read_groups(paths: Sequence[Path]) -> list[RunGroup]:
    """Read runs and comparisons; group the runs that differ only in their seed.

    A run that repeats another, with its seed, is in a group of its own: a mean over seeds counts each once.
    """
    by_identity: dict[tuple[str, int], list[RunData]] = {}
    repeats: Counter[tuple[str, int]] = Counter()
    for path, name in find_runs(paths):
        run = read_run(path, name)
        identity = _identity(run)
        by_identity.setdefault((identity, repeats[identity, run.seed]), []).append(run)
        repeats[identity, run.seed] += 1
    groups: dict[str, RunGroup] = {}
    for runs in by_identity.values():
        label = runs[0].label
        if label in groups:  # two configurations of one method: use the folder's name
            label = re.sub(r"-s\d+$", "", runs[0].path.resolve().name)
        while label in groups:
            label += "′"
        groups[label] = RunGroup(label, sorted(runs, key=lambda run: run.seed))
    return list(groups.values())


def read_run(path: Path, name: str | None = None) -> RunData:
    """Read a run folder; ``name`` is the run's in a comparison, by default the method's."""
    config = read_json(path / files.CONFIG_FILE)
    if not isinstance(config, dict) or "method" not in config:
        raise UserError(f"{path / files.CONFIG_FILE}: is no configuration of a run; name the folder of a run")
    patches = path / files.PATCHES_FIGURE
    devices = _read_json(path / files.DEVICES_FILE)
    partition = _read_partition(path)
    data = _read_json(path / files.DATA_FILE) or partition or {}
    plugins = read_json(path / files.PLUGINS_FILE) if (path / files.PLUGINS_FILE).exists() else []
    titles = {used["name"]: used.get("title", "") for used in plugins if used["kind"] == "method"}
    return RunData(
        path=path,
        label=method_label(name or config["method"]["name"], titles),
        config=config,
        about=_read_json(path / files.ABOUT_FILE) or {},
        records=list(read_records(path)),
        summary=read_summary(path) if is_finished(path) else None,
        partition=partition,
        patches=base64.b64encode(patches.read_bytes()).decode() if patches.exists() else None,
        devices=devices["clients"] if devices else None,
        class_names=data.get("classes", ()),
        compared=name is not None,
    )


def eval_splits(groups: Iterable[RunGroup]) -> str:
    """Return what the accuracies of a report were measured on: ``test``, ``validation``, or both."""
    return " or ".join(sorted({run.eval_split for group in groups for run in group.runs}))


def all_finished(groups: Iterable[RunGroup]) -> bool:
    """Return whether every run of a report is finished."""
    return all(run.summary is not None for group in groups for run in group.runs)


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _read_partition(path: Path) -> dict[str, Any] | None:
    if (partition := _read_json(path / files.PARTITION_FILE)) is not None:
        return partition
    if (tasks := _read_json(path / files.TASKS_FILE)) is None:
        return None
    with safe_open(path / files.TASKS_ARRAYS, "numpy") as file:
        counts = file.get_tensor("counts")
    classes = [str(label) for label in range(counts.shape[1])]
    return {"sha256": tasks["sha256"], "counts": counts.tolist(), "classes": classes}


def _identity(run: RunData) -> str:
    """Return what distinguishes configurations: everything but the seed, the machine and the title."""
    relevant = {key: value for key, value in run.config.items() if key not in {"seed", "machine", "title"}}
    return json.dumps([run.label, relevant], sort_keys=True)
