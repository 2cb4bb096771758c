"""Continual learning: how well tasks are learned one after the other, and how much of them is retained.

When task m is learned, every client's own model is evaluated on the client's test images of its tasks: a_{m,i} is its
accuracy on its i-th task. The metrics follow from the matrix of these, for each client and then as the mean over
clients:

- average accuracy A_m = 1/m Σ_{i≤m} a_{m,i};
- forgetting F_m = 1/(m−1) Σ_{i<m} max_{i≤k<m} (a_{k,i} − a_{m,i}), the loss against the best accuracy so far;
- backward transfer 1/(m−1) Σ_{i<m} (a_{m,i} − a_{i,i}), the effect of later tasks on earlier ones;
- forward transfer 1/(m−1) Σ_{1<i≤m} (a_{i−1,i} − a_{0,i}), the effect of earlier tasks on one before it is learned,
  relative to the untrained model (Lopez-Paz and Ranzato, 2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitfleet.fleet.base import EvalRequest
from vitfleet.message import State
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.clients import training_clients
from vitfleet.run.context import RunContext
from vitfleet.run.records import TaskRecord
from vitfleet.run.state import RunState

Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = list[list[float | None]]


class ContinualMetrics(NamedTuple):
    """Means over clients, 0…1; ``None`` where nothing was measured. All but the first need two tasks."""

    average_accuracy: float | None
    forgetting: float | None
    backward_transfer: float | None
    forward_transfer: float | None


def evaluate_task(context: RunContext, state: RunState, progress: Progress = NO_PROGRESS) -> TaskRecord | None:
    """Evaluate every client's model if the state is after the last round of a task; otherwise return ``None``."""
    tasks = context.config.data.tasks
    if tasks is None or state.round % tasks.rounds_per_task:
        return None
    task = state.round // tasks.rounds_per_task
    evaluated_tasks = min(task + 1, tasks.count)
    matrix, failures = evaluate_clients(context, state.server, evaluated_tasks, state.last_seen, progress)
    initial = None
    if task == 1:
        initial, _ = evaluate_clients(context, context.initial_server_state(), tasks.count, {}, progress)
    first_initial = state.task_records[0].initial if state.task_records else initial
    rows = [*(record.matrix for record in state.task_records), matrix]
    metrics = compute_metrics(as_matrix(rows, tasks.count), as_array(first_initial, tasks.count))
    return TaskRecord(task, matrix, initial, *metrics, failures)


def evaluate_clients(
    context: RunContext, server: State, num_tasks: int, last_seen: Mapping[int, int], progress: Progress = NO_PROGRESS
) -> tuple[Rows, dict[str, str]]:
    """Return each training client's accuracy on its own test images of its first tasks, and why clients failed.

    A client that is not in ``last_seen`` has the server's model.
    """
    clients = training_clients(context.config)
    request = EvalRequest(server, num_tasks, {client: last_seen.get(client) for client in clients})
    rows: Rows = [[None] * num_tasks for _ in range(context.config.fleet.clients)]
    failures: dict[str, str] = {}
    with progress.task("evaluating every client's model", len(clients)) as advance:
        for reply in context.fleet.evaluate(request):
            advance(1)
            if reply.failure is not None:
                failures[str(reply.client)] = reply.failure
                continue
            rows[reply.client] = [
                result.correct / result.tested if result.tested else None for result in reply.evaluations
            ]
    return rows, failures


def as_array(rows: Rows | None, width: int) -> Floats:
    """Return ``[clients, width]``, NaN where nothing was measured."""
    table = [[math.nan if value is None else value for value in row] for row in rows or []]
    return np.array([[*row, *[math.nan] * (width - len(row))] for row in table], dtype=np.float64)


def as_matrix(rows_by_task: Sequence[Rows], width: int) -> Floats:
    """Return ``[clients, tasks learned, width]`` from what was measured after each task."""
    return np.stack([as_array(rows, width) for rows in rows_by_task], axis=1)


def compute_metrics(matrix: Floats, initial: Floats) -> ContinualMetrics:
    """Return the metrics of the module's docstring after the last task in the matrix.

    ``matrix`` has a_{k,i} of each client, ``[clients, m, tasks]``, NaN where it was not measured; ``initial`` has
    a_{0,i}, ``[clients, tasks]``.
    """
    learned = matrix.shape[1]
    last = matrix[:, -1, :learned]
    earlier = range(learned - 1)
    best = [np.fmax.reduce(matrix[:, i:-1, i], axis=1) for i in earlier]
    return ContinualMetrics(
        average_accuracy=_mean(last),
        forgetting=_mean(_columns([best[i] - last[:, i] for i in earlier])),
        backward_transfer=_mean(_columns([last[:, i] - matrix[:, i, i] for i in earlier])),
        forward_transfer=_mean(_columns([matrix[:, i, i + 1] - initial[:, i + 1] for i in earlier])),
    )


def _columns(columns: list[Floats]) -> Floats:
    return np.stack(columns, axis=1) if columns else np.empty((0, 0))


def _mean(values: Floats) -> float | None:
    """Return the mean over clients of each client's mean; ``None`` if nothing was measured."""
    means = [float(np.mean(row[~np.isnan(row)])) for row in values if not np.isnan(row).all()] if values.size else []
    return float(np.mean(means)) if means else None


def summary(task_records: Sequence[TaskRecord], num_tasks: int) -> dict[str, Any]:
    """Return the part ``continual`` of a run's summary: what holds after the last task, and after each."""
    by_task = {name: [getattr(record, name) for record in task_records] for name in ContinualMetrics._fields}
    matrices = [as_array(record.matrix, num_tasks) for record in task_records]
    return {
        **{name: values[-1] if values else None for name, values in by_task.items()},
        "matrix": [[_mean(column[:, None]) for column in matrix.T] for matrix in matrices],
        "by_task": by_task,
    }
