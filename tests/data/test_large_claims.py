"""Files that claim more than they hold, or expand to more than a machine has: refused before anything is allocated."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from made_sets import encoded_image, own_images, write_file, write_parquet
from vitfleet.data import decode
from vitfleet.data.sources.image_folder import read_image_folder
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import DataError, UserError
from vitfleet.inference.stored_models import load_model_file

pytestmark = pytest.mark.usefixtures("isolated_data")
MIB = 2**20


def test_a_label_is_no_number_of_classes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 2**40])
    with pytest.raises(DataError, match=r"label.* 1099511627776"):
        load_dataset(own_images(tmp_path))


@pytest.mark.parametrize("path", ["../secret.png", "/etc/hostname", "inner/../../secret.png"])
def test_a_path_in_a_table_stays_in_its_folder(path: str, tmp_path: Path) -> None:
    write_file(tmp_path / "secret.png", encoded_image(10))
    folder = tmp_path / "data"
    folder.mkdir()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = pa.array([{"bytes": None, "path": path}] * 4, kind)
    pq.write_table(pa.table({"image": cells, "label": pa.array([0, 1, 0, 1])}), folder / "train.parquet")
    with pytest.raises(DataError, match="outside"):
        load_dataset(own_images(folder))


def test_a_small_file_that_becomes_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.data.sources.tables.memory_budget", lambda: 64 * MIB)
    rows = 20_000_000
    table = pa.table({"image": pa.array([b""] * 1).take(pa.array([0] * 1)), "label": pa.array([0])})
    repeated = pa.table(
        {
            "image": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([b"x"])),
            "label": pa.array([0] * rows, pa.int8()),
        }
    )
    del table
    file = tmp_path / "train.parquet"
    pq.write_table(repeated, file, compression="zstd")
    del repeated
    assert file.stat().st_size < MIB
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="rows"):
        load_dataset(own_images(tmp_path))
    assert pa.total_allocated_bytes() - before < 64 * MIB


def blank_png(side: int) -> bytes:
    """Return a black image of so many pixels per side in a file that is a thousandth of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    head = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    packer, row = zlib.compressobj(9), bytes(1 + 3 * side)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def test_an_image_with_too_many_pixels_is_unreadable_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 10**6)
    assert decode.decode_image(blank_png(900), 8, 3).shape == (3, 8, 8)
    tracemalloc.start()
    with pytest.raises(decode.UNREADABLE):
        decode.decode_image(blank_png(1100), 8, 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB


def test_the_most_pixels_fit_in_a_small_machine() -> None:
    assert decode.MAX_PIXELS * 12 <= 2**30


def test_a_model_file_that_claims_a_huge_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.inference.stored_models.Classifier", lambda *_: pytest.fail("it is built"))
    info = {
        "model": {"name": "vit", "dim": 4096, "depth": 64, "heads": 64, "patch_size": 4},
        "method": {"name": "fedavg"},
        "data": {"name": "x", "classes": ["a", "b"], "channels": 3, "image_size": 32},
        "rounds": 1,
        "input_size": 32,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "client": None,
        "averaged_clients": 0,
        "class_to_task": None,
    }
    path = tmp_path / "model.safetensors"
    save_file({"head.weight": torch.zeros(2, 4)}, path, {"vitfleet": json.dumps(info)})
    with pytest.raises(UserError, match="does not hold the model that it describes"):
        load_model_file(path)


ESCAPE = "cat\x1b]0;owned\x07"


def test_names_of_classes_have_no_control_characters(tmp_path: Path) -> None:
    for name in (ESCAPE, "dog"):
        for number in range(3):
            write_file(tmp_path / "folders" / name / f"{number}.png", encoded_image(number))
    with pytest.raises(DataError, match="control characters") as refused:
        read_image_folder(tmp_path / "folders")
    assert "\x1b" not in str(refused.value)
    write_parquet(tmp_path / "tables" / "train.parquet", [0, 1, 0, 1], [ESCAPE, "dog"])
    with pytest.raises(DataError, match="control characters"):
        load_dataset(own_images(tmp_path / "tables"))
    write_parquet(tmp_path / "texts" / "train.parquet", [ESCAPE, "dog"] * 3)
    with pytest.raises(DataError, match="control characters"):
        load_dataset(own_images(tmp_path / "texts"))
