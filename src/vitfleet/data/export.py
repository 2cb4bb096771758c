"""Export the images of each client as files, for devices that have no images yet."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vitfleet.data.client_indices import ClientIndices
from vitfleet.data.decode import encode_png
from vitfleet.data.images import DataSet, ImageSet


def export_clients(
    data: DataSet, assigned: tuple[ClientIndices, ClientIndices], names: list[str], folder: Path
) -> None:
    """Write ``<name>/train.parquet`` and ``<name>/test.parquet`` for every client, without loss.

    Parameters
    ----------
    assigned
        The training and the test images of each client; the files keep their order.
    names
        One folder name per client.
    """
    train, test = assigned
    for client, name in enumerate(names):
        for split, images, indices in (("train", data.train, train), ("test", data.test, test)):
            target = folder / name / f"{split}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(_client_table(images, data.classes, indices, client), target)


def _client_table(images: ImageSet, classes: tuple[str, ...], indices: ClientIndices, client: int) -> pa.Table:
    index = indices.for_client(client)
    pixels = images.images.cpu().numpy()[index]
    labels = images.labels.cpu().numpy()[index]
    return pa.table(
        {
            "image": pa.array([encode_png(image) for image in pixels], pa.binary()),
            "label": pa.array([classes[label] for label in labels], pa.string()),
        }
    )
