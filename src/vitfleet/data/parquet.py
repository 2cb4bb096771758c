"""Images in Arrow tables: parquet files on disk and sets of the Hugging Face hub, read the same way."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vitfleet.data.decode import Encoded
from vitfleet.data.image_folder import TEST_SPLITS, RawDataset, natural
from vitfleet.errors import DataError

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("fine_label", "label", "labels", "class")
SOURCE_COLUMNS = ("source", "client", "writer", "user")
HUB_PATIENCE = 5.0  # seconds to wait for the hub's first answer


@dataclass(frozen=True)
class _Piece:
    """One parquet file, or one split of the hub."""

    table: pa.Table
    name: str
    folder: Path | None = None  # where images that are only named in the table lie


def holds_parquet(root: Path) -> bool:
    """Tell whether a path is a parquet file or a folder of them."""
    return root.suffix == ".parquet" if root.is_file() else bool(_parquet_folders(root))


def parquet(root: Path, source_columns: Sequence[str] = SOURCE_COLUMNS) -> RawDataset:
    """Read a parquet file, or a folder of ``train*.parquet`` and ``test*.parquet`` files.

    Parameters
    ----------
    root
        The file; or a folder that holds the files itself, in ``data`` or in one folder of any name, as
        a download from the hub leaves them.
    source_columns
        Columns that may say where an image came from; the first one there is taken.
    """
    if root.is_file():
        return _found([_read(root)], None, source_columns)
    candidates = _parquet_folders(root)
    if len(candidates) > 1:
        names = ", ".join(folder.name for folder in candidates)
        raise DataError(f"{root}: parquet files lie in several folders ({names}); set data.path to one of them")
    files = sorted(candidates[0].glob("*.parquet"))
    train = _of_split(files, "train")
    test = next((part for part in (_of_split(files, name) for name in TEST_SPLITS) if part), None)
    if not train and test:
        raise DataError(f"{candidates[0]} has {test[0].name} but no train*.parquet beside it")
    return _found(
        [_read(file) for file in train or files],
        [_read(file) for file in test] if test else None,
        source_columns,
    )


def hub(repository: str, source_columns: Sequence[str] = SOURCE_COLUMNS) -> RawDataset:
    """Load a set from the Hugging Face hub, or from its cache where the hub cannot be reached.

    Raises
    ------
    DataError
        Why the hub does not serve it, as part of a sentence.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("needs the datasets package, which the extra `sim` brings") from error
    offline = bool(datasets.config.HF_HUB_OFFLINE)
    unreachable = "" if offline else _why_unreachable(datasets.config.HF_ENDPOINT)
    try:
        with _offline(datasets.config, offline or bool(unreachable)):
            splits = datasets.load_dataset(repository)
    except Exception as error:
        # Whatever the transport raised: it is a download that failed, never a fault of this program.
        reason = "HF_HUB_OFFLINE is set and it is not in the cache" if offline else unreachable
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(reason or first_line) from error
    if "train" not in splits:
        raise DataError(f"has no split 'train', only {', '.join(splits)}")
    test = next((name for name in TEST_SPLITS if name in splits), None)

    def piece(split: str) -> _Piece:
        rows = splits[split]
        image = _column(rows.column_names, IMAGE_COLUMNS, repository, "image")
        rows = rows.cast_column(image, datasets.Image(decode=False))
        table = rows.with_format("arrow")[:]
        return _Piece(table.replace_schema_metadata(rows.features.arrow_schema.metadata), split)

    return _found([piece("train")], None if test is None else [piece(test)], source_columns)


def _why_unreachable(endpoint: str) -> str:
    """Ask the hub once; its own client would retry for half a minute before it gives up.

    Returns
    -------
    The reason, or nothing where somebody answered.
    """
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=HUB_PATIENCE):
            return ""
    except HTTPError:
        return ""
    except URLError as error:
        # Certificates are the hub client's to judge: it brings its own.
        return "" if isinstance(error.reason, ssl.SSLError) else f"{endpoint} cannot be reached ({error.reason})"
    except OSError as error:
        return f"{endpoint} cannot be reached ({error})"


@contextmanager
def _offline(settings: Any, on: bool) -> Iterator[None]:
    """Make ``datasets`` look in its cache only, as HF_HUB_OFFLINE does when set before the start."""
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = on
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before


def _parquet_folders(root: Path) -> list[Path]:
    """Return the folder itself, or else ``data``, or else all inner folders that hold parquet files."""
    for folder in (root, root / "data"):
        if any(folder.glob("*.parquet")):
            return [folder]
    return sorted({file.parent for file in root.glob("[!.]*/*.parquet")})


def _of_split(files: Sequence[Path], split: str) -> list[Path]:
    # `val` must not take `validation-…`, nor `train` a `training_notes`.
    return [file for file in files if re.match(rf"{split}(?![a-z])", file.name.lower().removesuffix(".parquet"))]


def _read(file: Path) -> _Piece:
    try:
        # Not read_table: it would make columns of folder names such as `client=3`.
        with pq.ParquetFile(file) as opened:
            return _Piece(opened.read(), file.name, file.parent)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from error


def _column(names: Sequence[str], wanted: Sequence[str], where: str, what: str) -> str:
    for name in wanted:
        if name in names:
            return name
    raise DataError(f"{where} has no {what} column: expected one named {' or '.join(wanted)}, found {', '.join(names)}")


def _found(train: list[_Piece], test: list[_Piece] | None, source_columns: Sequence[str]) -> RawDataset:
    pieces = train + (test or [])
    columns: Sequence[str] = train[0].table.column_names
    label = _column(columns, LABEL_COLUMNS, train[0].name, "label")
    source = next((name for name in source_columns if name in columns), None)
    for piece in pieces:
        _column(piece.table.column_names, [label], piece.name, "label")
        if source is not None:
            _column(piece.table.column_names, [source], piece.name, "source")

    classes, labels = _labels(pieces, label)
    sources = None if source is None else _sources(pieces, source)
    items = [item for piece in pieces for item in _items(piece)]
    whole = Encoded([item for item, _ in items], [name for _, name in items], labels, sources)
    border = sum(piece.table.num_rows for piece in train)
    everything = np.arange(len(whole), dtype=np.int64)
    return RawDataset(
        classes, whole.take(everything[:border]), None if test is None else whole.take(everything[border:])
    )


def _items(piece: _Piece) -> Iterator[tuple[bytes | Path, str]]:
    name = _column(piece.table.column_names, IMAGE_COLUMNS, piece.name, "image")
    column = piece.table.column(name)
    row = 0
    for chunk in column.chunks:
        if pa.types.is_struct(chunk.type):
            contents = chunk.field("bytes").to_pylist()
            paths = chunk.field("path").to_pylist() if chunk.type.get_field_index("path") >= 0 else [None] * len(chunk)
        elif pa.types.is_binary(chunk.type) or pa.types.is_large_binary(chunk.type):
            contents, paths = chunk.to_pylist(), [None] * len(chunk)
        else:
            raise DataError(f"{piece.name}: column '{name}' holds {chunk.type}, not encoded images")
        for content, path in zip(contents, paths, strict=True):
            where = f"{piece.name}:{row}" + (f" ({path})" if path else "")
            if content is None and path and piece.folder is not None:
                yield piece.folder / path, where
            else:
                yield content or b"", where  # nothing at all is an image that cannot be read
            row += 1


def _labels(pieces: list[_Piece], column: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Give numbers to the classes of both splits: as declared, else by sorted text, else as they are."""
    numbers, texts = _values(pieces, column)
    if texts:
        classes = tuple(sorted(set(texts)))
        label_of = {name: position for position, name in enumerate(classes)}
        return classes, np.array([label_of[text] for text in texts], dtype=np.int64)
    declared = {names for piece in pieces if (names := _class_names(piece.table, column))}
    if len(declared) > 1:
        raise DataError(f"{pieces[0].name} and {pieces[-1].name} declare different class names")
    classes = declared.pop() if declared else tuple(str(i) for i in range(int(numbers.max(initial=-1)) + 1))
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(classes):
        raise DataError(
            f"{pieces[0].name}: column '{column}' has labels from {numbers.min()} to {numbers.max()}, "
            f"but there are {len(classes)} classes"
        )
    return classes, numbers


def _sources(pieces: list[_Piece], column: str) -> NDArray[np.int64]:
    """Give numbers to text sources in natural order; integers stay as they are."""
    numbers, texts = _values(pieces, column)
    source_of = {name: position for position, name in enumerate(sorted(set(texts), key=natural))}
    return np.array([source_of[text] for text in texts], dtype=np.int64) if texts else numbers


def _values(pieces: list[_Piece], column: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return a column over all pieces as integers or as texts, whichever it holds."""
    numbers: list[NDArray[np.int64]] = []
    texts: list[str] = []
    for piece in pieces:
        values = piece.table.column(column)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if values.null_count:
            raise DataError(f"{piece.name}: column '{column}' is empty in {values.null_count} rows")
        if pa.types.is_integer(values.type):
            numbers.append(values.cast(pa.int64()).to_numpy())
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            texts += values.to_pylist()
        else:
            raise DataError(f"{piece.name}: column '{column}' holds {values.type}, not integers or text")
    if numbers and texts:
        raise DataError(f"column '{column}' holds integers in one file and text in another")
    return (np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)), texts


def _class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """Return the names that ``datasets`` left in the schema for a ClassLabel column."""
    metadata = table.schema.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return ()
    return tuple(names)
