"""Which runs are compared: configurations × sweeps × seeds, each a run in a folder of its own below one folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitfleet.config.load import validate_saved
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import COMPARISON_FILE, read_json, write_atomically
from vitfleet.run.output.folder import next_free_folder


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: the name of its configuration, and the configuration with a seed."""

    name: str
    config: Config
    group: str = ""  # the name without the swept values: the configurations of a group differ in these only
    swept: Mapping[str, Any] = field(default_factory=dict)  # the swept keys, with their values

    def folder(self, comparison: Path) -> Path:
        """Return the run's folder."""
        return run_folder(comparison, self.name, self.config.seed)


def run_folder(comparison: Path, name: str, seed: int) -> Path:
    """Return the folder of a comparison's run; of older comparisons, it has the spaces of the name."""
    older = comparison / f"{name}-s{seed}"
    return older if older.exists() else comparison / f"{name.replace(' ', '-')}-s{seed}"


def create_comparison(
    members: Sequence[ComparedRun],
    out: Path | None,
    command: str,
    target: float | None = None,
    best_of: dict[str, Any] | None = None,
) -> Path:
    """Create a comparison's folder with its manifest and return the folder.

    Without ``out`` it is the next free ``runs/compare-NNN``. ``command`` started the comparison. ``target`` is an
    accuracy: when does each run reach it? ``best_of`` says where the values of the configurations were chosen, and how
    good they were there.
    """
    path = out or next_free_folder(Path("runs"), "compare")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        hint = f"`vitfleet resume {path}` resumes it" if (path / COMPARISON_FILE).exists() else "choose another --out"
        raise UserError(f"--out {path}: is not empty; {hint}")
    names = [member.folder(path).name for member in members]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{duplicates[0]} would be compared with itself; name each configuration and each seed once")
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
    write_atomically(path / COMPARISON_FILE, json.dumps(tree, indent=2).encode())
    return path


def discard_comparison(path: Path) -> None:
    """Remove the folder of a comparison none of whose runs has been created."""
    (path / COMPARISON_FILE).unlink()
    path.rmdir()


def read_members(path: Path) -> list[ComparedRun]:
    """Return the runs of a comparison."""
    return [
        ComparedRun(member["name"], validate_saved(member["config"]), member.get("group", ""), member.get("swept", {}))
        for member in _read_manifest(path)["members"]
    ]


def member_folders(path: Path) -> list[tuple[str, Path]]:
    """Return the name and the folder of each run of a comparison, also of one whose plug-ins are not loaded."""
    return [
        (member["name"], run_folder(path, member["name"], member["config"]["seed"]))
        for member in _read_manifest(path)["members"]
    ]


def read_target(path: Path) -> float | None:
    """Return the accuracy to reach that a comparison was given; ``None`` if it was given none."""
    target: float | None = _read_manifest(path).get("target")
    return target


def read_best_of(path: Path) -> dict[str, Any] | None:
    """Return where the values of a comparison were chosen; ``None`` if they were given."""
    found: dict[str, Any] | None = _read_manifest(path).get("best_of")
    return found


def read_command(path: Path) -> str:
    """Return the command that started a comparison."""
    command: str = _read_manifest(path)["command"]
    return command


def _read_manifest(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = read_json(path / COMPARISON_FILE)
    return tree
