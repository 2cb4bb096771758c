"""The round loop: run a round, write its record, checkpoint, until the last round or until a callback stops it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitfleet.config.schema import Config
from vitfleet.files import read_json
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run import continual
from vitfleet.run.callbacks import Callback, make_callbacks
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.measure import with_metrics
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.round import run_round
from vitfleet.run.round_log import RoundLog
from vitfleet.run.server_model import save_server_model
from vitfleet.run.state import RunState
from vitfleet.run.summary import write_summary


@dataclass(frozen=True)
class RunResult:
    """A finished run: its last state and its summary."""

    state: RunState
    summary: dict[str, Any]


def run_rounds(
    context: RunContext,
    state: RunState | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = NO_PROGRESS,
) -> RunResult:
    """Run the remaining rounds and return the run's last state and its summary.

    A run that was killed, at any moment, resumes from its last checkpoint and ends like one that was never
    interrupted.

    Parameters
    ----------
    state
        Where to start. ``None``: after the last checkpoint.
    callbacks
        Called in addition to those of the configuration.
    progress
        Shows the progress within each round.
    """
    state = load_state(context) if state is None else state
    callbacks = [*make_callbacks(context.config), *callbacks]
    _release_initial_weights(context)
    warmup = context.trainer.runners.warmup
    warmup.progress = progress
    try:
        with RoundLog(context, state) as log, _frozen_garbage():
            _start_callbacks(context, state, callbacks)
            while not state.is_finished(context.config.rounds):
                started = time.perf_counter()
                state, record = run_round(context, state, state.round + 1, progress)
                record = with_metrics(context, state, record, state.is_finished(context.config.rounds), progress)
                log.append(record, time.perf_counter() - started, warmup.pop_seconds())
                stop_reason = _stop_reason(callbacks, state, record)
                if stop_reason is not None:
                    log.replace_last(record, with_metrics(context, state, record, True, progress))
                state = _after_round(context, state, stop_reason, log)
    finally:
        context.checkpoints.wait()
    return _finish(context, state, callbacks)


def follow(context: RunContext, state: RunState | None = None) -> RunState:
    """Run the remaining rounds in a process that is not the first of several. Only the first evaluates and writes."""
    state = load_state(context) if state is None else state
    while not state.is_finished(context.config.rounds):
        state, _ = run_round(context, state, state.round + 1)
        state = _after_round(context, state, None, None)
    return state


def _after_round(context: RunContext, state: RunState, stop_reason: str | None, log: RoundLog | None) -> RunState:
    """Stop the run if there is a reason, and write a checkpoint if one is due. The first process has the log."""
    reason = context.processes.broadcast((stop_reason or "").encode()).decode()
    if reason:
        state = replace(state, stop_reason=reason)
    return _checkpoint(context, state, log) if _checkpoint_due(context.config, state) else state


def _checkpoint_due(config: Config, state: RunState) -> bool:
    kept = config.kept_rounds is not None and state.round % config.kept_rounds == 0
    return kept or state.round % config.machine.checkpoint_every == 0 or state.is_finished(config.rounds)


def _checkpoint(context: RunContext, state: RunState, log: RoundLog | None) -> RunState:
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


def _start_callbacks(context: RunContext, state: RunState, callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        if state.round:
            callback.restore(context.folder, read_records(context.folder))
        callback.on_run_start(context, state)


def _stop_reason(callbacks: Sequence[Callback], state: RunState, record: RoundRecord) -> str | None:
    """Call every callback and return the first reason to stop the run."""
    answers = [callback.on_round_end(state, record) for callback in callbacks]
    return next((answer.reason for answer in answers if answer is not None), None)


def _finish(context: RunContext, state: RunState, callbacks: Sequence[Callback]) -> RunResult:
    """Write the model and the summary."""
    more: dict[str, Any] = {**save_server_model(context, state), "execution": _execution(context)}
    if (continual_summary := continual.summary(context.folder, context.config)) is not None:
        more["continual"] = continual_summary
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
    written = context.folder / "summary.json"
    if execution["clients"] == "none" and written.exists():
        return {**execution, **read_json(written).get("execution", {})}
    return execution


def _release_initial_weights(context: RunContext) -> None:
    """Free the model's initial weights where they are not needed again: remote clients get them in messages."""
    if context.has_remote_clients and context.config.data.tasks is None:  # tasks are compared with the initial model
        context.net.drop_weights()


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
