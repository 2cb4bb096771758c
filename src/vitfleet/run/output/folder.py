"""The folder of a run: creating it, locking it, and what it says about the run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from vitfleet.config.load import read_config
from vitfleet.config.plugins import UsedComponent, check_unchanged, used_components
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import (
    ABOUT_FILE,
    CHECKPOINT_FILE,
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    PLUGINS_FILE,
    RECORDS_FILE,
    SUMMARY_FILE,
    make_folder,
    read_json,
    refuse_links,
    write_atomically,
)
from vitfleet.run.checkpoints.manifest import KEPT_FOLDER, PREVIOUS

# What a run may have written when its first round has not ended.
_BEFORE_FIRST_ROUND = re.compile(
    r"\.lock|identity|base\.safetensors|timings\.jsonl|records\.jsonl|fleet\.log|error\.txt|tensorboard|checkpoint|patches\.png|"
    r"\.?(about|config|plugins|machine|data|devices|progress)\.json(\.tmp)?|"
    r"\.?(partition|tasks)\.(json|safetensors|png)(\.tmp)?"
)
# What may change when a run is resumed; all else decides what its rounds compute.
_MAY_CHANGE = (
    *("rounds", "title", "machine", "trackers", "plugins", "data.dir", "data.path"),
    *("fleet.join_s", "fleet.rejoin_s", "fleet.deadline_s"),
)
_PACKAGES = ("vitfleet", "torch", "torchvision", "timm", "numpy", "safetensors")


class RunFolder:
    """A run's folder, locked by one process at a time.

    ``lock_seconds`` is how long to wait for the lock: a process whose server was killed needs time to end.
    """

    def __init__(self, path: Path, lock_seconds: float = 0.0) -> None:
        self.path = path
        self._lock: IO[str] = (path / ".lock").open("w")
        end = time.monotonic() + lock_seconds
        while True:
            try:
                # The system releases the lock when the process ends, however it ends.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(f"{path}: another process is running this run") from None
            time.sleep(0.2)

    def config(self) -> Config:
        """Return the run's resolved configuration."""
        return read_run_config(self.path)

    def release(self) -> None:
        """Release the lock."""
        self._lock.close()

    def discard(self) -> None:
        """Remove the folder of a run that never started, so that its name is free again."""
        shutil.rmtree(self.path)


def create_run_folder(config: Config, out: Path | None, name: str, argv: Sequence[str]) -> RunFolder:
    """Create a new run's folder with its configuration, and lock it.

    Without ``out`` it is the next free ``runs/<name>-<method>-NNN``. ``argv`` is the command that started the run.
    """
    path = out or next_free_folder(Path("runs"), f"{name}-{config.method.name}")
    if (path / CONFIG_FILE).exists() and has_begun(path):
        raise UserError(f"{path} already holds a run: `vitfleet resume {path}` resumes it, or choose another --out")
    entries = sorted(path.iterdir()) if path.is_dir() else []
    if foreign := [entry.name for entry in entries if not _BEFORE_FIRST_ROUND.fullmatch(entry.name)]:
        raise UserError(f"--out {path}: is not empty ({foreign[0]} is in it); choose another --out")
    folder = RunFolder(make_folder(path))
    for entry in entries:  # of a run that never began
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != ".lock":
            entry.unlink()
    text = config.model_dump_json(indent=2)
    about = {**_about(argv), "config": _digests(json.loads(text))}
    write_atomically(path / ABOUT_FILE, json.dumps(about, indent=2).encode())
    used = [asdict(component) for component in used_components(config)]
    if used:
        write_atomically(path / PLUGINS_FILE, json.dumps(used, indent=2).encode())
    # Last: a folder with a configuration in it can be resumed.
    write_atomically(path / CONFIG_FILE, text.encode())
    return folder


def has_begun(path: Path) -> bool:
    """Whether a run has ended a round."""
    records = path / RECORDS_FILE
    return (path / CHECKPOINT_FILE).exists() or (records.exists() and records.stat().st_size > 0)


def _digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each table of a configuration, and of each key outside of them, by its name."""
    tables = {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    for key in _MAY_CHANGE:
        table, _, leaf = key.rpartition(".")
        (tables[table] if table else tables).pop(leaf, None)
    texts = {name: json.dumps(value, sort_keys=True) for name, value in tables.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _about(argv: Sequence[str]) -> dict[str, object]:
    return {
        "command": shlex.join(argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: _version(package) for package in _PACKAGES},
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "processor": processor_name(),
    }


def open_run_folder(path: Path, lock_seconds: float = 0.0) -> RunFolder:
    """Lock the folder of a run to resume it."""
    if not (path / CONFIG_FILE).is_file():
        raise UserError(f"{path}: holds no run (there is no {CONFIG_FILE} in it)")
    _check_unchanged(path)
    checkpoint = path / CHECKPOINT_FOLDER
    refuse_links(checkpoint, checkpoint / PREVIOUS, path / KEPT_FOLDER, *sorted(path.iterdir()))
    return RunFolder(path, lock_seconds)


def _check_unchanged(path: Path) -> None:
    """Raise an error if the configuration of a run was changed by hand: its records would belong to two of them."""
    about = path / ABOUT_FILE
    written = read_json(about) if about.exists() else {}
    recorded = written.get("config", {}) if isinstance(written, dict) else None
    if not isinstance(recorded, dict):
        raise UserError(f"{about}: is damaged; restore it from a copy")
    config = read_json(path / CONFIG_FILE)
    if not recorded or not isinstance(config, dict):  # what is no configuration is refused where it is read
        return
    found = _digests(config)
    if changed := sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)):
        raise UserError(
            f"{path / CONFIG_FILE}: was changed after the run began ({', '.join(changed)}); undo that, or start "
            f"another with `vitfleet run {path / CONFIG_FILE}`"
        )


def add_rounds(folder: RunFolder, rounds: int) -> None:
    """Give a run more rounds, finished or not; the next resume runs them.

    The learning rate of the rounds to come follows the schedule of a run with this number of rounds.
    """
    config, summary = folder.config(), folder.path / SUMMARY_FILE
    if config.data.tasks is not None:
        raise UserError(f"--rounds {rounds}: a run on tasks has as many rounds as its tasks; start one with more tasks")
    if rounds <= config.rounds:
        raise UserError(f"--rounds {rounds}: must be more than the run's {config.rounds}")
    stopped = read_json(summary).get("stopped") if summary.exists() else None
    if stopped:
        raise UserError(
            f"--rounds {rounds}: the run was stopped after round {stopped['round']} ({stopped['reason']}); "
            "start a new one without that callback"
        )
    tree = {**read_json(folder.path / CONFIG_FILE), "rounds": rounds}
    write_atomically(folder.path / CONFIG_FILE, json.dumps(tree, indent=2, ensure_ascii=False).encode())
    summary.unlink(missing_ok=True)


def read_run_config(path: Path) -> Config:
    """Read a run's resolved configuration, and check that its plug-ins are the ones it began with."""
    config, file = read_config(path / CONFIG_FILE), path / PLUGINS_FILE
    if file.exists():
        try:
            recorded = [UsedComponent(**component) for component in read_json(file)]
        except TypeError:
            raise UserError(f"{file}: is damaged; restore it from a copy") from None
        check_unchanged(config, recorded, str(path))
    return config


def next_free_folder(parent: Path, stem: str) -> Path:
    """Return the first of ``<stem>-001``, ``<stem>-002``, … after the last that exists."""
    numbers = [
        int(match[1])
        for entry in (parent.iterdir() if parent.is_dir() else [])
        if (match := re.fullmatch(rf"{re.escape(stem)}-(\d+)", entry.name))
    ]
    return parent / f"{stem}-{max(numbers, default=0) + 1:03d}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor_name() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def run_id(folder: Path) -> str:
    """Return the unique identifier of a run, under which remote clients store their states. A resume keeps it."""
    path = folder / "identity"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    return path.read_text()
