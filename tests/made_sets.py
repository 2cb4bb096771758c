"""Sets of images made by hand, as folders and as parquet files."""

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
from vitfleet.data import parquet


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds data, or waits for a hub, by accident."""
    monkeypatch.delenv("VITFLEET_DATA", raising=False)
    monkeypatch.setattr(parquet, "_why_unreachable", lambda endpoint: f"{endpoint} cannot be reached (a test)")


def picture(shade: int, side: int = 8, mode: str = "RGB", kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (side, side), (shade, shade, shade) if mode == "RGB" else shade).save(stream, kind)
    return stream.getvalue()


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def fill(folder: Path, count: int, shade: int = 100) -> None:
    for i in range(count):
        put(folder / f"{i:03}.jpg", picture(shade, kind="JPEG"))


def write_parquet(
    path: Path,
    labels: list[int] | list[str],
    names: list[str] | None = None,
    label: str = "label",
    image: str = "image",
    extra: dict[str, list[int] | list[str]] | None = None,
    first_shade: int = 0,
) -> None:
    """Write a file as the hub would; image i has shade ``first_shade + i``."""
    shots = [{"bytes": picture((first_shade + i) % 256), "path": None} for i in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {image: pa.array(shots, kind), label: pa.array(labels)}
    columns |= {name: pa.array(values) for name, values in (extra or {}).items()}
    table = pa.table(columns)
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def shades(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def distinct(values: torch.Tensor) -> list[int]:
    return sorted(set(values.flatten().tolist()))


def own(path: Path, **more: object) -> DataConfig:
    return DataConfig.model_validate({"name": "mine", "path": str(path), **more})
