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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import Config
from vitfleet.message import Tensors
from vitfleet.progress import SILENCE, Progress
from vitfleet.run.evaluate import Evaluator
from vitfleet.run.records import TaskRecord, read_records
from vitfleet.run.session import Session
from vitfleet.train.surgery import COUNTS, TUNING

Floats = NDArray[np.float64]
Rows = list[list[float | None]]


def after_round(session: Session, round: int, progress: Progress = SILENCE) -> TaskRecord | None:
    """Try every client's model out where a round is the last of a task; ``None`` elsewhere."""
    tasks = session.config.data.tasks
    if tasks is None or round % tasks.rounds_per_task:
        return None
    task = round // tasks.rounds_per_task
    matrix = try_out(session, min(task + 1, tasks.count), progress)
    initial = try_out_untrained(session) if task == 1 else None
    rows = [*(one.matrix for one in session.learned), matrix]
    known = initial if session.learned == [] else session.learned[0].initial
    record = TaskRecord(task, matrix, initial, *figures(as_matrix(rows, tasks.count), as_rows(known, tasks.count)))
    session.learned.append(record)
    return record


def try_out(session: Session, stages: int, progress: Progress = SILENCE) -> Rows:
    """Return each client's accuracy on its own test images of its first stages, under its own weights."""
    evaluator, method = session.evaluator, session.method
    shared: Tensor | None = None  # clients without a state of their own have one model: it is asked everything, once
    found: Rows = []
    with progress.task("trying out every client's model", session.config.fleet.clients) as advance:
        for client in range(session.config.fleet.clients):
            own = session.fleet.own(client)
            if own is None and shared is None:
                shared, _ = evaluator.answer(method.model(session.server, session.base.tensors, None))
            if own is None and shared is not None:
                found.append(shares(evaluator, shared, client, stages))
            else:
                found.append(
                    answers(evaluator, method.model(session.server, session.base.tensors, own), client, stages)
                )
            advance(1)
    return found


def try_out_untrained(session: Session) -> Rows:
    """Return the same for the model as it was initialised, on every task."""
    device = session.machine.device
    initial = {name: tensor.to(device) for name, tensor in session.net.initial_weights().items()}
    model = session.method.model(session.method.start(initial), session.base.tensors, None)
    right, _ = session.evaluator.answer(model)
    stages = session.evaluator.stages
    return [shares(session.evaluator, right, client, stages) for client in range(session.config.fleet.clients)]


def shares(evaluator: Evaluator, right: Tensor, client: int, stages: int) -> list[float | None]:
    """Return a client's accuracy at each stage from the answers to all test images."""
    places = [torch.from_numpy(evaluator.images_of(client, stage)).to(right.device) for stage in range(stages)]
    return _means([right[place] for place in places])


def answers(evaluator: Evaluator, model: Tensors, client: int, stages: int) -> list[float | None]:
    """Return a client's accuracy at each stage: its images of all stages are asked together, in large batches."""
    places = [evaluator.images_of(client, stage) for stage in range(stages)]
    together = np.concatenate(places)
    if not len(together):
        return [None] * stages
    right, _ = evaluator.answer(model, together)
    return _means(list(torch.split(right, [len(place) for place in places])))


def _means(parts: list[Tensor]) -> list[float | None]:
    # One transfer for all of them.
    means = torch.stack([part.double().mean() for part in parts]).tolist()
    return [None if math.isnan(mean) else mean for mean in means]


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
        if record.learned:
            learned.append(record.learned)
        for client in record.clients:
            for name in (*COUNTS, *(f"{TUNING}{name}" for name in COUNTS)):
                count = client.numbers.get(name)
                if isinstance(count, int):
                    counted[name] = counted.get(name, 0) + count
    names = ("average_accuracy", "forgetting", "backward_transfer", "forward_transfer")
    by_task = {name: [_percent(getattr(one, name)) for one in learned] for name in names}
    tables = [as_rows(one.matrix, config.data.tasks.count) for one in learned]
    return {
        **{name: values[-1] if values else None for name, values in by_task.items()},
        "matrix": [[_percent(_mean(column[:, None])) for column in table.T] for table in tables],
        "by_task": by_task,
        **({"steps": counted} if counted else {}),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
