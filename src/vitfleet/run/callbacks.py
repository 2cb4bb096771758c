"""Callbacks: code that follows a run round by round, and may stop it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vitfleet.run.context import RunContext
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState


@dataclass(frozen=True)
class StopRun:
    """Returned by a callback to stop a run after the current round."""

    reason: str


class Callback:
    """Base class of callbacks. Every method does nothing by default.

    A resumed run must end like one that was never interrupted, so a callback with state of its own recomputes it from
    the records in :meth:`restore`.
    """

    def restore(self, records: Iterable[RoundRecord]) -> None:
        """Recompute the callback's state from the rounds before a resume. Called before :meth:`on_run_start`."""

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Handle the start of the run, before its first round or the first one after a resume."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        """Handle the end of a round, before its checkpoint.

        Returns
        -------
        StopRun | None
            A :class:`StopRun` ends the run: its checkpoint is written and the run counts as finished.
        """
        return None

    def summary_entries(self) -> Mapping[str, Any]:
        """Return entries to add to the run's summary."""
        return {}

    def on_run_end(self, state: RunState, summary: Mapping[str, Any]) -> None:
        """Handle the end of the run, after its summary is written."""
