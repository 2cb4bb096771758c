"""Export the images of each client as files, for devices that have no images yet."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from vitfleet.data.decode import encode_png
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.partitions.client_indices import ClientIndices
from vitfleet.errors import UserError

#: ``folders``: PNG files in one folder per class, which a device reads without pyarrow. ``parquet``: one file per split
#: that keeps the images' order, so that a fleet computes the same bits as a simulation.
ExportFormat: TypeAlias = Literal["folders", "parquet"]


def export_clients(
    data: DataSet,
    assigned: tuple[ClientIndices, ClientIndices],
    names: list[str],
    folder: Path,
    form: ExportFormat = "parquet",
) -> None:
    """Write ``<name>/train`` and ``<name>/test`` for every client, without loss.

    Parquet files keep the order of the assigned images. A client's folder must not exist yet: images would be mixed.
    """
    write = _write_parquet if form == "parquet" else _write_folders
    if form == "folders":
        _check_folders([folder / name for name in names], data.classes)
    elif find_spec("pyarrow") is None:
        raise UserError("--to parquet: needs pyarrow, which is not installed: pip install 'vitfleet[parquet]'")
    train, test = assigned
    for client, name in enumerate(names):
        for split, images, indices in (("train", data.train, train), ("test", data.test, test)):
            write(images.take(torch.from_numpy(indices.for_client(client))), data.classes, folder / name / split)


def _check_folders(folders: list[Path], class_names: tuple[str, ...]) -> None:
    if existing := [folder for folder in folders if folder.exists()]:
        raise UserError(f"{existing[0]}: exists already; remove it, or name another folder with --out")
    if unusable := [name for name in class_names if name != Path(name).name or name.startswith(".")]:
        raise UserError(f"the class {unusable[0]!r} cannot be a folder's name; use --to parquet")


def _write_folders(images: ImageSet, class_names: tuple[str, ...], target: Path) -> None:
    """Write ``<target>/<class>/<number>.png``; a folder without images says that the client has none of a split."""
    target.mkdir(parents=True)
    for number, (pixels, label) in enumerate(zip(images.images.cpu().numpy(), images.labels.tolist(), strict=True)):
        file = target / class_names[label] / f"{number:06}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encode_png(pixels))


def _write_parquet(images: ImageSet, class_names: tuple[str, ...], target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoded = pa.array([encode_png(image) for image in images.images.cpu().numpy()], pa.binary())
    names = pa.array([class_names[label] for label in images.labels.tolist()], pa.string())
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": encoded, "label": names}), target.with_name(f"{target.name}.parquet"))
