"""``base.safetensors``: what every client received once. With it a run's models are complete in its folder."""

from __future__ import annotations

from pathlib import Path

from vitfleet.errors import UserError
from vitfleet.message import Message
from vitfleet.wire import read_payload, write_payload

BASE_FILE = "base.safetensors"


def write_base(base: Message, folder: Path) -> None:
    """Write the base message of a run into its folder, once: it never changes."""
    path = folder / BASE_FILE
    if not path.exists():
        write_payload(path, base)


def read_base(folder: Path) -> Message:
    """Read the base message of a run."""
    path = folder / BASE_FILE
    if not path.is_file():
        raise UserError(f"{folder}: has no {BASE_FILE}; `vitfleet resume {folder}` writes it, also of a finished run")
    return read_payload(Message, path)
