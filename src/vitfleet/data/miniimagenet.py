"""MiniImageNet in the layouts of few-shot learning, whose splits have different classes (Ravi & Larochelle, 2017).

They are lists of files (``train.csv``, ``val.csv`` and ``test.csv`` beside a folder ``images``), or a folder of classes
for each split. For classification the classes of all splits are one data set without a test split: a share of each
class is held out, as of every data set without one.
"""

from __future__ import annotations

import csv
from pathlib import Path

from vitfleet.data.decode import RawDataset
from vitfleet.data.sources.image_folder import ImageFile, encode_labels, image_files, subfolders
from vitfleet.errors import DataError

SPLITS = ("train", "val", "test")
IMAGE_FOLDER = "images"
COLUMNS = ("filename", "label")


def read_miniimagenet(root: Path) -> RawDataset | None:
    """Read MiniImageNet with the classes of all splits; ``None`` if the layout is another one.

    Raises
    ------
    DataError
        If a list has other columns, or names a file that is not there.
    """
    if (root / f"{SPLITS[0]}.csv").is_file() and (root / IMAGE_FOLDER).is_dir():
        return _as_dataset([image for split in SPLITS for image in _read_list(root, split)], root)
    folders = {split: root / split for split in SPLITS if (root / split).is_dir()}
    classes = {split: {folder.name for folder in subfolders(path)} for split, path in folders.items()}
    if SPLITS[0] not in classes or not any(classes[split] - classes[SPLITS[0]] for split in classes):
        return None  # splits with the same classes are those of an ordinary image folder
    images = [
        ImageFile(path, folder.name)
        for split in folders.values()
        for folder in subfolders(split)
        for path in image_files(folder)
    ]
    return _as_dataset(images, root)


def _read_list(root: Path, split: str) -> list[ImageFile]:
    file = root / f"{split}.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as rows:
        reader = csv.DictReader(rows)
        if not set(COLUMNS) <= set(reader.fieldnames or ()):
            found = ", ".join(reader.fieldnames or ())
            raise DataError(f"{file}: must have the columns {' and '.join(COLUMNS)}, found {found}")
        images = [ImageFile(root / IMAGE_FOLDER / row[COLUMNS[0]], row[COLUMNS[1]]) for row in reader]
    missing = next((image.path for image in images if not image.path.is_file()), None)
    if missing is not None:
        raise DataError(f"{file} names {missing.name}, which is not in {root / IMAGE_FOLDER}")
    return images


def _as_dataset(images: list[ImageFile], root: Path) -> RawDataset:
    classes = tuple(sorted({image.class_name for image in images}))
    return RawDataset(classes, encode_labels(images, classes, (), root), None)
