"""Read images from parquet files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vitfleet.data.decode import RawDataset
from vitfleet.data.sources.image_folder import TEST_SPLITS, TRAIN_SPLIT
from vitfleet.data.sources.tables import DEFAULT_COLUMNS, ColumnNames, TablePart, read_tables
from vitfleet.errors import DataError


def has_parquet(root: Path) -> bool:
    """Return whether a path is a parquet file or a folder of them."""
    return root.suffix == ".parquet" if root.is_file() else bool(_parquet_folders(root))


def read_parquet(root: Path, columns: ColumnNames = DEFAULT_COLUMNS) -> RawDataset:
    """Read a parquet file, or a folder of ``train*.parquet`` and ``test*.parquet`` files.

    Parameters
    ----------
    root
        The file; or a folder that holds the files itself, in ``data`` or in one folder of any name, as in a download
        from the hub.
    """
    if root.is_file():
        return read_tables([_read_file(root)], None, columns)
    candidates = _parquet_folders(root)
    if len(candidates) > 1:
        names = ", ".join(folder.name for folder in candidates)
        raise DataError(f"{root}: parquet files are in several folders ({names}); set data.path to one of them")
    files = sorted(candidates[0].glob("*.parquet"))
    train = _files_of_split(files, TRAIN_SPLIT)
    test = next((found for found in (_files_of_split(files, name) for name in TEST_SPLITS) if found), None)
    if not train and test:
        raise DataError(f"{candidates[0]} has {test[0].name} but no train*.parquet beside it")
    return read_tables(
        [_read_file(file) for file in train or files],
        [_read_file(file) for file in test] if test else None,
        columns,
    )


def _parquet_folders(root: Path) -> list[Path]:
    """Return the folder itself, or else ``data``, or else all inner folders that hold parquet files."""
    for folder in (root, root / "data"):
        if any(folder.glob("*.parquet")):
            return [folder]
    return sorted({file.parent for file in root.glob("[!.]*/*.parquet")})


def _files_of_split(files: Sequence[Path], split: str) -> list[Path]:
    # `val` must not match `validation-…`, nor `train` a `training_notes`.
    return [file for file in files if re.match(rf"{split}(?![a-z])", file.name.lower().removesuffix(".parquet"))]


def _read_file(file: Path) -> TablePart:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        remedy = "pip install 'vitfleet[parquet]', or use folders of images"
        raise DataError(f"{file}: parquet files are read by pyarrow, which is not installed: {remedy}") from error
    try:
        # Not read_table: it would make columns of folder names such as `client=3`.
        with pq.ParquetFile(file) as opened:
            return TablePart(opened.read(), file.name, file.parent)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from error
