"""A log that strangers cannot fill the disk with."""

from __future__ import annotations

import logging

MAX_RECORDS = 200  # a record with its traceback takes about 5 kB


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes the first records to the standard error, and one line that says that the rest is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.records = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record if it is one of the first."""
        self.records += 1
        if self.records <= MAX_RECORDS:
            super().emit(record)
        elif self.records == MAX_RECORDS + 1:
            self.stream.write(f"{MAX_RECORDS} records were written: no more are until the next start\n")
            self.flush()
