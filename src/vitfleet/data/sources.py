"""Where the images come from: a folder, parquet files, the Hugging Face hub or scikit-learn's digits."""

from __future__ import annotations

import io
import logging
import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitfleet.config.registry import DATASETS, NoParams, register_dataset, validate_params
from vitfleet.config.schema import DataConfig
from vitfleet.data import image_folder, parquet
from vitfleet.data.decode import Encoded, decode, usual_side
from vitfleet.data.image_folder import RawDataset
from vitfleet.data.images import DataSet
from vitfleet.errors import ConfigError, DataError
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.randomness import Address, Purpose

log = logging.getLogger(__name__)

VARIABLE = "VITFLEET_DATA"
# The same hold-out and the same subset whatever the run's seed: runs of several seeds share one test set.
FIXED = Address(0, Purpose.PARTITION)


@dataclass(frozen=True)
class DatasetInfo:
    """A set that can be asked for by name.

    Attributes
    ----------
    hub
        Its usual name on the Hugging Face hub.
    folders
        Folders of the data directory that may hold it, if not the one of its own name.
    source_columns
        Parquet columns that may say where an image came from.
    superclasses
        Number the classes so that those of one source are consecutive.
    home
        How to get it where the hub does not have it.
    """

    name: str
    hub: str | None = None
    channels: int = 3
    folders: tuple[str, ...] = ()
    source_columns: tuple[str, ...] = parquet.SOURCE_COLUMNS
    superclasses: bool = False
    home: str = ""


DIGITS = DatasetInfo("digits", channels=1)
CORE50_HOME = "download core50_128x128.zip from CORe50's home page and unpack it"
KNOWN = (
    DatasetInfo("cifar10", "uoft-cs/cifar10"),
    DatasetInfo("cifar100", "uoft-cs/cifar100"),
    DatasetInfo("ucmerced", "blanchon/UC_Merced"),
    DatasetInfo("tinyimagenet", "zh-plus/tiny-imagenet"),
    DatasetInfo(
        "fc100",
        "uoft-cs/cifar100",
        folders=("fc100", "cifar100"),
        source_columns=("coarse_label",),
        superclasses=True,
    ),
    DatasetInfo("miniimagenet", "timm/mini-imagenet"),
    DatasetInfo("core50", home=CORE50_HOME),
    DatasetInfo("core50_sessions", folders=("core50",), home=CORE50_HOME),
    DIGITS,
    DatasetInfo("fashion_mnist", "zalando-datasets/fashion_mnist", channels=1),
)


@dataclass(frozen=True)
class DataRequest:
    """What a registered data set is loaded with: the table ``data`` and where to show progress."""

    config: DataConfig
    progress: Progress = NO_PROGRESS


def load(config: DataConfig, progress: Progress = NO_PROGRESS) -> DataSet:
    """Load a data set: a registered one by its name, or the user's own images from ``data.path``.

    Raises
    ------
    ConfigError
        No data set has this name.
    DataError
        The data is not there, not in a layout that can be read, or too damaged.
    """
    request = DataRequest(config, progress)
    entry = DATASETS.get(config.name)
    # `digits` is the default name and has no files: with a path, these are the user's own images.
    if config.path is not None and (entry is None or config.name == DIGITS.name):
        name = Path(config.path).resolve().stem if config.name == DIGITS.name else config.name
        return read_known(DatasetInfo(name), request)
    if entry is None:
        names = DATASETS.names()
        close = get_close_matches(config.name.lower().replace("-", "").replace(" ", ""), names, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            "data.name", config.name, f"{guess}known are {', '.join(names)}; for your own images set data.path"
        )
    data: DataSet = entry.target(validate_params(DATASETS, config.name, config.params, "data.params"), request)
    return data


def read_known(known: DatasetInfo, request: DataRequest) -> DataSet:
    """Find, read and decode a data set.

    ``data.path`` is the only place looked at where it is set; else the set is looked for in ``data.dir`` (or the
    directory in ``VITFLEET_DATA``), then on the hub.

    Returns
    -------
    Both splits, all images of one size. Where the set has no test split, a stratified share is held out.
    """
    config, progress, name = request.config, request.progress, known.name
    found = _find(config, known)
    if known.superclasses:
        found = by_superclass(found, name)
    train, test = split_holdout(found.train, config.test_share) if found.test is None else (found.train, found.test)
    if not len(train) or not len(test):
        raise DataError(f"{name}: {len(train)} training and {len(test)} test images are too few to work with")
    if config.limit is not None:
        train = subset(train, config.limit)
        test = subset(test, max(config.limit // 5, len(found.classes)))
    try:
        side = usual_side(train)
    except DataError as error:
        raise DataError(f"{name} (train): {error}") from error
    trained, lost = decode(train, side, known.channels, config.max_corrupt, f"{name} (train)", progress)
    tested, lost_too = decode(test, side, known.channels, config.max_corrupt, f"{name} (test)", progress)
    seen = np.bincount(trained.labels.numpy(), minlength=len(found.classes))
    if not seen.all():
        absent = [found.classes[i] for i in np.flatnonzero(seen == 0).tolist()]
        log.warning("%s: %d classes have no training image: %s", name, len(absent), _some(absent))
    return DataSet(name, found.classes, trained, tested, (*lost, *lost_too))


def split_holdout(split: Encoded, share: float) -> tuple[Encoded, Encoded]:
    """Part a share of every class for testing; a class keeps at least one image to train on."""
    order = FIXED.generator().permutation(len(split))
    tested = np.zeros(len(split), dtype=bool)
    for label in np.unique(split.labels):
        members = order[split.labels[order] == label]
        count = min(max(1, round(share * len(members))), len(members) - 1)
        tested[members[:count]] = True
    return split.take(np.flatnonzero(~tested)), split.take(np.flatnonzero(tested))


def subset(split: Encoded, count: int) -> Encoded:
    """Draw so many images, every class in proportion, and keep them in their order."""
    if count >= len(split):
        return split
    order = FIXED.generator().permutation(len(split))
    depth = np.empty(len(split))  # how far down its class an image is, as a share
    for label in np.unique(split.labels):
        members = np.flatnonzero(split.labels[order] == label)
        depth[members] = (np.arange(len(members)) + 0.5) / len(members)
    return split.take(np.sort(order[np.argsort(depth, kind="stable")[:count]]))


def by_superclass(found: RawDataset, name: str) -> RawDataset:
    """Renumber the classes by (superclass, class), where an image's source is its superclass."""
    parts = [found.train] if found.test is None else [found.train, found.test]
    superclass = np.full(len(found.classes), np.iinfo(np.int64).max)  # a class without images comes last
    for part in parts:
        if part.sources is None:
            raise DataError(f"{name}: the images do not say their superclass: column coarse_label is missing")
        superclass[part.labels] = part.sources
    for part in parts:
        if (superclass[part.labels] != part.sources).any():
            raise DataError(f"{name}: coarse_label puts one class into several superclasses")
    order = np.argsort(superclass, kind="stable")
    place = np.argsort(order)
    train, *test = [replace(part, labels=place[part.labels]) for part in parts]
    return RawDataset(tuple(found.classes[i] for i in order.tolist()), train, test[0] if test else None)


def _find(config: DataConfig, known: DatasetInfo) -> RawDataset:
    if config.path is not None:
        root = Path(config.path).expanduser()
        if not root.exists():
            raise DataError(f"data.path = '{config.path}': no such file or folder")
        return _read(root, known)
    if known is DIGITS:
        return _digits()
    directory = config.dir or os.environ.get(VARIABLE)
    looked: list[str] = []
    if directory is None:
        looked.append(f"no data directory is set (--data-dir or {VARIABLE})")
    else:
        for folder in known.folders or (known.name,):
            root = Path(directory).expanduser() / folder
            if root.is_dir():
                return _read(root, known)
            looked.append(f"{root} is not there")
    if known.hub is None:
        looked.append("the Hugging Face hub has no usual name for it")
    else:
        try:
            return parquet.hub(known.hub, known.source_columns)
        except DataError as error:
            looked.append(f"the Hugging Face hub ({known.hub}): {error}")
    raise DataError(f"data set '{known.name}' not found: {'; '.join(looked)}. {_remedy(known, directory)}")


def _remedy(known: DatasetInfo, directory: str | None) -> str:
    target = f"{directory or 'DIR'}/{(known.folders or (known.name,))[-1]}"
    context = "" if directory else f", and give --data-dir DIR or set {VARIABLE}=DIR"
    if known.home:
        return f"To get it: {known.home} at {target}{context}"
    download = f"hf download --repo-type dataset {known.hub} --local-dir {target}"
    return f"To get it: {download}; or put its parquet files or image folders at {target}{context}"


def _read(root: Path, known: DatasetInfo) -> RawDataset:
    if known.name.startswith("core50"):
        for inner in (root, root / "core50_128x128"):
            if image_folder.is_core50(inner):
                return image_folder.core50(inner) if known.name == "core50" else image_folder.core50_sessions(inner)
    if parquet.holds_parquet(root):
        return parquet.parquet(root, known.source_columns)
    if root.is_file():
        raise DataError(f"{root} is neither a parquet file nor a folder of images")
    return image_folder.image_folder(root)


def _digits() -> RawDataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits come with scikit-learn, which the extra `sim` brings") from error
    digits = load_digits()
    pixels: NDArray[np.uint8] = np.round(digits.images * (255 / 16)).astype(np.uint8)
    labels: NDArray[np.int64] = digits.target.astype(np.int64)
    names = [f"digits:{i}" for i in range(len(pixels))]
    return RawDataset(
        tuple(str(digit) for digit in range(10)), Encoded([_png(one) for one in pixels], names, labels), None
    )


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode without loss, so that digits take the same way as every other set."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _register(known: DatasetInfo) -> None:
    @register_dataset(known.name)
    def read(params: NoParams, request: DataRequest) -> DataSet:
        return read_known(known, request)


for _known in KNOWN:
    _register(_known)
