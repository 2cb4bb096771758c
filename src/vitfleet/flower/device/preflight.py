"""What a client's owner chose with options, tried before it connects: otherwise every round would be refused.

It is tried in a process of its own: what it imports, torch above all, would stay in the memory of the process that
keeps the client connected.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vitfleet.errors import DataError, UserError, describe_os_error

REFUSED = 2  # the exit code of the process; the reason is on its standard error


def check_settings(data: Path, device: str, plugins: Sequence[Path]) -> None:
    """Raise an error that names what a client cannot use: a plug-in, its device or its images."""
    settings = json.dumps([str(data), device, [str(path) for path in plugins]])
    tried = subprocess.run(
        [sys.executable, "-m", __name__, settings], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    said = tried.stderr.decode(errors="replace").strip()
    if tried.returncode == REFUSED:
        raise UserError(said.splitlines()[-1])  # before it are warnings of what was imported
    if tried.returncode:
        raise RuntimeError(f"the client's settings could not be tried (code {tried.returncode}): {said}")


def main() -> None:
    """Try the settings that are this process's argument."""
    data, device, plugins = json.loads(sys.argv[1])
    try:
        _try_settings(Path(data), device, [Path(path) for path in plugins])
    except UserError as error:
        _refuse(str(error))
    except OSError as error:
        sentence = describe_os_error(error)
        if sentence is None:
            raise
        _refuse(sentence)


def _refuse(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(REFUSED)


def _try_settings(data: Path, device: str, plugins: Sequence[Path]) -> None:
    from vitfleet.config.plugins import load_plugins
    from vitfleet.data.decode import probe_images
    from vitfleet.data.sources.image_folder import read_image_folder
    from vitfleet.data.sources.tables import has_parquet

    load_plugins(plugins)
    _check_device(device)
    if has_parquet(data):
        return
    if not data.is_dir():
        raise UserError(f"--data {data}: is neither a parquet file nor a folder of images")
    listed = read_image_folder(data).train
    try:
        probe_images(listed)
    except DataError as error:
        raise UserError(f"--data {data}: {error}") from None


def _check_device(name: str) -> None:
    """Check a device without using it: its memory is for the process that trains."""
    import torch

    try:
        kind = "cpu" if name == "auto" else torch.device(name).type
    except RuntimeError:
        raise UserError(f"--device {name}: must be auto, cpu, cuda or, of several GPUs, cuda:1") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: PyTorch finds no NVIDIA GPU on this machine; leave it out, or give cpu")


if __name__ == "__main__":
    main()
