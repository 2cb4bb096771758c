"""Folders in a layout of their own: CORe50, MiniImageNet and DomainNet as they are distributed.

*CORe50* (Lomonaco & Maltoni, 2017): ``s1..s11/o1..o50/*.png``, 50 objects in 11 sessions.

*MiniImageNet* in the layouts of few-shot learning, whose splits have different classes (Ravi & Larochelle, 2017):
lists of files (``train.csv``, ``val.csv`` and ``test.csv`` beside a folder ``images``), or a folder of classes for each
split. For classification the classes of all splits are one data set without a test split: a share of each class is held
out, as of every data set without one.

*DomainNet*: ``<domain>/<class>/*``, with the lists ``<domain>_train.txt`` and ``<domain>_test.txt``. A line of a list
is the path of an image and the number of its class. The source of an image is its domain.
"""

from __future__ import annotations

import csv
from pathlib import Path

from vitfleet.data.decode import RawDataset
from vitfleet.data.sources.image_folder import ImageFile, image_files, list_dataset, natural_sort_key, subfolders
from vitfleet.errors import DataError

SESSIONS = tuple(f"s{number}" for number in range(1, 12))
OBJECTS = tuple(f"o{number}" for number in range(1, 51))
TEST_SESSIONS = ("s3", "s7", "s10")  # the benchmark's choice
ARCHIVE_FOLDERS = ("core50_128x128", "core50_350x350", "core50_32x32")
FEW_SHOT_SPLITS = ("train", "val", "test")
FEW_SHOT_IMAGES = "images"
FEW_SHOT_COLUMNS = ("filename", "label")


def read_core50(root: Path) -> RawDataset | None:
    """Read CORe50 with the object as class and the session as source; ``None`` if the layout is another one."""
    root, folders = _core50_folders(root)
    if not folders:
        return None
    images = [
        ImageFile(path, label, session) for (session, label), folder in folders.items() for path in image_files(folder)
    ]
    train = [image for image in images if image.source not in TEST_SESSIONS]
    test = [image for image in images if image.source in TEST_SESSIONS]
    # Frames of one session are nearly the same image: a hold-out of some of them would be no test.
    if not train or not test:
        missing = f"test sessions {', '.join(TEST_SESSIONS)}" if train else "training sessions s1, s2, s4, …"
        raise DataError(f"{root}: CORe50's {missing} are missing")
    return list_dataset(root, train, test, OBJECTS, SESSIONS)


def read_core50_sessions(root: Path) -> RawDataset | None:
    """Read CORe50 with every object of every session as a class of its own, session by session; no test split.

    FedViT's experiments use it so: 11 tasks of 50 classes.
    """
    root, folders = _core50_folders(root)
    classes = {"/".join(names): folder for names, folder in folders.items()}
    images = [ImageFile(path, name) for name, folder in classes.items() for path in image_files(folder)]
    return list_dataset(root, images, class_names=tuple(classes)) if classes else None


def _core50_folders(root: Path) -> tuple[Path, dict[tuple[str, str], Path]]:
    """Return the folder of the sessions, and those of each session and object; none if the layout is another one."""
    for folder in (root, *(root / name for name in ARCHIVE_FOLDERS)):
        if any((folder / session / OBJECTS[0]).is_dir() for session in SESSIONS):
            every = {(session, label): folder / session / label for session in SESSIONS for label in OBJECTS}
            return folder, {names: inner for names, inner in every.items() if inner.is_dir()}
    return root, {}


def read_miniimagenet(root: Path) -> RawDataset | None:
    """Read MiniImageNet with the classes of all splits; ``None`` if the layout is another one."""
    train = FEW_SHOT_SPLITS[0]
    if (root / f"{train}.csv").is_file() and (root / FEW_SHOT_IMAGES).is_dir():
        return list_dataset(root, [image for split in FEW_SHOT_SPLITS for image in _read_csv(root, split)])
    folders = {split: subfolders(root / split) for split in FEW_SHOT_SPLITS if (root / split).is_dir()}
    classes = {split: {folder.name for folder in inside} for split, inside in folders.items()}
    if train not in classes or not any(classes[split] - classes[train] for split in classes):
        return None  # splits with the same classes are those of an ordinary image folder
    inside = [folder for of_split in folders.values() for folder in of_split]
    return list_dataset(root, [ImageFile(path, folder.name) for folder in inside for path in image_files(folder)])


def _read_csv(root: Path, split: str) -> list[ImageFile]:
    file = root / f"{split}.csv"
    if not file.is_file():
        return []
    name, label = FEW_SHOT_COLUMNS
    with file.open(newline="", encoding="utf-8") as rows:
        reader = csv.DictReader(rows)
        if not set(FEW_SHOT_COLUMNS) <= set(reader.fieldnames or ()):
            found = ", ".join(reader.fieldnames or ())
            raise DataError(f"{file}: must have the columns {name} and {label}, found {found}")
        images = [ImageFile(root / FEW_SHOT_IMAGES / row[name], row[label]) for row in reader]
    missing = next((image.path for image in images if not image.path.is_file()), None)
    if missing is not None:
        raise DataError(f"{file} names {missing.name}, which is not in {root / FEW_SHOT_IMAGES}")
    return images


def read_domain_lists(root: Path) -> RawDataset | None:
    """Read the images that lists of domains name; ``None`` if no domain has a folder and lists of both splits."""
    names = (file.name.removesuffix("_train.txt") for file in root.glob("*_train.txt"))
    complete = [name for name in names if (root / name).is_dir() and (root / f"{name}_test.txt").is_file()]
    domains = tuple(sorted(complete, key=natural_sort_key))
    train, test = (
        [image for domain in domains for image in _read_domain(root, domain, split)] for split in ("train", "test")
    )
    return list_dataset(root, train, test, sources=domains) if domains else None


def _read_domain(root: Path, domain: str, split: str) -> list[ImageFile]:
    file = root / f"{domain}_{split}.txt"
    images = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        if not name or not label.isdecimal():
            raise DataError(f"{file}, line {number}: must be a path and the number of a class, not {line.strip()!r}")
        path = root / name
        if not path.is_file():
            raise DataError(f"{file}, line {number}: {path} does not exist")
        images.append(ImageFile(path, path.parent.name, domain))
    return images
