"""Load a data set by its name, from a folder, from parquet files or from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from vitfleet.config.registry import DATASETS
from vitfleet.config.schema import DataConfig
from vitfleet.data.decode import DecodeOptions, RawDataset, decode_dataset
from vitfleet.data.image_cache import read_shared, write_shared
from vitfleet.data.images import DataSet
from vitfleet.data.sources.folder_layouts import read_domain_lists
from vitfleet.data.sources.hub import read_hub
from vitfleet.data.sources.image_folder import find_test_folder, read_image_folder
from vitfleet.data.sources.tables import DEFAULT_COLUMNS, ColumnNames, has_parquet, read_parquet
from vitfleet.data.subsets import hold_out_validation
from vitfleet.errors import ConfigError, DataError
from vitfleet.progress import NO_PROGRESS, Progress

DATA_DIR_VARIABLE = "VITFLEET_DATA"
HUB_PREFIX = "hf:"


@dataclass(frozen=True)
class DatasetInfo:
    """How to find and read a data set."""

    name: str  # also of its folder in the data directory
    hub_id: str | None = None  # `owner/name` on the Hugging Face hub; `None`: it is not there
    channels: int | None = 3  # 3 for colour, 1 for greyscale; `None`: 1 if the images are greyscale
    folders: tuple[str, ...] = ()  # of the data directory that may hold it, if not the one of its name
    columns: ColumnNames = DEFAULT_COLUMNS  # of its parquet files
    # Reads a folder layout of its own; returns `None` for any other
    read_folder: Callable[[Path], RawDataset | None] | None = None
    transform: Callable[[RawDataset], RawDataset] | None = None  # changes the data set before it is decoded
    download_hint: str = ""  # how to get it, if not from the hub


@dataclass(frozen=True)
class DataRequest:
    """Arguments of a registered data set's loader.

    Attributes
    ----------
    config
        The table ``data``.
    progress
        Receives the progress of decoding.
    """

    config: DataConfig
    progress: Progress = NO_PROGRESS

    def decode(self, name: str, raw: RawDataset, channels: int | None = 3) -> DataSet:
        """Decode a data set as the table ``data`` says: hold-out, limit, tolerated share of unreadable images."""
        config = self.config
        test_only = config.test_only and config.path is not None  # named sets are divided among devices, too
        options = DecodeOptions(channels, config.test_share, config.max_corrupt, config.limit, test_only)
        return decode_dataset(name, raw, options, self.progress)


def load_dataset(config: DataConfig, progress: Progress = NO_PROGRESS) -> DataSet:
    """Load a registered data set by its name, the user's own from ``data.path``, or one of the hub (``hf:owner/name``).

    With ``data.validation``, validation images take the place of the test images. The runs of a comparison share what
    they decode (:mod:`vitfleet.data.image_cache`).
    """
    if config.fingerprint is not None:
        remedy = "resume it in Python: vitfleet.load_run(path).resume(data=…), with the same data"
        raise ConfigError(
            "data.fingerprint", config.fingerprint, f"the run was started with data from Python; {remedy}"
        )
    data = read_shared(config)
    if data is None:
        data = _load(DataRequest(config, progress))
        write_shared(config, data)
    return hold_out_validation(data, config.validation)


def _load(request: DataRequest) -> DataSet:
    config = request.config
    entry = DATASETS.get(config.name)
    if entry is not None:
        params = DATASETS.validate(config.name, config.params)
        data: DataSet = entry.target(params, request)
        return data
    if config.path is not None:
        return read_dataset(DatasetInfo(config.name, channels=None), request)
    if config.name.startswith(HUB_PREFIX):
        return _load_from_hub(request)
    names = DATASETS.names()
    close = get_close_matches(config.name.lower().replace("-", "").replace(" ", ""), names, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        "data.name",
        config.name,
        f"{guess}known are {', '.join(names)}; for your own images set data.path, for the hub hf:owner/name",
    )


def check_listing(config: DataConfig) -> None:
    """Raise what reading the images of a folder, ``data.path``, would raise, as far as it takes no decoding."""
    if config.path is not None and not has_parquet(Path(config.path).expanduser()):
        _find(config, DatasetInfo(config.name, channels=None))


def read_dataset(info: DatasetInfo, request: DataRequest) -> DataSet:
    """Find, read and decode a data set.

    It is read from ``data.path`` if that is set; else from ``data.dir`` (or the directory in ``VITFLEET_DATA``); else
    from the hub.
    """
    raw = _find(request.config, info)
    return request.decode(info.name, raw if info.transform is None else info.transform(raw), info.channels)


def _load_from_hub(request: DataRequest) -> DataSet:
    config = request.config
    repository, _, hub_config = config.name.removeprefix(HUB_PREFIX).partition(":")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ConfigError("data.name", config.name, f"must be {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name:config")
    columns = DEFAULT_COLUMNS.override(config.image_column, config.label_column, config.source_column)
    try:
        raw = read_hub(repository, columns, hub_config or None, config.train_split, config.test_split)
    except DataError as error:
        raise DataError(f"data.name = {config.name!r}: the Hugging Face hub ({repository}): {error}") from error
    return request.decode(repository, raw, channels=None)


def _find(config: DataConfig, info: DatasetInfo) -> RawDataset:
    """Return the data set from the first place that has it."""
    columns = info.columns.override(config.image_column, config.label_column, config.source_column)
    if config.path is not None:
        root = Path(config.path).expanduser()
        if not root.exists():
            raise DataError(f"data.path = '{config.path}': no such file or folder")
        try:
            return _read_path(find_test_folder(root) if config.test_only else root, info, columns)
        except DataError as error:
            raise DataError(f"data.path = '{config.path}': {error}") from None
    directory = config.dir or os.environ.get(DATA_DIR_VARIABLE)
    reasons: list[str] = []
    if directory is None:
        reasons.append(f"no data directory is set (--data-dir or {DATA_DIR_VARIABLE})")
    else:
        for folder in info.folders or (info.name,):
            root = Path(directory).expanduser() / folder
            if root.is_dir():
                return _read_path(root, info, columns)
            reasons.append(f"{root} does not exist")
    if info.hub_id is None:
        reasons.append("it is not on the Hugging Face hub")
    else:
        try:
            return read_hub(info.hub_id, columns)
        except DataError as error:
            reasons.append(f"the Hugging Face hub ({info.hub_id}): {error}")
    raise DataError(f"data set '{info.name}' not found: {'; '.join(reasons)}. {_how_to_get(info, directory)}")


def _how_to_get(info: DatasetInfo, directory: str | None) -> str:
    target = f"{directory or 'DIR'}/{(info.folders or (info.name,))[-1]}"
    set_directory = "" if directory else f", and give --data-dir DIR or set {DATA_DIR_VARIABLE}=DIR"
    if info.download_hint:
        return f"To get it: {info.download_hint} at {target}{set_directory}"
    download = f"hf download --repo-type dataset {info.hub_id} --local-dir {target}"
    return f"To get it: {download}; or put its parquet files or image folders at {target}{set_directory}"


def _read_path(root: Path, info: DatasetInfo, columns: ColumnNames) -> RawDataset:
    raw = None if info.read_folder is None else info.read_folder(root)
    if raw is not None:
        return raw
    if has_parquet(root):
        return read_parquet(root, columns)
    if root.is_file():
        raise DataError(f"{root} is neither a parquet file nor a folder of images")
    return read_domain_lists(root) or read_image_folder(root)
