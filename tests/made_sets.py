"""Small data sets for tests, as image folders and parquet files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vitfleet.config.schema import DataConfig
from vitfleet.data.sources import hub


@pytest.fixture
def isolated_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the data directory and the hub from a test."""
    monkeypatch.delenv("VITFLEET_DATA", raising=False)
    monkeypatch.setattr(hub, "_why_unreachable", lambda endpoint: f"{endpoint} cannot be reached (a test)")


def encoded_image(grey: int, size: int = 8, mode: str = "RGB", kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (size, size), (grey, grey, grey) if mode == "RGB" else grey).save(stream, kind)
    return stream.getvalue()


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_images(folder: Path, count: int, grey: int = 100) -> None:
    for i in range(count):
        write_file(folder / f"{i:03}.jpg", encoded_image(grey, kind="JPEG"))


def write_parquet(
    path: Path,
    labels: list[int] | list[str],
    names: list[str] | None = None,
    label: str = "label",
    image: str = "image",
    extra: dict[str, list[int] | list[str]] | None = None,
    first_grey: int = 0,
    size: int = 8,
) -> None:
    """Write a parquet file in the hub's format; image i has the grey level ``first_grey + i``."""
    cells = [{"bytes": encoded_image((first_grey + i) % 256, size), "path": None} for i in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {image: pa.array(cells, kind), label: pa.array(labels)}
    columns |= {name: pa.array(values) for name, values in (extra or {}).items()}
    table = pa.table(columns)
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def write_small_cifar10(data: Path) -> None:
    """Write a CIFAR-10 of 50 images to a folder of data sets."""
    for split, count in (("train", 40), ("test", 10)):
        labels = [image % 10 for image in range(count)]
        write_parquet(data / "cifar10" / f"{split}.parquet", labels, [str(label) for label in range(10)], size=32)


def grey_levels(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def unique_values(values: torch.Tensor) -> list[int]:
    return sorted(set(values.flatten().tolist()))


def own_images(path: Path, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"name": "mine", "path": str(path), **keys})
