"""How well tasks are learned, one after the other, and how much of them is kept.

When task m is learned, every client's own model is tried out on its own test images of its tasks: a_{m,i} is its
accuracy on its i-th. From the matrix of these, for each client and then as the mean over clients:

- average accuracy A_m = 1/m Σ_{i≤m} a_{m,i};
- forgetting F_m = 1/(m−1) Σ_{i<m} max_{i≤k<m} (a_{k,i} − a_{m,i}), what was once known and is no longer;
- backward transfer 1/(m−1) Σ_{i<m} (a_{m,i} − a_{i,i}), what later tasks did to earlier ones;
- forward transfer 1/(m−1) Σ_{1<i≤m} (a_{i−1,i} − a_{0,i}), what earlier tasks did for one before it was learned,
  against the untrained model (Lopez-Paz and Ranzato, 2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.schema import Config
from vitfleet.fleet.base import EvalRequest
from vitfleet.message import State, to_device
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.context import RunContext
from vitfleet.run.records import TaskRecord, read_records
from vitfleet.train.surgery import COUNT_NAMES, TUNING_PREFIX

Floats = NDArray[np.float64]
Rows = list[list[float | None]]


def after_round(context: RunContext, round: int, progress: Progress = NO_PROGRESS) -> TaskRecord | None:
    """Try every client's model out where a round is the last of a task; ``None`` elsewhere."""
    tasks = context.config.data.tasks
    if tasks is None or round % tasks.rounds_per_task:
        return None
    task = round // tasks.rounds_per_task
    matrix, failures = evaluate_clients(
        context, context.server, min(task + 1, tasks.count), context.last_seen, progress
    )
    initial = None
    if task == 1:
        initial, _ = evaluate_clients(context, initial_server_state(context), tasks.count, {}, progress)
    rows = [*(one.matrix for one in context.learned), matrix]
    known = initial if context.learned == [] else context.learned[0].initial
    found = figures(as_matrix(rows, tasks.count), as_rows(known, tasks.count))
    record = TaskRecord(task, matrix, initial, *found, failures)
    context.learned.append(record)
    return record


def evaluate_clients(
    context: RunContext, server: State, num_tasks: int, last_seen: Mapping[int, int], progress: Progress = NO_PROGRESS
) -> tuple[Rows, dict[str, str]]:
    """Return each client's accuracy on its own test images of its first stages, and who did not answer, and why.

    Parameters
    ----------
    heard
        The last round whose reply was taken, of each client that took part; the others have the server's model.
    """
    clients = range(context.config.fleet.clients)
    eval_request = EvalRequest(server, num_tasks, {client: last_seen.get(client) for client in clients})
    rows: Rows = [[None] * num_tasks for _ in clients]
    failures: dict[str, str] = {}
    with progress.task("trying out every client's model", len(clients)) as advance:
        for eval_reply in context.fleet.evaluate(eval_request):
            advance(1)
            if eval_reply.failure is not None:
                failures[str(eval_reply.client)] = eval_reply.failure
            else:
                rows[eval_reply.client] = [
                    one.correct / one.tested if one.tested else None for one in eval_reply.evaluations
                ]
    return rows, failures


def initial_server_state(context: RunContext) -> State:
    """Return what the server had before the first round."""
    return context.method.initial_state(to_device(context.net.initial_weights(), context.machine.device))


def as_rows(rows: Rows | None, width: int) -> Floats:
    """Return ``[clients, width]`` with NaN for what was not measured."""
    table = [[math.nan if one is None else one for one in row] for row in rows or []]
    return np.array([[*row, *[math.nan] * (width - len(row))] for row in table], dtype=np.float64)


def as_matrix(learned: Sequence[Rows], width: int) -> Floats:
    """Return ``[clients, tasks learned, width]`` from what was measured after each task."""
    return np.stack([as_rows(rows, width) for rows in learned], axis=1)


def figures(matrix: Floats, initial: Floats) -> tuple[float | None, float | None, float | None, float | None]:
    """Return average accuracy, forgetting, backward and forward transfer, each the mean over clients.

    Parameters
    ----------
    matrix
        a_{k,i} of each client, ``[clients, m, tasks]``, NaN where it was not measured.
    initial
        a_{0,i} of each client, ``[clients, tasks]``.
    """
    learned = matrix.shape[1]
    last = matrix[:, -1, :learned]
    before = range(learned - 1)
    best = [np.fmax.reduce(matrix[:, i:-1, i], axis=1) for i in before]
    return (
        _mean(last),
        _mean(_columns([best[i] - last[:, i] for i in before])),
        _mean(_columns([last[:, i] - matrix[:, i, i] for i in before])),
        _mean(_columns([matrix[:, i, i + 1] - initial[:, i + 1] for i in before])),
    )


def _columns(columns: list[Floats]) -> Floats:
    return np.stack(columns, axis=1) if columns else np.empty((0, 0))


def _mean(values: Floats) -> float | None:
    """Return the mean over clients of each one's mean; ``None`` where there is nothing to take it of."""
    means = [float(np.mean(row[~np.isnan(row)])) for row in values if not np.isnan(row).all()] if values.size else []
    return float(np.mean(means)) if means else None


def summary(folder: Path, config: Config) -> dict[str, Any] | None:
    """Sum a run of tasks up, in percent: last figures, figures by task, mean matrix, what the integrator counted."""
    if config.data.tasks is None:
        return None
    learned: list[TaskRecord] = []
    counted: dict[str, int] = {}
    for record in read_records(folder):
        if record.task:
            learned.append(record.task)
        for client in record.clients:
            for name in (*COUNT_NAMES, *(f"{TUNING_PREFIX}{name}" for name in COUNT_NAMES)):
                count = client.numbers.get(name)
                if isinstance(count, int):
                    counted[name] = counted.get(name, 0) + count
    names = ("average_accuracy", "forgetting", "backward_transfer", "forward_transfer")
    by_task = {name: [_percent(getattr(one, name)) for one in learned] for name in names}
    parquet_module = [as_rows(one.matrix, config.data.tasks.count) for one in learned]
    return {
        **{name: values[-1] if values else None for name, values in by_task.items()},
        "matrix": [[_percent(_mean(column[:, None])) for column in table.T] for table in parquet_module],
        "by_task": by_task,
        **({"steps": counted} if counted else {}),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
