"""Read image folders in the usual layouts. Images are listed, not decoded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitfleet.data.decode import EncodedSplit, RawDataset
from vitfleet.errors import DataError

TRAIN_SPLIT = "train"
TEST_SPLITS = ("test", "valid", "validation", "val")  # in the order in which they are tried
#: The one list of what counts as an image, in training, evaluation and prediction. It does not depend on the installed
#: version of Pillow: an image that this version cannot decode is unreadable, and is named, instead of being left out.
IMAGE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".webp", ".avif", ".bmp", ".dib", ".tif", ".tiff"),
        *(".jp2", ".j2k", ".jpf", ".jpx", ".pbm", ".pgm", ".pnm", ".ppm", ".tga", ".ico", ".psd", ".pcx", ".qoi"),
        *(".dds", ".fits", ".sgi", ".xbm"),
    )
)


@dataclass(frozen=True)
class ImageFile:
    """An image file with the class and the source that its folders are named after."""

    path: Path
    class_name: str
    source: str = ""  # empty: unknown


def read_image_folder(root: Path) -> RawDataset:
    """Read ``root/<class>/*``, ``root/<source>/<class>/*``, or either of them in ``root/train`` and ``root/test``."""
    root = _enter_wrapper_folders(root)
    test_folders = [root / name for name in TEST_SPLITS if (root / name).is_dir()]
    has_splits = (root / TRAIN_SPLIT).is_dir()
    if not has_splits and any(subfolders(folder) and not image_files(folder) for folder in test_folders):
        raise DataError(f"{root} has a folder '{test_folders[0].name}' but no folder '{TRAIN_SPLIT}' beside it")
    train_root = root / TRAIN_SPLIT if has_splits else root
    test_root = test_folders[0] if has_splits and test_folders else None

    by_source = _has_source_level(train_root)
    folders = _class_folders(train_root, by_source)
    classes = tuple(sorted({folder.name for folder, _ in folders}))
    train = _list_images(folders)
    if not train:
        raise DataError(
            f"{root} holds neither parquet files nor images: expected root/<class>/*.jpg, "
            f"root/train/<class>/*.jpg, root/<source>/<class>/*.jpg or root/train/<source>/<class>/*.jpg"
        )
    if by_source and len(classes) == 1:
        raise DataError(
            f"{train_root}: every folder holds the one folder '{classes[0]}', which would be read as "
            f"<source>/<class> with a single class; move the images up, to <class>/*"
        )
    test = None if test_root is None else _list_images(_class_folders(test_root, by_source))
    if test is not None and not test and any(path.is_file() for path in test_folders[0].rglob("*")):
        raise DataError(f"{test_root} holds no images in the layout of {train_root}")
    unknown = sorted({image.class_name for image in test or ()} - set(classes))
    if unknown:
        raise DataError(f"{test_root}: not in the training split: class {', '.join(unknown)}")
    # Sources are numbered over both splits, with client 9 before client 10.
    sources = {image.source for image in train + (test or []) if image.source}
    sorted_sources = tuple(sorted(sources, key=natural_sort_key))
    return list_dataset(root, train, test, classes, sorted_sources)


def find_test_folder(root: Path) -> Path:
    """Return the folder of test images in a folder that has no training images, or else the folder itself."""
    found = [root / name for name in TEST_SPLITS if (root / name).is_dir() and not (root / TRAIN_SPLIT).is_dir()]
    return found[0] if found and len(subfolders(root)) == 1 else root


def list_dataset(
    root: Path,
    train: list[ImageFile],
    test: list[ImageFile] | None = None,
    class_names: tuple[str, ...] | None = None,
    sources: tuple[str, ...] = (),
) -> RawDataset:
    """Return listed image files as a data set; without ``class_names``, those of the files, in sorted order."""
    if class_names is None:
        class_names = tuple(sorted({image.class_name for image in [*train, *(test or ())]}))
    test_split = None if test is None else encode_labels(test, class_names, sources, root)
    return RawDataset(class_names, encode_labels(train, class_names, sources, root), test_split)


def encode_labels(
    images: list[ImageFile], class_names: tuple[str, ...], sources: tuple[str, ...], root: Path
) -> EncodedSplit:
    """Return image files as a split, with classes and sources as numbers; without ``sources`` they are unknown."""
    label_of = {name: label for label, name in enumerate(class_names)}
    source_of = {name: number for number, name in enumerate(sources)}
    return EncodedSplit(
        [image.path for image in images],
        [image.path.relative_to(root).as_posix() for image in images],
        np.array([label_of[image.class_name] for image in images], dtype=np.int64),
        np.array([source_of[image.source] for image in images], dtype=np.int64) if sources else None,
    )


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, or say that it cannot be read, or that a name in it is not text."""
    try:
        entries = list(folder.iterdir())
    except PermissionError:
        raise DataError(f"{folder}: cannot be read (permission denied); allow it, or move the folder away") from None
    for path in entries:
        try:
            path.name.encode()
        except UnicodeEncodeError:
            shown = path.name.encode(errors="surrogateescape")
            raise DataError(f"{folder}: the name {shown!r} in it is not valid UTF-8; rename it") from None
    return entries


def image_files(folder: Path) -> list[Path]:
    """Return the image files directly in a folder, sorted by name."""
    return sorted(path for path in _entries(folder) if is_image(path))


def is_image(path: Path) -> bool:
    """Whether a path is a file that counts as an image, by its name; hidden files do not."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def subfolders(folder: Path) -> list[Path]:
    """Return the folders directly in a folder, sorted by name, without hidden ones."""
    return sorted(
        path for path in _entries(folder) if path.is_dir() and not path.name.startswith(".") and path.name != "__MACOSX"
    )


def natural_sort_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that sorts ``10`` after ``9``."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _enter_wrapper_folders(root: Path) -> Path:
    """Return the folder inside wrapper folders of an archive: ``UCMerced_LandUse/Images/<class>/*``.

    A source may have them too, as in Office-31: ``amazon/images/<class>/*``.
    """
    while True:
        inner = subfolders(root)
        is_wrapper = len(inner) == 1 and inner[0].name not in (TRAIN_SPLIT, *TEST_SPLITS)
        if not is_wrapper or image_files(inner[0]) or not subfolders(inner[0]):
            return root
        root = inner[0]


def _has_source_level(root: Path) -> bool:
    """Return whether the folders of a split are sources that hold class folders."""
    flat = [folder for folder in subfolders(root) if image_files(folder)]
    deep = [
        folder
        for folder in subfolders(root)
        if any(image_files(inner) for inner in subfolders(_enter_wrapper_folders(folder)))
    ]
    if flat and deep:
        raise DataError(
            f"{root} mixes two layouts: images are directly in '{flat[0].name}' but one folder deeper "
            f"in '{deep[0].name}'"
        )
    return bool(deep)


def _class_folders(root: Path, by_source: bool) -> list[tuple[Path, str]]:
    """Return the folder of each class in a split, and its source."""
    if by_source:
        sources = subfolders(root)
        return [(folder, source.name) for source in sources for folder in subfolders(_enter_wrapper_folders(source))]
    return [(folder, "") for folder in subfolders(root)]


def _list_images(folders: list[tuple[Path, str]]) -> list[ImageFile]:
    return [ImageFile(path, folder.name, source) for folder, source in folders for path in image_files(folder)]
