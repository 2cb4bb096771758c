"""Decoding: sizes, colours, unreadable images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitfleet.data.decode import CHUNK_IMAGES, EncodedSplit, decode_split, probe_images
from vitfleet.errors import DataError
from vitfleet.progress import Advance


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    return encoded(Image.new("RGB", size, colour))


def unique_values(values: torch.Tensor) -> list[int]:
    return sorted(set(values.flatten().tolist()))


def split(items: Sequence[bytes | Path]) -> EncodedSplit:
    return EncodedSplit(items, [f"image {i}" for i in range(len(items))], np.arange(len(items), dtype=np.int64))


def test_decode_split_returns_the_files_pixels_channels_first() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    images, skipped = decode_split(split([encoded(Image.fromarray(pixels))]), 8, 3, 0, "x")
    assert images.images.dtype == torch.uint8
    assert images.images.is_contiguous()
    assert torch.equal(images.images[0], torch.from_numpy(pixels).permute(2, 0, 1))
    assert skipped == []


def test_files_and_bytes_decode_alike(tmp_path: Path) -> None:
    data = plain((10, 20, 30))
    (tmp_path / "a.png").write_bytes(data)
    images, _ = decode_split(split([data, tmp_path / "a.png"]), 8, 3, 0, "x")
    assert torch.equal(images.images[0], images.images[1])


def test_decode_split_converts_between_greyscale_and_rgb() -> None:
    grey = encoded(Image.new("L", (4, 4), 77))
    assert unique_values(decode_split(split([grey]), 4, 3, 0, "x")[0].images) == [77]
    red = decode_split(split([plain((255, 0, 0), (4, 4))]), 4, 1, 0, "x")[0].images
    assert red.shape == (1, 1, 4, 4)
    assert unique_values(red) == [76]  # ITU-R 601 luma of pure red


def test_16_bit_greys_are_scaled_not_clipped() -> None:
    deep = encoded(Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16)))
    assert unique_values(decode_split(split([deep]), 4, 1, 0, "x")[0].images) == [0x80]


def test_other_sizes_are_cropped_at_the_centre_and_resized() -> None:
    wide = Image.new("RGB", (24, 8), (255, 0, 0))
    wide.paste((0, 0, 255), (8, 0, 16, 8))  # the middle third
    images, _ = decode_split(split([encoded(wide), plain((1, 2, 3), (5, 7))]), 8, 3, 0, "x")
    assert images.images[0].amax(dim=(1, 2)).tolist() == [0, 0, 255]
    assert images.images[1].amax(dim=(1, 2)).tolist() == [1, 2, 3]


def test_probe_size_is_the_most_common_shorter_side() -> None:
    sizes = [(8, 8), (12, 9), (9, 15), (9, 9), (30, 30)]
    assert probe_images(split([plain((0, 0, 0), size) for size in sizes])).size == 9
    assert probe_images(split([plain((0, 0, 0), (40, 40))]), max_size=32).size == 32


def test_probe_is_spread_over_the_split() -> None:
    small, large = plain((0, 0, 0), (4, 4)), plain((0, 0, 0), (6, 6))
    assert probe_images(split([small] * 300 + [large] * 700)).size == 6


def test_probe_without_a_readable_image_is_an_error() -> None:
    with pytest.raises(DataError, match="none of 2 images opened"):
        probe_images(split([b"", b"text"]))


@pytest.mark.parametrize(("modes", "channels"), [(["L", "L"], 1), (["L", "RGB"], 3), (["P"], 3), (["I;16", "1"], 1)])
def test_probe_channels_are_1_if_all_images_are_greyscale(modes: list[str], channels: int) -> None:
    assert probe_images(split([encoded(Image.new(mode, (4, 4))) for mode in modes])).channels == channels


def damaged_png() -> bytes:
    """Break the name of a chunk behind the header."""
    data = bytearray(encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8))))
    data[data.index(b"IDAT") : data.index(b"IDAT") + 4] = b"I\x00AT"
    return bytes(data)


@pytest.mark.parametrize(
    "bad",
    [b"", b"not an image", plain((9, 9, 9))[:40], damaged_png(), Path("no/such/file.png")],
    ids=["empty", "text", "cut", "chunk", "absent"],
)
def test_unreadable_images_are_skipped_and_named(bad: bytes | Path) -> None:
    good = plain((5, 5, 5))
    images, skipped = decode_split(split([good, bad, good]), 8, 3, 0.5, "x")
    assert skipped == ["image 1"]
    assert images.labels.tolist() == [0, 2]
    assert unique_values(images.images) == [5]


def test_syntax_error_of_pillow_counts_as_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Image.Image:
        raise SyntaxError("broken PNG file")

    item = plain((5, 5, 5))
    monkeypatch.setattr(Image.Image, "convert", broken)
    _, skipped = decode_split(split([item]), 8, 3, 1.0, "x")
    assert skipped == ["image 0"]


def test_too_many_unreadable_images_are_an_error_with_count_names_and_remedy() -> None:
    items = [plain((5, 5, 5))] * 6 + [b"bad"] * 4
    with pytest.raises(DataError) as caught:
        decode_split(split(items), 8, 3, 0.3, "mine (train)")
    message = str(caught.value)
    assert message.startswith("mine (train): 4 of 10 images cannot be read (image 6, image 7, image 8, …)")
    assert "data.max_corrupt = 0.3" in message
    assert len(decode_split(split(items), 8, 3, 0.4, "x")[1]) == 4  # the limit itself is tolerated


def test_sources_of_skipped_images_are_skipped() -> None:
    good = plain((5, 5, 5))
    part = EncodedSplit([good, b"", good], list("abc"), np.array([0, 1, 2]), np.array([7, 8, 9]))
    images, _ = decode_split(part, 8, 3, 1, "x")
    assert images.sources is not None
    assert images.sources.tolist() == [7, 9]


def test_progress_of_decoding_adds_up() -> None:
    class ProgressRecorder:
        def __init__(self) -> None:
            self.total = 0
            self.done = 0

        @contextmanager
        def task(self, label: str, total: int) -> Iterator[Advance]:
            self.total = total

            def advance(units: int) -> None:
                self.done += units

            yield advance

    recorder = ProgressRecorder()
    count = CHUNK_IMAGES + 3
    images, _ = decode_split(split([plain((1, 1, 1), (2, 2))] * count), 2, 3, 0, "x", recorder)
    assert (recorder.total, recorder.done, len(images)) == (count, count, count)
