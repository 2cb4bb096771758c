"""What is written after every round: its record, its wall-clock time, and the scalars of the trackers."""

from __future__ import annotations

import json

from vitfleet.run.context import RunContext
from vitfleet.run.records import LineFile, RoundRecord
from vitfleet.run.state import RunState
from vitfleet.run.trackers import Trackers, scalars_of


class RoundLog:
    """Appends rounds to ``records.jsonl``, ``timings.jsonl`` and the trackers; used as a context manager.

    Rounds after the last checkpoint are removed when it is opened: a resumed run repeats them.
    """

    def __init__(self, context: RunContext, state: RunState) -> None:
        latest = context.checkpoints.latest
        self._records = LineFile(context.folder / "records.jsonl", latest.records_length if latest else 0)
        self._timings = LineFile(context.folder / "timings.jsonl", latest.timings_length if latest else 0)
        self._trackers = Trackers(context.config, context.folder, state.round + 1)

    def __enter__(self) -> RoundLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._records.close()
        self._timings.close()
        self._trackers.close()

    def append(self, record: RoundRecord, seconds: float, warm_up_seconds: float) -> None:
        """Write a round.

        Parameters
        ----------
        seconds, warm_up_seconds
            Duration of the round, and how much of it compiling and capturing steps took.
        """
        self._records.append(record.line())
        timing = {"round": record.round, "seconds": seconds, "warm_up_seconds": warm_up_seconds}
        self._timings.append(json.dumps(timing))
        self._trackers.add(scalars_of(record), record.round)

    def replace_last(self, previous: RoundRecord, record: RoundRecord) -> None:
        """Replace the last round's record by one that has more metrics."""
        if record == previous:
            return
        self._records.replace_last(record.line())
        sent = scalars_of(previous)
        new = {name: value for name, value in scalars_of(record).items() if name not in sent}
        self._trackers.add(new, record.round)

    def lengths(self) -> tuple[int, int]:
        """Return the bytes of the records and of the timings."""
        return self._records.length(), self._timings.length()
