"""Everything that one client uses for all rounds of a run: its images by task, the model, the method, the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet, ImageSet, Shard
from vitfleet.data.tasks import assign_classes_to_tasks, draw_task_order
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.fleet.build import build_components, build_net
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.flower.transport.payloads import RunSpec
from vitfleet.message import Tensors
from vitfleet.training.evaluator import Evaluator
from vitfleet.training.execution.settings import set_up_execution


@dataclass(frozen=True)
class LocalTasks:
    """A client's images on its training device, selected by task."""

    data: DataSet
    class_to_task: Tensor | None  # the task of each class, ``[classes]``; ``None`` without tasks
    task_order: Sequence[int]  # the tasks in the order in which the client learns them
    # Whether the client trains on its images of all tasks up to the current one: see ``Method.accumulates_tasks``
    accumulate: bool

    def train_shard(self, task_index: int) -> Shard:
        """Return the images to train on in a task."""
        first = 0 if self.accumulate else task_index
        indices = [self._indices(self.data.train, index) for index in range(first, task_index + 1)]
        return Shard(self.data.train, torch.cat(indices))

    def evaluate(self, evaluator: Evaluator, weights: Tensors, task_index: int) -> EvalResult:
        """Evaluate a model on the test images of a task, of which there may be none."""
        indices = self._indices(self.data.test, task_index)
        if not len(indices):
            return EvalResult(0, 0)
        scores = evaluator.evaluate(weights, self.data.test, indices)
        return EvalResult(int(scores.correct.sum()), len(indices))

    def _indices(self, images: ImageSet, task_index: int) -> Tensor:
        if self.class_to_task is None:
            return torch.arange(len(images), device=images.labels.device)
        return torch.nonzero(self.class_to_task[images.labels] == self.task_order[task_index]).flatten()


@dataclass(frozen=True)
class ClientSetup:
    """What a client needs to train and evaluate in a run."""

    config: Config
    runtime: ClientRuntime
    tasks: LocalTasks

    @property
    def device(self) -> torch.device:
        """The training device."""
        return self.runtime.trainer.machine.device


def set_up_client(
    config: Config, run_spec: RunSpec, client: int, data: DataSet, machine_config: MachineConfig
) -> ClientSetup:
    """Build a client's model, method and trainer, and move its images to the training device."""
    classes = len(run_spec.classes)
    net = build_net(config, classes, run_spec.channels, run_spec.image_size)
    machine = set_up_execution(machine_config, net.embed_dim)
    class_to_task, task_order = None, list[int]()
    if config.data.tasks is not None:  # server and clients derive the same tasks from the seed
        class_to_task = torch.from_numpy(assign_classes_to_tasks(config.data.tasks, config.seed, classes))
        class_to_task = class_to_task.to(machine.device)
        task_order = draw_task_order(config.data.tasks, config.seed, client).tolist()
    known = class_to_task if config.task_known else None
    components = build_components(config, net, classes, machine, known)
    net.drop_weights()  # the server sends all weights that a client uses
    evaluator = Evaluator(components.net, components.trainer.preprocess, machine, config.eval.batch_size, known)
    tasks = LocalTasks(data.to(machine.device), class_to_task, task_order, components.method.accumulates_tasks)

    def evaluate_tasks(weights: Tensors, client_tasks: Sequence[ClientTask]) -> list[EvalResult]:
        return [tasks.evaluate(evaluator, weights, task_index) for _, task_index in client_tasks]

    runtime = ClientRuntime(components.method, components.trainer, config.seed, evaluate_tasks)
    return ClientSetup(config, runtime, tasks)
