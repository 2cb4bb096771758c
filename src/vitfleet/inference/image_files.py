"""A user's own image files: finding and decoding them, with a remark for those that cannot be used as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitfleet.data.decode import GREYSCALE_MODES, UNREADABLE, decode_split, fit_image
from vitfleet.data.images import ImageSet
from vitfleet.data.sources.image_folder import TEST_SPLITS, ImageFile, encode_labels, image_files, is_image, subfolders
from vitfleet.errors import UserError
from vitfleet.progress import NO_PROGRESS, Progress

GREY_NOTE = "is greyscale; its grey is used for all three colours"
COLOUR_NOTE = "is in colour; converted to grey"


@dataclass(frozen=True)
class LabelledImages:
    """Images with known classes, and one line for each file or folder that needs a remark."""

    images: ImageSet
    notes: tuple[str, ...] = ()


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Return files as they are given, and all images in folders, in the order of paths."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(filter(is_image, path.rglob("*"))) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path}: holds no file with the ending of an image format")
        found += inside
    if not found:
        raise UserError("name at least one image or folder")
    return found


def decode_file(path: Path, image_size: int, channels: int) -> tuple[NDArray[np.uint8] | None, str | None]:
    """Decode one file as the model's training images were, to uint8 ``[channels, height, width]``.

    Beside it is what the user should know, if anything: that its colours were converted, or why it cannot be read.
    """
    try:
        with Image.open(path) as image:
            note = _colour_note(image.mode, channels)
            return fit_image(image, image_size, channels), note
    except FileNotFoundError:
        return None, "no such file"
    except UNREADABLE as error:
        # Pillow's message repeats the file's name, which the note begins with.
        unknown = "cannot identify image file" in str(error)
        return None, f"is not a readable image ({'cannot identify its format' if unknown else error})"


def read_labelled(
    folder: Path, class_names: Sequence[str], image_size: int, channels: int, progress: Progress = NO_PROGRESS
) -> LabelledImages:
    """Read a folder with one subfolder per class, named as the model's classes.

    If the folder has a subfolder ``test`` (or ``valid``, ``validation``, ``val``), that one is read. Folders that are
    not a class of the model, files that cannot be read and files whose colours are converted have a note each.
    """
    if not folder.is_dir():
        raise UserError(f"--data {folder}: no such folder")
    splits = [folder / name for name in TEST_SPLITS if name not in class_names and (folder / name).is_dir()]
    root = splits[0] if splits else folder
    files, notes = [], []
    for subfolder in subfolders(root):
        inside = image_files(subfolder)
        if subfolder.name in class_names:
            files += [ImageFile(path, subfolder.name) for path in inside]
        else:
            notes.append(f"{subfolder}: is not a class of the model; {len(inside)} images are left out")
    notes += [f"{file.path}: {note}" for file in files if (note := _file_note(file.path, channels))]
    split = encode_labels(files, tuple(class_names), (), root)
    images, skipped = decode_split(split, image_size, channels, 1.0, folder.name, progress)
    notes += [f"{root / name}: is not a readable image" for name in skipped]
    if not len(images):
        known = ", ".join(class_names[:3])
        raise UserError(f"--data {folder}: holds no readable image of a class of the model ({known}, …)")
    return LabelledImages(images, tuple(notes))


def _file_note(path: Path, channels: int) -> str | None:
    try:
        with Image.open(path) as image:
            return _colour_note(image.mode, channels)
    except UNREADABLE:
        return None  # decoding it fails too, and that is noted


def _colour_note(mode: str, channels: int) -> str | None:
    is_grey = mode.split(";")[0] in GREYSCALE_MODES or mode == "LA"
    if channels == 3 and is_grey:
        return GREY_NOTE
    return COLOUR_NOTE if channels == 1 and not is_grey else None
