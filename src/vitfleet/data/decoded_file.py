"""Decoded images in a file, which is read in a fraction of the time that decoding takes."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitfleet.data.images import DataSet, ImageSet
from vitfleet.message import State
from vitfleet.wire import encoded_size, write_payload


def write_decoded(data: DataSet, file: Path, max_bytes: int) -> bool:
    """Write both splits of a data set if the file has at most ``max_bytes``; return whether it was written."""
    tensors: dict[str, Tensor] = {}
    for name, split in (("train", data.train), ("test", data.test)):
        tensors |= {f"{name}.images": split.images, f"{name}.labels": split.labels}
        if split.sources is not None:
            tensors[f"{name}.sources"] = split.sources
    if encoded_size(State(tensors)) > max_bytes:
        return False
    write_payload(file, State(tensors))
    return True


def read_decoded(file: Path) -> tuple[ImageSet, ImageSet] | None:
    """Return the training and the test images of a file; ``None`` if there is no file or if it is damaged."""
    try:
        tensors = load_file(file)
        train, test = (
            ImageSet(tensors[f"{name}.images"], tensors[f"{name}.labels"], tensors.get(f"{name}.sources"))
            for name in ("train", "test")
        )
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
    return train, test
