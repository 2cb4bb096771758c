"""Remove what a device never uses from an installation: ``python -m vitfleet.flower.device.trim``.

torch's packages contain headers, a compiler of messages and C++ tests, together a fifth of a device's installation.
Only a program that compiles C++ against torch needs them. For bytecode, install with ``pip install --no-compile``: it
is then written here for the modules that a client imports, and for no others.
"""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

#: Folders of torch, and the files in them that are used: its helper process for memory that processes share.
UNUSED_FOLDERS = {"test": (), "include": (), "share": (), "bin": ("torch_shm_manager",)}
CLIENT_MODULES = ("vitfleet.flower.device.handler", "vitfleet.flower.device.client_app", "vitfleet.cli.fleet")
#: Started for a client. A service may not write bytecode: without it, each start would compile them anew.
CLIENT_COMMANDS = ("flower-supernode", "flwr-clientapp")


def trim_torch(package: Path) -> int:
    """Remove the unused files of an installed torch from the package's folder; return the bytes that were freed."""
    before = size_of(package)
    for name, used in UNUSED_FOLDERS.items():
        folder = package / name
        if not used:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for path in _files(folder):
            if path.name not in used:
                path.unlink()
    return before - size_of(package)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat(follow_symlinks=False).st_size for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def main() -> None:
    """Trim the installation that runs this module, and print its size."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("torch is not installed here")
    freed = trim_torch(Path(torch.origin).parent)
    for module in CLIENT_MODULES:  # writes their bytecode
        import_module(module)
    for command in entry_points(group="console_scripts"):
        if command.name in CLIENT_COMMANDS:
            command.load()
    print(f"removed {freed / 2**20:.0f} MiB; {sys.prefix} now has {size_of(Path(sys.prefix)) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
