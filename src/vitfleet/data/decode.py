"""Encoded images, and how they are decoded to uint8 tensors. Unreadable ones are counted, named and skipped."""

from __future__ import annotations

import io
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.subsets import draw_holdout, draw_subset, training_and_test_limit
from vitfleet.errors import DataError, printable
from vitfleet.progress import NO_PROGRESS, Progress

log = logging.getLogger(__name__)

MAX_STORED_SIZE = 256  # largest height and width at which images are stored
PROBE_COUNT = 256  # images that are opened to find the most common size
CHUNK_IMAGES = 512  # images decoded per work item of a thread
# An image with more pixels is unreadable: decoded it takes up to twelve bytes a pixel, however small its file is. Of a
# JPEG file with more a fraction of its size is decoded.
MAX_PIXELS = 2**25
# Exceptions that Pillow raises for damaged files; for a broken PNG it raises a SyntaxError.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
GREYSCALE_MODES = frozenset(("1", "L", "I", "F"))


@dataclass(frozen=True)
class EncodedSplit:
    """The encoded images of one split."""

    items: Sequence[bytes | Path]  # for each image its encoded bytes or the path of its file
    names: Sequence[str]  # of each image in error messages
    labels: NDArray[np.int64]
    sources: NDArray[np.int64] | None = None  # the origin of each image as a number; `None`: unknown

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices: NDArray[np.int64]) -> EncodedSplit:
        """Return the images at these indices."""
        return EncodedSplit(
            [self.items[i] for i in indices],
            [self.names[i] for i in indices],
            self.labels[indices],
            None if self.sources is None else self.sources[indices],
        )


@dataclass(frozen=True)
class RawDataset:
    """A data set before decoding; both splits number classes and sources alike."""

    classes: tuple[str, ...]
    train: EncodedSplit
    test: EncodedSplit | None

    def __post_init__(self) -> None:
        """Refuse names that would act on a terminal: names of folders and of classes are another's choice."""
        if unprintable := [name for name in self.classes if not name.isprintable()]:
            raise DataError(f"the class {printable(unprintable[0])!r} has control characters in its name; rename it")


@dataclass(frozen=True)
class DecodeOptions:
    """How a data set is decoded."""

    channels: int | None = 3  # 3 for colour, 1 for greyscale; `None`: 1 if the images are greyscale
    test_share: float = 0.2  # of every class, held out if there is no test split
    max_corrupt: float = 0.01  # share of unreadable images that is tolerated
    limit: int | None = None  # training images to use, and a fifth of it for testing; `None`: all
    test_only: bool = False  # nothing is trained with the data: without a test split, all images are test images


def decode_dataset(name: str, raw: RawDataset, options: DecodeOptions, progress: Progress = NO_PROGRESS) -> DataSet:
    """Decode both splits to images of one size; hold out test images if there is no test split."""
    if options.test_only and raw.test is None:
        raw = replace(raw, test=raw.train)
    train, test = split_off_test(raw, options.test_share)
    if not len(train) or not len(test):
        raise DataError(f"{name}: {len(train)} training and {len(test)} test images are too few")
    if options.limit is not None:
        train_limit, test_limit = training_and_test_limit(options.limit, len(raw.classes))
        train = train.take(draw_subset(train.labels, train_limit))
        test = test.take(draw_subset(test.labels, test_limit))
    try:
        probe = probe_images(train)
    except DataError as error:
        raise DataError(f"{name} (train): {error}") from error
    channels = options.channels or probe.channels
    limit = options.max_corrupt
    train_images, skipped_train = decode_split(train, probe.size, channels, limit, f"{name} (train)", progress)
    if test is train:
        test_images, skipped_test = train_images, list[str]()
    else:
        test_images, skipped_test = decode_split(test, probe.size, channels, limit, f"{name} (test)", progress)
    if len(raw.classes) == 1:
        log.warning("%s: all images are of one class, %s: there is nothing to learn", name, raw.classes[0])
    counts = np.bincount(train_images.labels.numpy(), minlength=len(raw.classes))
    if not counts.all():
        empty = [raw.classes[i] for i in np.flatnonzero(counts == 0).tolist()]
        log.warning("%s: %d classes have no training image: %s", name, len(empty), _shorten(empty, 5))
    return DataSet(name, raw.classes, train_images, test_images, (*skipped_train, *skipped_test))


def split_off_test(raw: RawDataset, test_share: float) -> tuple[EncodedSplit, EncodedSplit]:
    """Return the training and the test split; without a test split, hold out a share of every class."""
    if raw.test is not None:
        return raw.train, raw.test
    held_out = draw_holdout(raw.train.labels, test_share)
    return raw.train.take(np.flatnonzero(~held_out)), raw.train.take(np.flatnonzero(held_out))


@dataclass(frozen=True)
class Probe:
    """What a sample of the images has in common: the most common shorter side, and the number of channels."""

    size: int
    channels: int


def probe_images(split: EncodedSplit, max_size: int = MAX_STORED_SIZE) -> Probe:
    """Open a sample of the images and return their most common shorter side, at most ``max_size``, and channels."""
    sizes: Counter[int] = Counter()
    modes: set[str] = set()
    # Spread over the whole split: images in folders are sorted by class or source, which may differ in size.
    items = split.items[:: -(-len(split) // PROBE_COUNT) or 1]
    for item in items:
        try:
            with Image.open(_as_file(item)) as image:
                sizes[min(image.size)] += 1
                modes.add(image.mode.split(";")[0])
        except UNREADABLE:
            continue  # decode_split counts and names it
    if not sizes:
        raise DataError(f"none of {len(items)} images opened, of {len(split)}, can be read")
    return Probe(min(sizes.most_common(1)[0][0], max_size), 1 if modes <= GREYSCALE_MODES else 3)


def decode_split(
    split: EncodedSplit,
    image_size: int,
    channels: int,
    max_corrupt: float,
    label: str,
    progress: Progress = NO_PROGRESS,
) -> tuple[ImageSet, list[str]]:
    """Decode a split to one tensor, and return the names of the images that cannot be read and were skipped.

    Images of another size are cropped to a square at their centre and resized. With a larger share of unreadable ones
    than ``max_corrupt`` it is an error that names the first.
    """
    pixels = np.empty((len(split), channels, image_size, image_size), dtype=np.uint8)
    readable = np.ones(len(split), dtype=bool)

    def decode_chunk(start: int) -> int:
        stop = min(start + CHUNK_IMAGES, len(split))
        for position in range(start, stop):
            try:
                pixels[position] = decode_image(split.items[position], image_size, channels)
            except UNREADABLE:
                readable[position] = False
        return stop - start

    # Pillow releases the interpreter lock while it decodes, so threads run in parallel.
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        progress.task(f"decoding {label}", len(split)) as advance,
    ):
        for count in pool.map(decode_chunk, range(0, len(split), CHUNK_IMAGES)):
            advance(count)

    skipped = [split.names[i] for i in np.flatnonzero(~readable).tolist()]
    if len(skipped) > max_corrupt * len(split):
        raise DataError(
            f"{label}: {len(skipped)} of {len(split)} images cannot be read ({_shorten(skipped, 3)}); "
            f"repair or remove them, or raise data.max_corrupt = {max_corrupt}"
        )
    kept = np.flatnonzero(readable)
    images = torch.from_numpy(pixels[kept] if skipped else pixels)
    sources = None if split.sources is None else torch.from_numpy(split.sources[kept])
    return ImageSet(images, torch.from_numpy(split.labels[kept]), sources), skipped


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an image ``[channels, height, width]`` without loss."""
    stream = io.BytesIO()
    Image.fromarray(pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)).save(stream, "PNG")
    return stream.getvalue()


def _as_file(item: bytes | Path) -> io.BytesIO | Path:
    return io.BytesIO(item) if isinstance(item, bytes) else item


def decode_image(item: bytes | Path, image_size: int, channels: int) -> NDArray[np.uint8]:
    """Decode one image to ``[channels, image_size, image_size]``; damaged ones raise one of ``UNREADABLE``."""
    with Image.open(_as_file(item)) as image:
        return fit_image(image, image_size, channels)


def _check_pixels(image: Image.Image) -> None:
    """Refuse an image that would take too much memory, before its pixels are decoded."""
    if image.width * image.height > MAX_PIXELS and isinstance(image, JpegImageFile):
        image.draft(None, (image.width // 8, image.height // 8))
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError(
            f"{image.width} x {image.height} pixels are too many; at most {MAX_PIXELS:,} are decoded"
        )


def fit_image(image: Image.Image, image_size: int, channels: int) -> NDArray[np.uint8]:
    """Return an image as it is stored: cropped to a square at its centre, resized, in colour or grey."""
    _check_pixels(image)
    # Pillow would clip 16-bit greys to white instead of scaling them.
    is_16_bit = image.mode.startswith("I")
    eight_bit = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)) if is_16_bit else image
    converted: Image.Image = eight_bit.convert("RGB" if channels == 3 else "L")
    if converted.size != (image_size, image_size):
        width, height = converted.size
        edge = min(width, height)
        left, top = (width - edge) // 2, (height - edge) // 2
        box = (left, top, left + edge, top + edge)
        converted = converted.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(converted).reshape(image_size, image_size, channels).transpose(2, 0, 1)


def _shorten(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")
