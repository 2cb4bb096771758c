"""Image folders as people keep them: what is there, which class, which split; nothing is decoded yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitfleet.data.decode import Encoded
from vitfleet.errors import DataError

TEST_SPLITS = ("test", "valid", "validation", "val")  # in the order they are tried
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm"))

CORE50_OBJECTS = 50
CORE50_SESSIONS = 11
CORE50_TEST = ("s3", "s7", "s10")  # the benchmark's own choice (Lomonaco & Maltoni, 2017)


@dataclass(frozen=True)
class RawDataset:
    """A set as it was found: encoded, whole, over one numbering of classes and of sources."""

    classes: tuple[str, ...]
    train: Encoded
    test: Encoded | None


@dataclass(frozen=True)
class _Picture:
    """One image file and what its place among the folders says about it."""

    path: Path
    label: str
    source: str = ""  # no source


def image_folder(root: Path) -> RawDataset:
    """Read ``root/<class>/*``, ``root/train|test/<class>/*`` or ``root/train|test/<source>/<class>/*``.

    Raises
    ------
    DataError
        No image is there, or the test split has a class that the training split does not know.
    """
    root = _unwrap(root)
    tests = [root / name for name in TEST_SPLITS if (root / name).is_dir()]
    split = (root / "train").is_dir()
    if not split and any(folders(test) and not images(test) for test in tests):
        raise DataError(f"{root} has a folder '{tests[0].name}' but no folder 'train' beside it")
    train_root = root / "train" if split else root
    test_root = tests[0] if split and tests else None

    by_source = split and _by_source(train_root)
    classes = _classes(train_root, by_source)
    train = _pictures(train_root, by_source)
    if not train:
        raise DataError(
            f"{root} holds neither parquet files nor images: expected root/<class>/*.jpg, "
            f"root/train/<class>/*.jpg or root/train/<source>/<class>/*.jpg"
        )
    if by_source and len(classes) == 1:
        raise DataError(
            f"{train_root}: every folder holds the one folder '{classes[0]}', which would be read as "
            f"<source>/<class> with a single class; move the images up, to train/<class>/*"
        )
    test = None if test_root is None else _pictures(test_root, by_source)
    if test is not None and not test:
        raise DataError(f"{test_root} holds no images in the layout of {train_root}")
    strangers = sorted({picture.label for picture in test or ()} - set(classes))
    if strangers:
        raise DataError(f"{test_root}: unknown to the training split: class {', '.join(strangers)}")
    # Sources are numbered over both splits, client 9 before client 10.
    sources = tuple(sorted({picture.source for picture in train + (test or []) if picture.source}, key=natural))
    return RawDataset(
        classes,
        _encode(train, classes, sources, root),
        None if test is None else _encode(test, classes, sources, root),
    )


def is_core50(root: Path) -> bool:
    """Tell whether the session folders of CORe50 lie here."""
    return any((root / f"s{number}" / "o1").is_dir() for number in range(1, CORE50_SESSIONS + 1))


def core50(root: Path) -> RawDataset:
    """Read CORe50's own layout, ``s1..s11/o1..o50/*.png``: class is the object, source the session."""
    sessions = tuple(f"s{number}" for number in range(1, CORE50_SESSIONS + 1))
    classes = tuple(f"o{number}" for number in range(1, CORE50_OBJECTS + 1))
    every = [
        _Picture(path, label, context)
        for context in sessions
        for label in classes
        if (root / context / label).is_dir()
        for path in images(root / context / label)
    ]
    train = [picture for picture in every if picture.source not in CORE50_TEST]
    test = [picture for picture in every if picture.source in CORE50_TEST]
    # Frames of one session are nearly the same picture: holding some of them out would test nothing.
    if not train or not test:
        wanted = f"test sessions {', '.join(CORE50_TEST)}" if train else "training sessions s1, s2, s4, …"
        raise DataError(f"{root}: CORe50's {wanted} are missing")
    return RawDataset(classes, _encode(train, classes, sessions, root), _encode(test, classes, sessions, root))


def core50_sessions(root: Path) -> RawDataset:
    """Read the same as tasks: an object in a session is a class of its own, session after session; no test split.

    It is how FedViT's comparison counts CORe50: 11 tasks of 50 classes.
    """
    objects = [(number, label) for number in range(1, CORE50_SESSIONS + 1) for label in range(1, CORE50_OBJECTS + 1)]
    places = {f"s{number}/o{label}": root / f"s{number}" / f"o{label}" for number, label in objects}
    classes = tuple(name for name, place in places.items() if place.is_dir())
    every = [_Picture(path, name) for name in classes for path in images(places[name])]
    return RawDataset(classes, _encode(every, classes, (), root), None)


def images(folder: Path) -> list[Path]:
    """Return the image files directly in a folder, sorted by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def folders(folder: Path) -> list[Path]:
    """Return the folders directly in a folder, sorted by name, without hidden ones."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "__MACOSX"
    )


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key under which ``10`` comes after ``9``."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _unwrap(root: Path) -> Path:
    """Step into archives' wrapper folders: ``UCMerced_LandUse/Images/<class>/*``."""
    while True:
        inner = folders(root)
        wrapped = len(inner) == 1 and inner[0].name not in ("train", *TEST_SPLITS)
        if not wrapped or images(inner[0]) or not folders(inner[0]):
            return root
        root = inner[0]


def _by_source(root: Path) -> bool:
    """Tell whether a split's folders are sources that hold class folders."""
    flat = [folder for folder in folders(root) if images(folder)]
    deep = [folder for folder in folders(root) if any(images(inner) for inner in folders(folder))]
    if flat and deep:
        raise DataError(
            f"{root} mixes two layouts: images lie directly in '{flat[0].name}' but one folder deeper "
            f"in '{deep[0].name}'"
        )
    return bool(deep)


def _classes(root: Path, by_source: bool) -> tuple[str, ...]:
    parents = folders(root) if by_source else [root]
    return tuple(sorted({folder.name for parent in parents for folder in folders(parent)}))


def _pictures(root: Path, by_source: bool) -> list[_Picture]:
    if by_source:
        return [
            _Picture(path, folder.name, source.name)
            for source in folders(root)
            for folder in folders(source)
            for path in images(folder)
        ]
    return [_Picture(path, folder.name) for folder in folders(root) for path in images(folder)]


def _encode(part: list[_Picture], classes: tuple[str, ...], sources: tuple[str, ...], root: Path) -> Encoded:
    label_of = {name: position for position, name in enumerate(classes)}
    source_of = {name: position for position, name in enumerate(sources)}
    return Encoded(
        [picture.path for picture in part],
        [picture.path.relative_to(root).as_posix() for picture in part],
        np.array([label_of[picture.label] for picture in part], dtype=np.int64),
        np.array([source_of[picture.source] for picture in part], dtype=np.int64) if sources else None,
    )
