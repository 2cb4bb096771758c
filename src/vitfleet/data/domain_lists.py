"""DomainNet's layout: ``<domain>/<class>/*``, with the lists ``<domain>_train.txt`` and ``<domain>_test.txt``.

A line of a list is the path of an image and the number of its class. The source of an image is its domain.
"""

from __future__ import annotations

from pathlib import Path

from vitfleet.data.decode import RawDataset
from vitfleet.data.sources.image_folder import ImageFile, encode_labels, natural_sort_key
from vitfleet.errors import DataError

SPLITS = ("train", "test")


def has_domain_lists(root: Path) -> bool:
    """Return whether a folder holds lists of a domain's images for both splits, and the domain's folder."""
    return root.is_dir() and bool(_domains(root))


def read_domain_lists(root: Path) -> RawDataset:
    """Read the images that the lists of all domains name.

    Raises
    ------
    DataError
        If a line is not a path and a number, or names a file that is not there.
    """
    domains = _domains(root)
    train, test = ([image for domain in domains for image in _read_list(root, domain, split)] for split in SPLITS)
    classes = tuple(sorted({image.class_name for image in train + test}))
    return RawDataset(
        classes, encode_labels(train, classes, domains, root), encode_labels(test, classes, domains, root)
    )


def _domains(root: Path) -> tuple[str, ...]:
    """Return the domains that have a folder and both lists, in natural order."""
    names = (file.name.removesuffix("_train.txt") for file in root.glob("*_train.txt"))
    complete = [name for name in names if (root / name).is_dir() and (root / f"{name}_test.txt").is_file()]
    return tuple(sorted(complete, key=natural_sort_key))


def _read_list(root: Path, domain: str, split: str) -> list[ImageFile]:
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
