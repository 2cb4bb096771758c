"""The round loop: run a round, write its record, checkpoint, until the last round or until a callback stops it."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitfleet.files import RECORDS_FILE, SUMMARY_FILE, TIMINGS_FILE, read_json
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.callbacks import Callback, make_callbacks
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.evaluate import continual, incremental
from vitfleet.run.evaluate.metric_context import with_metrics
from vitfleet.run.output.model_file import save_server_model
from vitfleet.run.output.summary import write_summary
from vitfleet.run.output.trackers import Trackers, scalars_of
from vitfleet.run.records import LineFile, RoundRecord, read_records
from vitfleet.run.round import run_next, with_solved_head
from vitfleet.run.state import RunState


@dataclass(frozen=True)
class RunResult:
    """A finished run: its last state and its summary."""

    state: RunState
    summary: dict[str, Any]


class _RoundLog:
    """Appends rounds to ``records.jsonl``, ``timings.jsonl`` and the trackers.

    Rounds after the last checkpoint are removed when it is opened: a resumed run repeats them.
    """

    def __init__(self, context: RunContext, state: RunState) -> None:
        latest = context.checkpoints.latest
        self._records = LineFile(context.folder / RECORDS_FILE, latest.records_length if latest else 0)
        self._timings = LineFile(context.folder / TIMINGS_FILE, latest.timings_length if latest else 0)
        next_round = 0 if state.awaits_start else state.round + 1
        self._trackers = Trackers(context.config, context.folder, next_round)

    def close(self) -> None:
        """Close the files and the trackers."""
        self._records.close()
        self._timings.close()
        self._trackers.close()

    def append(self, record: RoundRecord, seconds: float, warm_up_seconds: float) -> None:
        """Write a round, with its duration, and how much of that compiling and capturing steps took."""
        self._records.append(record.line())
        timing = {"round": record.round, "seconds": seconds, "warm_up_seconds": warm_up_seconds}
        self._timings.append(json.dumps(timing))
        self._trackers.add(scalars_of(record), record.round)

    def replace_last(self, previous: RoundRecord, record: RoundRecord) -> None:
        """Replace the last round's record by one that has more metrics, or another head."""
        if record == previous:
            return
        self._records.replace_last(record.line())
        sent = scalars_of(previous)
        new = {name: value for name, value in scalars_of(record).items() if sent.get(name) != value}
        self._trackers.add(new, record.round)

    def lengths(self) -> tuple[int, int]:
        """Return the bytes of the records and of the timings."""
        return self._records.length(), self._timings.length()


def run_rounds(
    context: RunContext,
    state: RunState | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = NO_PROGRESS,
) -> RunResult:
    """Run the remaining rounds, by default after the last checkpoint; return the run's last state and its summary.

    A run that was killed, at any moment, resumes from its last checkpoint and ends like one that was never interrupted.
    ``callbacks`` are called in addition to those of the configuration; ``progress`` shows what happens within each
    round.
    """
    state = load_state(context) if state is None else state
    callbacks = [*make_callbacks(context.config), *callbacks]
    if context.has_remote_clients and context.config.data.tasks is None:  # tasks are compared with the initial model
        context.net.drop_weights()  # remote clients get them in messages
    warmup = context.trainer.runners.warmup
    warmup.progress = progress
    try:
        with closing(_RoundLog(context, state)) as log, _frozen_garbage():
            for callback in callbacks:
                if state.round or context.checkpoints.latest is not None:
                    callback.restore(context.folder, read_records(context.folder))
                callback.on_run_start(context, state)
            while not state.is_finished(context.config.rounds):
                started = time.perf_counter()
                state, record = run_next(context, state, progress)
                record = with_metrics(context, state, record, state.is_finished(context.config.rounds), progress)
                log.append(record, time.perf_counter() - started, warmup.pop_seconds())
                answers = [callback.on_round_end(state, record) for callback in callbacks]
                stop_reason = next((answer.reason for answer in answers if answer is not None), None)
                stopped, last = _stop(context, state, record, stop_reason, progress)
                if stopped.stop_reason is not None:
                    log.replace_last(record, with_metrics(context, stopped, last, True, progress))
                state = _checkpoint_if_due(context, stopped, log)
    finally:
        context.checkpoints.wait()
    return _finish(context, state, callbacks)


def follow(context: RunContext, state: RunState | None = None) -> RunState:
    """Run the remaining rounds in a process that is not the first of several. Only the first evaluates and writes."""
    state = load_state(context) if state is None else state
    while not state.is_finished(context.config.rounds):
        state, _ = _stop(context, *run_next(context, state), None)
        state = _checkpoint_if_due(context, state, None)
    return state


def _stop(
    context: RunContext, state: RunState, record: RoundRecord, reason: str | None, progress: Progress = NO_PROGRESS
) -> tuple[RunState, RoundRecord]:
    """Stop the run if the first process has a reason: then this was its last round."""
    reason = context.processes.broadcast((reason or "").encode()).decode()
    if not reason:
        return state, record
    state = replace(state, stop_reason=reason)
    is_solved = record.head is not None if context.last is None else bool(state.last_head.tensors)
    if context.config.head.solve_last and not is_solved:
        return with_solved_head(context, state, record, progress)
    return state, record


def _checkpoint_if_due(context: RunContext, state: RunState, log: _RoundLog | None) -> RunState:
    """Write a checkpoint if one is due. The first process has the log."""
    config = context.config
    kept = config.kept_rounds is not None and state.round % config.kept_rounds == 0
    is_due = kept or state.round % config.machine.checkpoint_every == 0 or state.is_finished(config.rounds)
    return _checkpoint(context, state, log) if is_due else state


def _checkpoint(context: RunContext, state: RunState, log: _RoundLog | None) -> RunState:
    changed_clients = context.fleet.changed_states()
    context.processes.barrier()  # no process reads the previous checkpoint any more
    if log is not None:
        context.checkpoints.commit(state, changed_clients, log.lengths())
        if not context.overlaps_checkpoints:
            context.checkpoints.wait()
    context.processes.barrier()
    if log is None:
        context.checkpoints.reload()
    if context.method.state_on_disk:  # free the memory of the parts
        state = replace(state, server=context.checkpoints.map_parts(state.server))
    return state


def _finish(context: RunContext, state: RunState, callbacks: Sequence[Callback]) -> RunResult:
    """Write the model and the summary."""
    more: dict[str, Any] = {**save_server_model(context, state), "execution": _execution(context)}
    if (tasks := context.config.data.tasks) is not None:
        more["continual"] = continual.summary(state.task_records, tasks.count)
        if tasks.partitioned:
            more["continual"] |= incremental.summary(state.task_records)
    if state.stop_reason is not None:
        more["stopped"] = {"round": state.round, "reason": state.stop_reason}
    for callback in callbacks:
        more |= callback.summary_entries()
    costs = context.client_costs(state.client_metrics)
    summary = write_summary(context.folder, context.config, costs, more)
    for callback in callbacks:
        callback.on_run_end(state, summary)
    return RunResult(state, summary)


def _execution(context: RunContext) -> dict[str, Any]:
    """Return how steps were executed in this session; of a run that was finished already, in its last session."""
    execution = asdict(context.trainer.execution_summary())
    written = context.folder / SUMMARY_FILE
    if execution["clients"] == "none" and written.exists():
        return {**execution, **read_json(written).get("execution", {})}
    return execution


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection.

    Otherwise a full collection visits half a million objects, which takes as long as a round on a GPU.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
