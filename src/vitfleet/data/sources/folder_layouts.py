"""CORe50 in its own folder layout, ``s1..s11/o1..o50/*.png``: 50 objects in 11 sessions (Lomonaco & Maltoni, 2017)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitfleet.data.decode import RawDataset
from vitfleet.data.sources.image_folder import ImageFile, encode_labels, image_files
from vitfleet.errors import DataError

SESSIONS = tuple(f"s{number}" for number in range(1, 12))
OBJECTS = tuple(f"o{number}" for number in range(1, 51))
TEST_SESSIONS = ("s3", "s7", "s10")  # the benchmark's choice
ARCHIVE_FOLDERS = ("core50_128x128", "core50_350x350", "core50_32x32")


def read_core50(root: Path) -> RawDataset | None:
    """Read CORe50 with the object as class and the session as source; ``None`` if the layout is another one."""
    return _read(root, _read_objects)


def read_core50_sessions(root: Path) -> RawDataset | None:
    """Read CORe50 with every object of every session as a class of its own, session by session; no test split.

    FedViT's experiments use it so: 11 tasks of 50 classes.
    """
    return _read(root, _read_session_objects)


def _read(root: Path, read: Callable[[Path], RawDataset]) -> RawDataset | None:
    for folder in (root, *(root / name for name in ARCHIVE_FOLDERS)):
        if any((folder / session / OBJECTS[0]).is_dir() for session in SESSIONS):
            return read(folder)
    return None


def _read_objects(root: Path) -> RawDataset:
    images = [
        ImageFile(path, label, session)
        for session in SESSIONS
        for label in OBJECTS
        if (root / session / label).is_dir()
        for path in image_files(root / session / label)
    ]
    train = [image for image in images if image.source not in TEST_SESSIONS]
    test = [image for image in images if image.source in TEST_SESSIONS]
    # Frames of one session are nearly the same image: a hold-out of some of them would be no test.
    if not train or not test:
        missing = f"test sessions {', '.join(TEST_SESSIONS)}" if train else "training sessions s1, s2, s4, …"
        raise DataError(f"{root}: CORe50's {missing} are missing")
    return RawDataset(
        OBJECTS, encode_labels(train, OBJECTS, SESSIONS, root), encode_labels(test, OBJECTS, SESSIONS, root)
    )


def _read_session_objects(root: Path) -> RawDataset:
    folders = {f"{session}/{label}": root / session / label for session in SESSIONS for label in OBJECTS}
    classes = tuple(name for name, folder in folders.items() if folder.is_dir())
    images = [ImageFile(path, name) for name in classes for path in image_files(folders[name])]
    return RawDataset(classes, encode_labels(images, classes, (), root), None)
