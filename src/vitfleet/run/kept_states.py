"""States that are kept when a task has been learned: the models after every task, not only after the last one.

A kept folder has the form of a checkpoint, without the parts of the server's state. Its files are hard links to the
checkpoint's: a state that did not change since the previous task is on the disk once.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from vitfleet.files import sync_folder
from vitfleet.run.manifest import StoredManifest, write_manifest

KEPT_FOLDER = "task-models"


def kept_folder(run_folder: Path, task: int) -> Path:
    """Return the folder of the states after so many tasks."""
    return run_folder / KEPT_FOLDER / f"after-{task:03d}"


def keep_states(checkpoint: Path, stored: StoredManifest, target: Path) -> None:
    """Keep the states of a complete checkpoint in another folder, which afterwards is complete or does not exist."""
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a crash left
    temporary.mkdir(parents=True)
    kept = replace(stored.manifest, parts={})  # models do not need the parts
    for name in kept.files():
        try:
            os.link(checkpoint / name, temporary / name)
        except OSError:  # a disk without hard links
            shutil.copyfile(checkpoint / name, temporary / name)
    write_manifest(temporary, StoredManifest(kept, stored.checksums))
    temporary.rename(target)
    sync_folder(target.parent)
