"""Images in Arrow tables: parquet files, and what the ``datasets`` library holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.data.decode import EncodedSplit, RawDataset
from vitfleet.data.sources.image_folder import TEST_SPLITS, TRAIN_SPLIT, natural_sort_key
from vitfleet.errors import DataError, how_to_install
from vitfleet.system import total_memory

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ColumnNames:
    """Names that the columns of a table may have; the first one that exists is used."""

    image: tuple[str, ...] = ("image", "img")  # encoded images
    label: tuple[str, ...] = ("fine_label", "label", "labels", "class")  # their classes
    # The origin of an image (client, writer, domain, …); this column is optional.
    source: tuple[str, ...] = ("source", "client", "writer", "user", "domain")
    source_required: bool = False  # it is an error if no source column exists

    def override(self, image: str | None, label: str | None, source: str | None = None) -> ColumnNames:
        """Return these names with the columns that a user has named; a source column that is named must exist."""
        return ColumnNames(
            image=(image,) if image else self.image,
            label=(label,) if label else self.label,
            source=(source,) if source else self.source,
            source_required=source is not None or self.source_required,
        )


DEFAULT_COLUMNS = ColumnNames()
MAX_CLASSES = 10**5  # of labels without names
ROW_BYTES = 64  # that every row takes at least, read into Python
BATCH_ROWS = 64  # read at once: a value that is repeated is in memory as often


def memory_budget() -> int:
    """Return how many bytes the rows of a file may take."""
    return total_memory() // 2


@dataclass(frozen=True)
class TablePart:
    """One parquet file, or one split of a ``datasets.DatasetDict``."""

    table: pa.Table
    name: str  # in error messages
    folder: (
        Path | None
    )  # images that a file names by path are in it; ``None``: no file, its paths are taken as they are


def read_tables(train: list[TablePart], test: list[TablePart] | None, columns: ColumnNames) -> RawDataset:
    """Return the rows of tables as a data set; classes and sources are numbered over both splits."""
    parts = train + (test or [])
    names: Sequence[str] = train[0].table.column_names
    label = find_column(names, columns.label, train[0].name, "label")
    if columns.source_required:
        find_column(names, columns.source, train[0].name, "source")
    source = next((name for name in columns.source if name in names), None)
    for part in parts:
        find_column(part.table.column_names, [label], part.name, "label")
        if source is not None:
            find_column(part.table.column_names, [source], part.name, "source")
    classes, labels = _number_labels(parts, label)
    sources = None if source is None else _number_sources(parts, source)
    images = [image for part in parts for image in _encoded_images(part, columns.image)]
    split = EncodedSplit([item for item, _ in images], [name for _, name in images], labels, sources)
    num_train = sum(part.table.num_rows for part in train)
    indices = np.arange(len(split), dtype=np.int64)
    return RawDataset(
        classes, split.take(indices[:num_train]), None if test is None else split.take(indices[num_train:])
    )


def find_column(names: Sequence[str], candidates: Sequence[str], table: str, role: str) -> str:
    """Return the first candidate among a table's columns; an error names those that exist and the key to set."""
    for name in candidates:
        if name in names:
            return name
    remedy = f"; set data.{role}_column ({role}_column= in Python)"
    raise DataError(
        f"{table} has no {role} column: expected one named {' or '.join(candidates)}, found {', '.join(names)}{remedy}"
    )


def _encoded_images(part: TablePart, candidates: Sequence[str]) -> Iterator[tuple[bytes | Path, str]]:
    """Yield each image and its name in error messages."""
    import pyarrow as pa  # a device with folders of images does not have it

    column = find_column(part.table.column_names, candidates, part.name, "image")
    row = 0
    for chunk in part.table.column(column).chunks:
        if pa.types.is_struct(chunk.type):
            contents = chunk.field("bytes").to_pylist()
            paths = chunk.field("path").to_pylist() if chunk.type.get_field_index("path") >= 0 else [None] * len(chunk)
        elif pa.types.is_binary(chunk.type) or pa.types.is_large_binary(chunk.type):
            contents, paths = chunk.to_pylist(), [None] * len(chunk)
        else:
            raise DataError(f"{part.name}: column '{column}' holds {chunk.type}, not encoded images")
        for content, path in zip(contents, paths, strict=True):
            name = f"{part.name}:{row}" + (f" ({path})" if path else "")
            if content is None and path:
                yield Path(path) if part.folder is None else _inside(part.folder, path, name), name
            else:
                yield content or b"", name  # an empty cell is an image that cannot be read
            row += 1


def _inside(folder: Path, path: str, name: str) -> Path:
    """Return the path of an image that a table names: in the table's folder or below it."""
    inner = os.path.normpath(path)
    if os.path.isabs(inner) or inner.split(os.sep)[0] == os.pardir:
        raise DataError(f"{name}: is outside of {folder}, the table's folder; put the images there")
    return folder / inner


def _number_labels(parts: list[TablePart], column: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the class names and the class of each row: text is numbered in sorted order, integers stay as they are."""
    numbers, texts = _read_column(parts, column)
    if texts:
        classes = tuple(sorted(set(texts)))
        label_of = {name: label for label, name in enumerate(classes)}
        return classes, np.array([label_of[text] for text in texts], dtype=np.int64)
    declared = {names for part in parts if (names := _class_names(part.table, column))}
    if len(declared) > 1:
        raise DataError(f"{parts[0].name} and {parts[-1].name} declare different class names")
    if not declared and numbers.size and numbers.max() >= MAX_CLASSES:
        raise DataError(
            f"{parts[0].name}: column '{column}' has the label {numbers.max()}; at most {MAX_CLASSES} classes"
        )
    classes = declared.pop() if declared else tuple(str(i) for i in range(int(numbers.max(initial=-1)) + 1))
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(classes):
        raise DataError(
            f"{parts[0].name}: column '{column}' has labels from {numbers.min()} to {numbers.max()}, "
            f"but there are {len(classes)} classes"
        )
    return classes, numbers


def _number_sources(parts: list[TablePart], column: str) -> NDArray[np.int64]:
    """Return the source of each row: text is numbered in natural order, integers stay as they are."""
    numbers, texts = _read_column(parts, column)
    source_of = {name: number for number, name in enumerate(sorted(set(texts), key=natural_sort_key))}
    return np.array([source_of[text] for text in texts], dtype=np.int64) if texts else numbers


def _read_column(parts: list[TablePart], column: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return a column of all parts as integers or as texts, whichever it holds; the other one is empty."""
    import pyarrow as pa

    numbers: list[NDArray[np.int64]] = []
    texts: list[str] = []
    for part in parts:
        values = part.table.column(column)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if values.null_count:
            raise DataError(f"{part.name}: column '{column}' is empty in {values.null_count} rows")
        if pa.types.is_integer(values.type):
            numbers.append(values.cast(pa.int64()).to_numpy())
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            texts += values.to_pylist()
        else:
            raise DataError(f"{part.name}: column '{column}' holds {values.type}, not integers or text")
    if numbers and texts:
        raise DataError(f"column '{column}' holds integers in one file and text in another")
    return (np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)), texts


def _class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """Return the names of a ClassLabel column, which ``datasets`` stores in the schema."""
    metadata = table.schema.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return ()
    return tuple(names)


def has_parquet(root: Path) -> bool:
    """Return whether a path is a parquet file or a folder of them."""
    return root.suffix == ".parquet" if root.is_file() else bool(_parquet_folders(root))


def read_parquet(root: Path, columns: ColumnNames = DEFAULT_COLUMNS) -> RawDataset:
    """Read a parquet file, or a folder of ``train*.parquet`` and ``test*.parquet`` files.

    They are in the folder itself, in ``data`` or in one folder of any name, as in a download from the hub.
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
        remedy = f"{how_to_install('parquet')}, or use folders of images"
        raise DataError(f"{file}: parquet files are read by pyarrow; {remedy}") from error
    try:
        # Not read_table: it would make columns of folder names such as `client=3`.
        with pq.ParquetFile(file) as opened:
            return TablePart(_read_within_memory(opened, file), file.name, file.parent)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from error


def _read_within_memory(opened: Any, file: Path) -> pa.Table:
    """Return the rows of a parquet file. A small file may stand for many rows, or for long values often repeated."""
    import pyarrow as pa

    budget, metadata = memory_budget(), opened.metadata
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    declared = max(metadata.num_rows * ROW_BYTES, sum(group.total_byte_size for group in groups))
    batches, size = [], declared
    if declared <= budget:
        size = 0
        for batch in opened.iter_batches(batch_size=BATCH_ROWS):
            batches.append(batch)
            size += batch.nbytes
            if size > budget:
                break
    if size > budget:
        raise DataError(
            f"{file}: its {metadata.num_rows} rows take {size / 2**20:.0f} MiB and more of memory; "
            f"at most {budget / 2**20:.0f} MiB, half of the machine's, are used for them"
        )
    return pa.Table.from_batches(batches, opened.schema_arrow)
