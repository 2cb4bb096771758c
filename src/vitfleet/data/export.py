"""Write what clients hold out: every client's images as files of its own, for devices that have none yet."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from vitfleet.data.client_indices import ClientIndices
from vitfleet.data.images import DataSet, ImageSet


def export_clients(data: DataSet, held: tuple[ClientIndices, ClientIndices], names: list[str], folder: Path) -> None:
    """Write ``<name>/train.parquet`` and ``<name>/test.parquet`` for every client, without loss, in deal order."""
    train, test = held
    for client, name in enumerate(names):
        for split, images, deal in (("train", data.train, train), ("test", data.test, test)):
            target = folder / name / f"{split}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(_table(images, data.classes, deal, client), target)


def _table(images: ImageSet, classes: tuple[str, ...], deal: ClientIndices, client: int) -> pa.Table:
    index = deal.for_client(client)
    pixels = images.images.cpu().numpy()[index]
    labels = images.labels.cpu().numpy()[index]
    return pa.table(
        {
            "image": pa.array([_png(one) for one in pixels], pa.binary()),
            "label": pa.array([classes[label] for label in labels], pa.string()),
        }
    )


def _png(pixels: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    picture = pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)
    Image.fromarray(picture).save(stream, "PNG")
    return stream.getvalue()
