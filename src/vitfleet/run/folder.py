"""The folder of a run: what lies where, and who may write to it."""

from __future__ import annotations

import fcntl
import json
import platform
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from vitfleet.config.load import read_config
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import write_atomically

# What a run that was killed before it was one may have left in its folder.
_BEFORE_CONFIG = {".lock", "about.json", ".about.json.tmp", ".config.json.tmp"}
_PACKAGES = ("vitfleet", "torch", "torchvision", "timm", "numpy", "safetensors")


class RunFolder:
    """A run's folder, held by one process at a time.

    Parameters
    ----------
    patience
        Seconds to wait for another process to let go of it: one whose server was killed takes some to notice.
    """

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        self.path = path
        self._lock: IO[str] = (path / ".lock").open("w")
        end = time.monotonic() + patience
        while not self._hold():
            if time.monotonic() >= end:
                raise UserError(f"{path}: another process is running this run right now")
            time.sleep(0.2)

    def _hold(self) -> bool:
        try:
            # Released by the system when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def config(self) -> Config:
        """Return the run's resolved configuration."""
        return read_config(self.path / "config.json")

    def release(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def discard(self) -> None:
        """Take back a folder that was made for a run which never got under way, so that its name is free again."""
        shutil.rmtree(self.path)


def create(config: Config, out: Path | None, name: str, argv: Sequence[str]) -> RunFolder:
    """Make a new run's folder and write down what the run is.

    Parameters
    ----------
    out
        Where; ``None`` takes the next free ``runs/<name>-<method>-NNN``.
    argv
        The command that asked for the run.
    """
    path = out or next_free(Path("runs"), f"{name}-{config.method.name}")
    if (path / "config.json").exists():
        raise UserError(
            f"{path} already holds a run: `vitfleet resume {path}` goes on with it, or choose another --out"
        )
    if path.is_dir() and (
        strange := sorted(entry.name for entry in path.iterdir() if entry.name not in _BEFORE_CONFIG)
    ):
        raise UserError(f"--out {path}: is not empty ({strange[0]} is in it); choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be made ({error.strerror})") from None
    folder = RunFolder(path)
    about = {
        "command": shlex.join(argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: _version(package) for package in _PACKAGES},
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "processor": processor(),
    }
    write_atomically(path / "about.json", json.dumps(about, indent=2).encode())
    # Last: a folder with a configuration in it can be resumed.
    write_atomically(path / "config.json", config.model_dump_json(indent=2).encode())
    return folder


def reopen(path: Path, patience: float = 0.0) -> RunFolder:
    """Open a run's folder to go on with it, waiting a while for who has it."""
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: holds no run (there is no config.json in it)")
    return RunFolder(path, patience)


def next_free(parent: Path, stem: str) -> Path:
    """Return the first of ``<stem>-001``, ``<stem>-002``, … after those that are taken."""
    taken = [
        int(match[1])
        for entry in (parent.iterdir() if parent.is_dir() else [])
        if (match := re.fullmatch(rf"{re.escape(stem)}-(\d+)", entry.name))
    ]
    return parent / f"{stem}-{max(taken, default=0) + 1:03d}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def identity(folder: Path) -> str:
    """Return what tells a run from every other one, the same after a restart: devices keep their states under it."""
    path = folder / "identity"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    return path.read_text()
