"""From encoded files to one uint8 tensor; what cannot be read is counted, named and left out."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitfleet.data.images import ImageSet
from vitfleet.errors import DataError
from vitfleet.progress import NO_PROGRESS, Progress

LARGEST_SIDE = 256  # images are stored at most this large
SIZE_PROBE = 256  # how many images are opened to learn the set's usual size
CHUNK = 512
# What Pillow raises on damaged files of one format or another; a broken PNG is a SyntaxError to it.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Encoded:
    """A split as it lies on disk or on the hub.

    Attributes
    ----------
    items
        Encoded bytes or the path of a file, one an image.
    names
        What to call each image when it cannot be read.
    """

    items: Sequence[bytes | Path]
    names: Sequence[str]
    labels: NDArray[np.int64]
    sources: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def take(self, index: NDArray[np.int64]) -> Encoded:
        """Return the images at these positions."""
        return Encoded(
            [self.items[i] for i in index],
            [self.names[i] for i in index],
            self.labels[index],
            None if self.sources is None else self.sources[index],
        )


def usual_side(split: Encoded, limit: int = LARGEST_SIDE) -> int:
    """Return the most common shorter side, at most ``limit``; only a sample of the images is opened."""
    sides: Counter[int] = Counter()
    # Spread over the whole split: a folder's images come sorted by class or source, which may differ in size.
    probe = split.items[:: -(-len(split) // SIZE_PROBE) or 1]
    for item in probe:
        try:
            with Image.open(_stream(item)) as image:
                sides[min(image.size)] += 1
        except UNREADABLE:
            continue  # decode() counts and names it
    if not sides:
        raise DataError(f"none of the {len(probe)} images tried, of {len(split)}, can be read")
    return min(sides.most_common(1)[0][0], limit)


def decode(
    split: Encoded,
    side: int,
    channels: int,
    max_corrupt: float,
    label: str,
    progress: Progress = NO_PROGRESS,
) -> tuple[ImageSet, list[str]]:
    """Decode a split to one tensor.

    Parameters
    ----------
    side
        Pixels a side to store; an image of another size is centre-cropped to a square and resized.
    max_corrupt
        Share of unreadable images that is tolerated; more is an error that names the first ones.
    label
        What progress and errors call the split.

    Returns
    -------
    The images, and the names of those left out.
    """
    pixels = np.empty((len(split), channels, side, side), dtype=np.uint8)
    readable = np.ones(len(split), dtype=bool)

    def decode_chunk(start: int) -> int:
        stop = min(start + CHUNK, len(split))
        for position in range(start, stop):
            try:
                pixels[position] = _decode_one(split.items[position], side, channels)
            except UNREADABLE:
                readable[position] = False
        return stop - start

    # Pillow releases the interpreter lock while it decodes, so threads do help.
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        progress.task(f"decoding {label}", len(split)) as advance,
    ):
        for done in pool.map(decode_chunk, range(0, len(split), CHUNK)):
            advance(done)

    skipped = [split.names[i] for i in np.flatnonzero(~readable).tolist()]
    if len(skipped) > max_corrupt * len(split):
        shown = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
        raise DataError(
            f"{label}: {len(skipped)} of {len(split)} images cannot be read ({shown}); "
            f"mend or remove them, or raise data.max_corrupt = {max_corrupt}"
        )
    kept = np.flatnonzero(readable)
    images = torch.from_numpy(pixels[kept] if skipped else pixels)
    sources = None if split.sources is None else torch.from_numpy(split.sources[kept])
    return ImageSet(images, torch.from_numpy(split.labels[kept]), sources), skipped


def _stream(item: bytes | Path) -> io.BytesIO | Path:
    return io.BytesIO(item) if isinstance(item, bytes) else item


def _decode_one(item: bytes | Path, side: int, channels: int) -> NDArray[np.uint8]:
    with Image.open(_stream(item)) as image:
        # Pillow would clip 16-bit greys to white instead of scaling them.
        deep = image.mode.startswith("I")
        eight_bit = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)) if deep else image
        picture: Image.Image = eight_bit.convert("RGB" if channels == 3 else "L")
    if picture.size != (side, side):
        width, height = picture.size
        edge = min(width, height)
        left, top = (width - edge) // 2, (height - edge) // 2
        box = (left, top, left + edge, top + edge)
        picture = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
    return np.asarray(picture).reshape(side, side, channels).transpose(2, 0, 1)
