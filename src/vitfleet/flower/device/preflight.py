"""What a client's owner chose with options, tried before it connects: otherwise every round would be refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vitfleet.config.plugins import load_plugins
from vitfleet.data.sources.image_folder import read_image_folder
from vitfleet.data.sources.tables import has_parquet
from vitfleet.errors import UserError


def check_settings(data: Path, device: str, plugins: Sequence[Path]) -> None:
    """Raise an error that names what a client cannot use: a plug-in, its device or its images."""
    load_plugins(plugins)
    _check_device(device)
    if not has_parquet(data):
        read_image_folder(data)


def _check_device(name: str) -> None:
    """Check a device without using it: its memory is for the process that trains."""
    try:
        kind = "cpu" if name == "auto" else torch.device(name).type
    except RuntimeError:
        raise UserError(f"--device {name}: must be auto, cpu, cuda or, of several GPUs, cuda:1") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: PyTorch finds no NVIDIA GPU on this machine; leave it out, or give cpu")
