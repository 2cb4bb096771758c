"""Class-incremental learning: how well the server's model does on the classes of all tasks so far.

All clients learn the same tasks in the same order (``data.tasks.partitioned``). When task m is learned, the server's
model is evaluated on all test images of the classes of tasks 1 … m, and only these classes are candidates. With
``scenario = "class"`` the model is not told of which task an image is; how well it does if it is told is measured
beside it. With the accuracy a_{m,i} on the test images of task i:

- accuracy A_m, on all these images together;
- average incremental accuracy 1/m Σ_{k≤m} A_k;
- forgetting 1/(m−1) Σ_{i<m} max_{i≤k<m} (a_{k,i} − a_{m,i});
- backward transfer 1/(m−1) Σ_{i<m} (a_{m,i} − a_{i,i}).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfleet.data.tasks import assign_classes_to_tasks, draw_task_order
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.context import RunContext
from vitfleet.run.evaluate.continual import compute_metrics
from vitfleet.run.records import TaskRecord, TaskScores
from vitfleet.run.state import RunState
from vitfleet.training.samples import mask_other_tasks


def evaluate_task(context: RunContext, state: RunState, progress: Progress = NO_PROGRESS) -> TaskRecord | None:
    """Evaluate the server's model if the state is after the last round of a task; otherwise return ``None``."""
    tasks, data = context.config.data.tasks, context.data
    assert tasks is not None
    if state.round % tasks.rounds_per_task:
        return None
    task = state.round // tasks.rounds_per_task
    class_to_task = torch.from_numpy(assign_classes_to_tasks(tasks, context.config.seed, len(data.classes)))
    learned = draw_task_order(tasks, context.config.seed, client=0)[:task].tolist()
    weights = context.method.model_weights(state.server, context.base.tensors, None)
    labels = data.test.labels.cpu()
    index = torch.isin(class_to_task[labels], torch.tensor(learned)).nonzero()[:, 0]
    labels = labels[index]
    with progress.task(f"the classes of {task} tasks: evaluation", 1):
        logits = context.evaluator.logits(weights, index).float().cpu()
    earlier = state.task_records
    with_task = _scores(
        [record.with_task for record in earlier if record.with_task is not None],
        *_count(mask_other_tasks(logits, labels, class_to_task), labels, class_to_task, learned),
    )
    if context.config.task_known:
        return _record(task, with_task, None)
    unseen = ~torch.isin(class_to_task, torch.tensor(learned))
    counts = _count(logits.masked_fill(unseen, -torch.inf), labels, class_to_task, learned)
    return _record(task, _scores([scores_of(record) for record in earlier], *counts), with_task)


def scores_of(record: TaskRecord) -> TaskScores:
    """Return the scores of the server's model in a record."""
    return TaskScores(
        record.matrix[0],
        record.average_accuracy,
        record.incremental_accuracy,
        record.forgetting,
        record.backward_transfer,
    )


def _record(task: int, scores: TaskScores, with_task: TaskScores | None) -> TaskRecord:
    return TaskRecord(
        task,
        [scores.accuracies],
        None,
        scores.average_accuracy,
        scores.forgetting,
        scores.backward_transfer,
        incremental_accuracy=scores.incremental_accuracy,
        with_task=with_task,
    )


def _count(
    logits: Tensor, labels: Tensor, class_to_task: Tensor, learned: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return how many test images of each learned task are predicted correctly, and how many there are."""
    correct, of_task = logits.argmax(dim=1) == labels, class_to_task[labels]
    return [int(correct[of_task == task].sum()) for task in learned], [int((of_task == task).sum()) for task in learned]


def _scores(earlier: Sequence[TaskScores], correct: Sequence[int], tested: Sequence[int]) -> TaskScores:
    """Return the scores after a task, given those after the tasks before."""
    count = len(tested)
    row = [right / images if images else None for right, images in zip(correct, tested, strict=True)]
    accuracy = sum(correct) / sum(tested) if sum(tested) else None
    rows = [
        [math.nan if value is None else value for value in known] for known in (*(s.accuracies for s in earlier), row)
    ]
    matrix = np.array([[*known, *[math.nan] * (count - len(known))] for known in rows])
    metrics = compute_metrics(matrix[None], np.full((1, count), math.nan))
    measured = [value for value in (*(s.average_accuracy for s in earlier), accuracy) if value is not None]
    average = fmean(measured) if measured else None
    return TaskScores(row, accuracy, average, metrics.forgetting, metrics.backward_transfer)


def summary(task_records: Sequence[TaskRecord]) -> dict[str, Any]:
    """Return what the part ``continual`` of a summary has besides that of any run on tasks."""
    with_task = [record.with_task for record in task_records if record.with_task is not None]
    more: dict[str, Any] = {"incremental_accuracy": task_records[-1].incremental_accuracy if task_records else None}
    if with_task:
        last = with_task[-1]
        more["with_task"] = {
            "average_accuracy": last.average_accuracy,
            "incremental_accuracy": last.incremental_accuracy,
            "forgetting": last.forgetting,
            "backward_transfer": last.backward_transfer,
            "matrix": [
                [*scores.accuracies, *[None] * (len(with_task) - len(scores.accuracies))] for scores in with_task
            ],
            "by_task": {"average_accuracy": [scores.average_accuracy for scores in with_task]},
        }
    return more
