"""FedKNOW: Luopan et al., "FedKNOW: Federated Continual Learning with Signature Task Knowledge Integration at Edge".

FedViT's predecessor (2023, arXiv 2212.01738). The knowledge of a task is weights, not samples:

1. The knowledge extractor keeps, of the model that a client has trained on a task, the fraction ρ of the weights with
   the largest absolute values. All others are zero. Values and positions stay on the client.
2. The gradient restorer computes the gradient g_i of an old task i without its images: that of the distillation, at the
   temperature T, of the kept model's predictions for the images of the *current* batch. The k gradients that are most
   dissimilar to the step's gradient (largest Wasserstein distance) are the signature tasks'.
3. The gradient integrator finds the gradient nearest to the step's that has no obtuse angle with any of these, against
   forgetting. After an aggregation it does the same with the gradients before and after it, in one epoch of
   fine-tuning, against negative transfer from other clients.

Integrator and fine-tuning are FedViT's (:mod:`vitfleet.methods.continual.gradients.restorer`).

Decisions, where the papers leave it open:

- Body and head are trained together, all epochs integrated. (That FedViT freezes parts is told as its difference.)
- The weights are ranked over the whole model, body and head, biases and norms included. Public code keeps all biases
  and the head.
- Distillation compares the classes among which the old task was learned: those of its task where the task of an image
  is known, else all. The loss is the cross-entropy at temperature T without a factor T².
- The end of a task is not known in advance: knowledge is extracted after every round, from the model that the client
  has just trained, and replaces that of its previous round in the task.
- Fine-tuning trains what was aggregated: the body, with ``heads = "shared"`` the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.data.subsets import round_half_up
from vitfleet.message import Numbers, State, Tensors, add_numbers, add_prefix, label_dtype, with_numbers, with_prefix
from vitfleet.methods.base import ClientRoundInput, StateAfterTasks, Work
from vitfleet.methods.continual.gradients.projection import References, projection_counts, zero_counts
from vitfleet.methods.continual.gradients.restorer import (
    BEFORE,
    INTEGRATION_METRICS,
    IntegratedStep,
    Restorer,
    RestorerParams,
    RotatedStep,
    fine_tuning_counts,
)
from vitfleet.methods.continual.sparse_weights import expand_weights
from vitfleet.methods.personal.shared_body import ClientTraining, SharedBody, TrainedClient
from vitfleet.methods.reported import ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples, mask_other_tasks
from vitfleet.training.step import StepView


class FedKnowParams(RestorerParams):
    """Knowledge of old tasks as sparse models, distilled into reference gradients (FedKNOW)."""

    kept_share: float = Field(
        0.1, gt=0, le=1, description="fraction ρ of a task's model, its largest weights, that is kept"
    )
    temperature: float = Field(2.0, ge=0.01, le=1000, description="temperature T of the distillation")


_PREFIX, TEACHERS = "knowledge.", "teacher."


@dataclass(frozen=True)
class TaskKnowledge:
    """The kept weights of one task's model."""

    values: Tensor  # float32, [kept]
    indices: Tensor  # positions in the vector of all parameters of the model, in its order, int32, [kept], rising
    label: Tensor  # a class of the task

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {"values": self.values, "indices": self.indices, "label": self.label}


KnownTasks: TypeAlias = Mapping[int, TaskKnowledge]  # by task index


def extract_knowledge(weights: Tensors, parameters: Selection, share: float, label: Tensor) -> TaskKnowledge:
    """Return the share of a model's weights that have the largest absolute values: at least one weight.

    They are ranked over all ``parameters`` of the model; of equal values the first in its order are kept. ``label`` is
    a class of the task that it has learned.
    """
    vector = torch.cat([weights[name].detach().flatten() for name in parameters])
    ranking = vector.abs().sort(descending=True, stable=True).indices
    indices = ranking[: max(1, round_half_up(share * len(vector)))].sort().values
    return TaskKnowledge(vector[indices], indices.to(torch.int32), label)


def read_knowledge(client_tensors: Tensors) -> KnownTasks:
    """Return the knowledge in the tensors of a client's state."""
    return {index: TaskKnowledge(**task) for index, task in with_numbers(client_tensors, _PREFIX).items()}


def knowledge_tensors(known: KnownTasks) -> dict[str, Tensor]:
    """Return the knowledge as tensors of a client's state."""
    return add_numbers(_PREFIX, {index: task.tensors() for index, task in known.items()})


def teachers(known: KnownTasks, task_index: int) -> dict[str, Tensor]:
    """Return the knowledge of the tasks before ``task_index`` as constants of a training; empty if there is none.

    A task that the client missed is an absent teacher, so that all clients of a round have the same number of teachers.
    """
    tasks = [known[index].tensors() if index in known else None for index in range(task_index)]
    like = next((task for task in tasks if task is not None), None)
    if like is None:
        return {}
    empty = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    stacked = {name: torch.stack([(task or empty)[name] for task in tasks]) for name in like}
    present = torch.tensor([task is not None for task in tasks], device=like["values"].device)
    return add_prefix(TEACHERS, {**stacked, "label": stacked["label"].long(), "present": present})


@dataclass(frozen=True)
class DistilledGradients:
    """The gradients of the distillation of earlier tasks' sparse models, on the batch of the step.

    Teachers are expanded one by one: only one of them is in memory as a whole model.
    """

    shapes: tuple[tuple[str, torch.Size], ...]  # of each weight, in the order of the vector of all weights
    temperature: float
    dtype: torch.dtype | None

    def __call__(self, view: StepView, batch: Samples, selected: Tensor | None) -> References:
        """Return the gradients of all teachers, or of those with these indices."""
        known = with_prefix(view.constants, TEACHERS)
        if selected is not None:
            known = {name: view.map(torch.index_select, tensor, 0, selected) for name, tensor in known.items()}
        count, axis = known["label"].shape[-1], known["label"].dim() - 1
        rows: dict[str, Tensor] = {}

        def targets() -> Iterator[tuple[Tensor, Tensor]]:
            """Yield the logits and a class of each teacher."""
            for index in range(count):
                teacher = {name: tensor.select(axis, index) for name, tensor in known.items()}
                weights = view.map(self.expand, teacher["values"], teacher["indices"])
                (outputs,) = view.forward(batch, at=weights, all_classes=True)
                yield outputs.logits, teacher["label"]

        def loss(student: Outputs, targets: Tensor, label: Tensor) -> Tensor:
            """Return the distillation's loss. The teacher's task says which classes are compared, not the image's."""
            labels = label.expand(student.labels.shape)
            learned, taught = (mask_other_tasks(of, labels, view.class_to_task) for of in (student.logits, targets))
            return (distillation_losses(learned, taught, self.temperature) * student.sample_weight).sum()

        for index, gradient in enumerate(view.grad_of_each(loss, batch, each=targets(), all_classes=True)):
            for name, tensor in gradient.items():
                shape = (*tensor.shape[:axis], count, *tensor.shape[axis:])
                if name not in rows:
                    rows[name] = tensor.new_empty(shape, dtype=self.dtype or tensor.dtype)
                rows[name].select(axis, index).copy_(tensor)
        return References(rows, known["present"])

    def expand(self, values: Tensor, indices: Tensor) -> dict[str, Tensor]:
        """Return the weights of a teacher; those that were not kept are zero."""
        return expand_weights(values, indices, dict(self.shapes))


def distillation_losses(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy between the predictions of a model and of its teacher for each image, at a temperature.

    Classes whose logits are −∞ in both do not count.
    """
    log_predictions = (logits.float() / temperature).log_softmax(dim=-1)
    expected = (targets.float() / temperature).softmax(dim=-1)
    return -torch.where(expected > 0, expected * log_predictions, 0).sum(dim=-1)


@register_method("fedknow", FedKnowParams, title="FedKNOW")
class FedKnow(SharedBody[FedKnowParams]):
    """Knowledge extractor, gradient restorer and gradient integrator on weights."""

    needs_tasks = True
    client_metrics = (
        *INTEGRATION_METRICS,
        ClientMetric("knowledge_bytes", "bytes of kept weights, largest client", "max", form="count"),
        ClientMetric("known_tasks", "indices of the tasks whose knowledge is kept", form="tasks"),
    )

    @classmethod
    def declared_work(cls, params: FedKnowParams, config: Config) -> Work:
        """Return the work with the fine-tuning, and the passes of the kept models of all earlier tasks."""
        work = super().declared_work(params, config)
        earlier = config.num_tasks - 1
        distilled, rotated = 2 + earlier if earlier else 1, 2 if params.tune_epochs else 1
        return replace(work, epochs=params.tune_epochs + work.epochs, passes=max(distilled, rotated))

    @property
    def parameters(self) -> Selection:
        """The weights that are ranked: all parameters of the model."""
        return self.parts.trainable(self.parts.whole)

    def known_tasks(self, job: ClientRoundInput) -> KnownTasks:
        """Return what the client has kept so far."""
        return {} if job.client_state is None else read_knowledge(job.client_state.tensors)

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Fine-tune after the aggregation, train with integration, extract knowledge."""
        known = self.known_tasks(job)
        numbers: Numbers = {}
        if job.client_state is not None and self.params.tune_epochs:
            tuned = yield self.fine_tuning(weights, job.client_state.tensors)
            weights = {**weights, **tuned.weights}
            numbers = fine_tuning_counts(tuned)
        result = yield self.integrated_training(weights, teachers(known, job.task_index))
        trained = {**weights, **result.weights}
        if result.samples:
            label = job.shard.labels[0].to(self.context.device, label_dtype(self.context.num_classes))
            extracted = extract_knowledge(trained, self.parameters, self.params.kept_share, label)
            known = {**known, job.task_index: extracted}
        kept = knowledge_tensors(known)
        num_bytes = sum(tensor.nbytes for tensor in kept.values())
        numbers = {**numbers, **projection_counts(result), "knowledge_bytes": num_bytes, "known_tasks": sorted(known)}
        return TrainedClient(trained, result, numbers, kept)

    def fine_tuning(self, weights: Tensors, previous: Tensors) -> LocalTraining:
        """Return the fine-tuning of the aggregated weights, given the client's weights before the aggregation."""
        before = add_prefix(BEFORE, self.parts.trainable(self.shared).take(previous))
        counts = zero_counts(self.context.device)
        return LocalTraining(
            weights, self.shared, self.params.tune_epochs, RotatedStep(), constants=before, kept=counts
        )

    def integrated_training(self, weights: Tensors, known: Tensors) -> LocalTraining:
        """Return the training on the task: with knowledge of earlier tasks, their gradients are integrated."""
        training = LocalTraining(weights, self.trainable, self.context.train.epochs)
        if not known:
            return training
        restorer = Restorer.of_params(self.params, len(known[f"{TEACHERS}label"]))
        shapes = tuple((name, self.parts.shapes[name]) for name in self.parameters)
        distilled = DistilledGradients(shapes, self.params.temperature, restorer.dtype)
        return replace(
            training,
            step=IntegratedStep(restorer, distilled, self.params.margin),
            constants=known,
            kept=zero_counts(self.context.device),
            scratch=restorer.scratch(self.parameters.take(weights)),
        )

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return the state with knowledge of the tasks that the client reports; an invalid index does not count."""
        tasks = reported.get("known_tasks")
        indices = tasks if isinstance(tasks, list) else []
        known = {index for index in indices if isinstance(index, int) and 0 <= index < self.context.num_tasks}
        return after_tasks(sorted(known))
