"""Read images from the Hugging Face hub and from objects of the ``datasets`` library."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from vitfleet.data.decode import RawDataset
from vitfleet.data.sources.image_folder import TEST_SPLITS, TRAIN_SPLIT
from vitfleet.data.sources.tables import ColumnNames, TablePart, find_column, read_tables
from vitfleet.errors import DataError

HUB_TIMEOUT = 5.0  # seconds to wait for the hub's first response


def read_hub(
    repository: str,
    columns: ColumnNames,
    config: str | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
) -> RawDataset:
    """Load ``owner/name`` from the hub, or from its local cache if the hub cannot be reached.

    A ``DataError`` says why it failed, without the name of the data set.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("needs the package datasets, which the extra `sim` installs") from error
    offline = bool(datasets.config.HF_HUB_OFFLINE)
    unreachable = "" if offline else _why_unreachable(datasets.config.HF_ENDPOINT)
    try:
        with _offline_mode(datasets.config, offline or bool(unreachable)):
            splits = datasets.load_dataset(*([repository] if config is None else [repository, config]))
    except Exception as error:
        # Any exception of the transport is a failed download, never an error of this program.
        reason = "HF_HUB_OFFLINE is set and it is not in the cache" if offline else unreachable
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(reason or first_line) from error
    return read_splits(splits, columns, train_split, test_split)


def read_splits(
    splits: Mapping[str, Any], columns: ColumnNames, train_split: str | None = None, test_split: str | None = None
) -> RawDataset:
    """Return a ``datasets.DatasetDict`` as a data set.

    The splits are by default ``train``, and the first of ``test``, ``valid``, ``validation`` and ``val``.
    """
    train_split = train_split or TRAIN_SPLIT
    test_split = test_split or next((name for name in TEST_SPLITS if name in splits and name != train_split), None)
    for key, name in (("train_split", train_split), ("test_split", test_split)):
        if name is not None and name not in splits:
            raise DataError(f"has no split '{name}', only {', '.join(splits)}; set data.{key}")
    train = [_to_table(splits[train_split], train_split, columns)]
    return read_tables(
        train, None if test_split is None else [_to_table(splits[test_split], test_split, columns)], columns
    )


def _to_table(rows: Any, split: str, columns: ColumnNames) -> TablePart:
    """Return a ``datasets.Dataset`` as an Arrow table of encoded images, with its features in the schema."""
    import datasets
    import pyarrow as pa

    image = find_column(rows.column_names, columns.image, split, "image")
    try:
        encoded = rows.cast_column(image, datasets.Image(decode=False))
    except (TypeError, ValueError, pa.ArrowException) as error:
        kind = type(rows.features[image]).__name__
        raise DataError(f"{split}: column '{image}' holds {kind}, not images; set data.image_column") from error
    table = encoded.with_format("arrow")[:]
    return TablePart(table.replace_schema_metadata(encoded.features.arrow_schema.metadata), split, None)


def _why_unreachable(endpoint: str) -> str:
    """Say why one request did not reach the hub; empty: it did. The hub's client would retry for half a minute."""
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT):
            return ""
    except HTTPError:
        return ""
    except URLError as error:
        # The hub's client has its own certificates and checks them itself.
        return "" if isinstance(error.reason, ssl.SSLError) else f"{endpoint} cannot be reached ({error.reason})"
    except OSError as error:
        return f"{endpoint} cannot be reached ({error})"


@contextmanager
def _offline_mode(settings: Any, on: bool) -> Iterator[None]:
    """Make ``datasets`` use its cache only, like HF_HUB_OFFLINE set before the start."""
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = on
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
