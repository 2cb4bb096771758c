"""The matrix of accuracies of a run on tasks, computed again from the models that were kept after each task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.errors import UserError
from vitfleet.files import MACHINE_FILE
from vitfleet.fleet.base import ClientTask
from vitfleet.inference.stored_models import StoredModels
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.checkpoints.manifest import kept_folder
from vitfleet.run.checkpoints.store import StoredStates
from vitfleet.run.clients import open_partition, training_clients
from vitfleet.run.evaluate.accuracy import FleetEvaluator
from vitfleet.run.evaluate.continual import ContinualMetrics, Rows, as_array, as_matrix, compute_metrics
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.trainer import preprocess_for


@dataclass(frozen=True)
class TaskMatrix:
    """Accuracies after each task, 0…1.

    Attributes
    ----------
    by_task
        After each task m, for each client, its accuracy on its own test images of its first m + 1 tasks.
    metrics
        Average accuracy, forgetting and backward transfer. Forward transfer needs the untrained model, which is not
        kept.
    """

    by_task: list[Rows]
    metrics: ContinualMetrics

    def means(self) -> list[list[float | None]]:
        """Return the mean over clients: one row per task learned, one column per task; ``None``: not measured."""
        count = len(self.by_task)
        tables = [as_array(rows, count) for rows in self.by_task]
        return [
            [None if np.isnan(column).all() else float(np.nanmean(column)) for column in table.T] for table in tables
        ]


def recompute_matrix(folder: Path, config: Config, data: DataSet, progress: Progress = NO_PROGRESS) -> TaskMatrix:
    """Evaluate the model of every client after every task on the client's own test images."""
    tasks = config.data.tasks
    if tasks is None:
        raise UserError(f"{folder}: is not a run on tasks (data.tasks)")
    by_task = []
    with progress.task("evaluating the models after each task", tasks.count) as advance:
        for task in range(1, tasks.count + 1):
            by_task.append(_evaluate_after(folder, config, data, task, min(task + 1, tasks.count)))
            advance(1)
    matrix = as_matrix(by_task, tasks.count)
    unknown = np.full((matrix.shape[0], tasks.count), np.nan)
    return TaskMatrix(by_task, compute_metrics(matrix, unknown))


def _evaluate_after(folder: Path, config: Config, data: DataSet, task: int, evaluated_tasks: int) -> Rows:
    """Return each client's accuracies on its first tasks, with the models after so many tasks."""
    kept = kept_folder(folder, task)
    if not kept.is_dir():
        raise UserError(
            f"{folder}: the models after task {task} were not kept; train with -o data.tasks.keep_models=true"
        )
    # A CPU that computes in the precision of a run that was evaluated on a CPU; else in float32.
    machine_config = MachineConfig.model_validate_json((folder / MACHINE_FILE).read_text())
    bf16 = machine_config.device == "cpu" and machine_config.precision == "bf16"
    machine = ExecutionSettings(torch.device("cpu"), bf16)
    models = StoredModels.open(folder, config, StoredStates.of_folder(kept), machine)
    evaluator = FleetEvaluator(
        models.net,
        preprocess_for(models.net, machine.device),
        data.test,
        open_partition(config, data, folder).test,
        machine,
        config.eval,
        config.seed,
        models.class_to_task,
    )
    rows: Rows = [[None] * evaluated_tasks for _ in range(config.fleet.clients)]
    for client in training_clients(config):
        wanted = [ClientTask(client, index) for index in range(evaluated_tasks)]
        results = evaluator.evaluate_clients(models.client_weights(client), wanted)
        rows[client] = [result.correct / result.tested if result.tested else None for result in results]
    return rows
