"""The form of a checkpoint: a manifest that names the files it consists of, with their checksums.

The states that are kept when a task has been learned (``data.tasks.keep_models``) have the same form, without the parts
of the server's state. Their files are hard links to the checkpoint's: a state that did not change since the previous
task is on the disk once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from vitfleet.errors import UserError
from vitfleet.files import parse_json, sync_folder, write_atomically

MANIFEST = "checkpoint.json"
OWN_FILES = "files.json"  # every name that a checkpoint's file has, is about to get, or had before: no other is removed
PREVIOUS = "previous"  # folder of the checkpoint before the last: its manifest, and the files that only it names
KEPT_FOLDER = "task-models"
VERSION = 2
CHUNK = 2**20  # bytes


class DamagedManifestError(UserError):
    """A manifest cannot be read."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    round: int  # the last finished round
    server: str  # file of the server state
    # Length in bytes of the records and timings up to this checkpoint
    records_length: int
    timings_length: int
    total_up_bytes: int = 0
    total_down_bytes: int = 0
    virtual_seconds: float = 0.0
    stop_reason: str | None = None
    clients: dict[int, str] = field(default_factory=dict)  # file of each client's state
    # File of each part of the server state that is stored separately
    parts: dict[str, str] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    update_sizes: list[float] = field(default_factory=list)
    # SHA-256 of the files; a file without one was written before there were checksums
    checksums: dict[str, str] = field(default_factory=dict)

    def files(self) -> set[str]:
        """Return the names of the checkpoint's files."""
        return {self.server, *self.clients.values(), *self.parts.values()}

    def with_checksums(self, checksums: Mapping[str, str]) -> Manifest:
        """Return the manifest with those of these checksums that are of its files."""
        named = self.files()
        return replace(self, checksums={name: value for name, value in checksums.items() if name in named})

    def damage(self, folders: tuple[Path, ...]) -> str | None:
        """Return what is wrong with the first file that is missing or changed; ``None`` if all are sound.

        Files are looked for in the folders one after the other.
        """
        for name in sorted(self.files()):
            path = find_file(name, folders)
            if path is None:
                return f"{folders[0] / name} is missing"
            if name in self.checksums and checksum(path) != self.checksums[name]:
                return f"{path} is damaged: its checksum is another one"
        return None


def find_file(name: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the path of a checkpoint's file; ``None`` if no folder holds it."""
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in a checkpoint folder; ``None`` before the first checkpoint.

    A ``DamagedManifestError`` says that it cannot be read, another ``UserError`` that another version wrote it.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        tree = parse_json(path.read_bytes())
        written_by = tree.pop("version", None)
        if type(written_by) is not int:
            raise ValueError("it has no version")
    except (ValueError, AttributeError, TypeError):
        raise DamagedManifestError(f"{path} is damaged") from None
    if written_by != VERSION:
        raise UserError(f"{path}: written by another version of vitfleet (format {written_by}); start a new run")
    try:
        for table in ("clients", "last_seen"):  # JSON has no integer keys
            tree[table] = {int(client): value for client, value in tree[table].items()}
        tree["checksums"] = dict(tree.get("checksums", {}))
        manifest = Manifest(**tree)
        if not all(isinstance(name, str) and Path(name).name == name for name in manifest.files()):
            raise ValueError("it names files elsewhere")
        return manifest
    except (ValueError, LookupError, AttributeError, TypeError):
        raise DamagedManifestError(f"{path} is damaged") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest; this commits the checkpoint."""
    write_atomically(folder / MANIFEST, json.dumps({**asdict(manifest), "version": VERSION}).encode())


def write_own_files(folder: Path, names: Iterable[str]) -> None:
    """Write the names of the files that belong to the checkpoints of a folder."""
    write_atomically(folder / OWN_FILES, json.dumps(sorted(names)).encode())


def read_own_files(folder: Path) -> set[str]:
    """Return the names of the files that belong to the checkpoints of a folder; none, if they cannot be read."""
    try:
        names = parse_json((folder / OWN_FILES).read_bytes())
    except (ValueError, FileNotFoundError):
        return set()
    if not isinstance(names, list):
        return set()
    return {name for name in names if isinstance(name, str) and Path(name).name == name}


def kept_folder(run_folder: Path, task: int) -> Path:
    """Return the folder of the states after so many tasks."""
    return run_folder / KEPT_FOLDER / f"after-{task:03d}"


def keep_states(checkpoint: Path, manifest: Manifest, target: Path) -> None:
    """Keep the states of a complete checkpoint in another folder, which afterwards is complete or does not exist."""
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a crash left
    temporary.mkdir(parents=True)
    kept = replace(manifest, parts={}).with_checksums(manifest.checksums)  # models do not need the parts
    for name in kept.files():
        try:
            os.link(checkpoint / name, temporary / name)
        except OSError:  # a disk without hard links
            shutil.copyfile(checkpoint / name, temporary / name)
    write_manifest(temporary, kept)
    temporary.rename(target)
    sync_folder(target.parent)
