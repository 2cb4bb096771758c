"""Base class of methods that hold important weights near their values after earlier tasks: EWC and MAS.

The loss of a task has a penalty c·Σ_j Ω_j (θ_j − θ*_j)² with an importance Ω_j and an anchor θ*_j for every weight of
body and head. Both are kept by the client and are never sent.

The papers measure the importance once, at the end of a task. A client of a federation does not know which of its rounds
is its last one of a task, and later the task's images are gone. So the importance is measured after every round, at
the weights that the client has just trained, and replaces the one from its previous round of the same task. When the
client takes part in a later task for the first time, what is there is consolidated: the importance from its last round
of the old task, with the model that it trained in that round as anchor. Rounds and whole tasks in which a client does
not take part change nothing. A task is no constraint on itself.

A client keeps three tensors per weight besides its model, however many tasks there are: importance and anchor of all
consolidated tasks, and the importance of its latest task (whose anchor is the model itself).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.schema import Config, TrainConfig
from vitfleet.message import Numbers, State, Tensors, add_numbers, add_prefix, with_numbers, with_prefix
from vitfleet.methods.base import ClientRoundInput, StateAfterTasks, Work
from vitfleet.methods.personal.shared_body import ClientTraining, HeadsParams, SharedBody, TrainedClient
from vitfleet.methods.reported import ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Loss, Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

_IMPORTANCE, _ANCHOR, _OFFSET = "importance.", "anchor.", "offset"
_PENALTY, _LATEST = "penalty.", "latest_importance."

Statistic: TypeAlias = Literal["square", "absolute"]

MAX_IMAGES = 16  # per step and client
MAX_NUMBERS = 2**26  # of the gradients of a step and client: 256 MiB


class PenaltyParams(HeadsParams):
    """Parameters of all methods with a quadratic penalty. Subclasses set the default."""

    penalty_weight: float = Field(1.0, ge=0, description="weight λ of the penalty")


@dataclass(frozen=True)
class Penalty:
    """The penalty of all tasks that a client has learned before its current one."""

    importance: Tensors  # Ω, by the name of the weight
    anchor: Tensors  # θ*
    offset: Tensor  # the least value of Σ_tasks Σ_j Ω_j (θ_j − θ*_j)²: 0 unless anchors of several tasks were merged

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        importance, anchor = add_prefix(_IMPORTANCE, self.importance), add_prefix(_ANCHOR, self.anchor)
        return {**importance, **anchor, _OFFSET: self.offset}


@dataclass(frozen=True)
class LearnedTasks:
    """What a client keeps of the tasks it has learned."""

    penalty: Penalty | None = None  # of all tasks but the latest one
    latest_task: int | None = None  # index of the latest task of which the client had samples
    latest_importance: Tensors = field(default_factory=dict)  # of that task; its anchor is the client's model


def learned_tensors(learned: LearnedTasks) -> dict[str, Tensor]:
    """Return what a client keeps of its tasks, as tensors of its state."""
    penalty = {} if learned.penalty is None else learned.penalty.tensors()
    latest = {} if learned.latest_task is None else {learned.latest_task: learned.latest_importance}
    return {**add_prefix(_PENALTY, penalty), **add_numbers(_LATEST, latest)}


def read_learned(client_tensors: Tensors) -> LearnedTasks:
    """Return what a client keeps of its tasks, from the tensors of its state."""
    kept, penalty = with_prefix(client_tensors, _PENALTY), None
    if kept:
        penalty = Penalty(with_prefix(kept, _IMPORTANCE), with_prefix(kept, _ANCHOR), kept[_OFFSET])
    latest = with_numbers(client_tensors, _LATEST)  # of one task, if any
    task_index = max(latest, default=None)
    return LearnedTasks(penalty, task_index, {} if task_index is None else latest[task_index])


@dataclass(frozen=True)
class PenalizedStep:
    """Follows the gradient of the cross-entropy plus ``factor``·Σ_j Ω_j (θ_j − θ*_j)²; Ω and θ* are constants."""

    factor: float

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(self.loss, batch)

    def loss(self, outputs: Outputs) -> Tensor:
        """Return the loss of a batch."""
        total = outputs.constants[_OFFSET]
        for name, weight in outputs.weights.items():
            distance = (weight - outputs.constants[_ANCHOR + name]).square()
            total = total + (outputs.constants[_IMPORTANCE + name] * distance).sum()
        return cross_entropy(outputs) + self.factor * total


@dataclass(frozen=True)
class ImportanceStep:
    """Adds up the squares or the absolute values of the gradients of single samples; it changes no weight.

    The gradient of a batch's mean does not tell those of its samples. Padding needs no care: its gradient is zero.
    """

    loss: Loss
    statistic: Statistic

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Add the gradients of one step."""
        view.keep(view.map(self.add, view.kept, view.per_sample_grad(self.loss, batch)))
        return {}

    def add(self, totals: Tensors, gradients: Tensors) -> Tensors:
        """Return the totals, which are changed in place, with a row of gradients per sample added."""
        function = torch.square if self.statistic == "square" else torch.abs
        return {name: total.add_(function(gradients[name]).sum(dim=0)) for name, total in totals.items()}


Params = TypeVar("Params", bound=PenaltyParams)


class QuadraticPenalty(SharedBody[Params]):
    """Shared body; every client has its own penalty. A subclass defines importance and consolidation."""

    needs_tasks = True
    client_metrics = (
        ClientMetric("penalized", "rounds with a penalty", "sum", form="count", most=1),
        ClientMetric("latest_task", "index of the latest task whose importance is known", form="task"),
    )
    #: The penalty's factor c for λ = 1.
    factor: ClassVar[float]

    @classmethod
    def declared_work(cls, params: Params, config: Config) -> Work:
        """Return the work with the epoch that measures the importance."""
        work = super().declared_work(params, config)
        return replace(work, epochs=work.epochs + 1)

    @abstractmethod
    def importance_step(self) -> ImportanceStep:
        """Return the step that measures the importance of each weight."""

    def importance_constants(self, job: ClientRoundInput) -> Tensors:
        """Return the constants of these steps."""
        return {}

    @abstractmethod
    def consolidate(self, penalty: Penalty | None, importance: Tensors, anchor: Tensors) -> Penalty:
        """Return the penalty of earlier tasks, ``None`` without any, with one more task that has this importance."""

    @property
    def penalized(self) -> Selection:
        """The weights that have an importance: all that train."""
        return self.parts.trainable(self.trainable)

    def learned_before(self, job: ClientRoundInput) -> LearnedTasks:
        """Return what the client keeps of its tasks; a task before the current one is consolidated."""
        if job.client_state is None:
            return LearnedTasks()
        learned = read_learned(job.client_state.tensors)
        if learned.latest_task is None or learned.latest_task == job.task_index:
            return learned
        anchor = self.penalized.take(job.client_state.tensors)
        return LearnedTasks(self.consolidate(learned.penalty, learned.latest_importance, anchor))

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train body and head with the penalty of earlier tasks; measure the importance for this one."""
        learned = self.learned_before(job)
        penalty = learned.penalty
        training = LocalTraining(weights, self.trainable, self.context.train.epochs)
        if penalty is not None:
            step = PenalizedStep(self.factor * self.params.penalty_weight)
            training = replace(training, step=step, constants=penalty.tensors())
        result = yield training
        trained = {**weights, **result.weights}
        measured = yield self.importance_training(job, trained)
        if measured.samples:
            device = next(iter(trained.values())).device
            importance = {name: (total / measured.samples).to(device) for name, total in measured.kept.items()}
            learned = LearnedTasks(penalty, job.task_index, importance)
        latest = -1 if learned.latest_task is None else learned.latest_task
        numbers = {"penalized": int(penalty is not None), "latest_task": latest}
        return TrainedClient(trained, result, numbers, learned_tensors(learned))

    def importance_training(self, job: ClientRoundInput, weights: Tensors) -> LocalTraining:
        """Return the pass over the client's images that measures the importance of each weight.

        Images are whole and not augmented. The pass costs as many operations as one epoch of training, in steps of one
        image on a CPU and of several on a GPU, which one image would leave idle.
        """
        zeros = {name: torch.zeros_like(weights[name]) for name in self.penalized}
        images = min(images_per_step(zeros), self.context.train.batch_size)
        return LocalTraining(
            weights,
            self.penalized,
            1,
            self.importance_step(),
            constants=self.importance_constants(job),
            kept=zeros,
            train=whole_images(self.context.train, images),
            augment=False,
        )

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return the state with the importance of the latest task; what is kept of others has one size."""
        latest = reported.get("latest_task")
        known = [latest] if isinstance(latest, int) and 0 <= latest < self.context.num_tasks else []
        return after_tasks([*([-1] if reported.get("penalized") else []), *known])


def images_per_step(gradients: Tensors) -> int:
    """Return how many images' gradients, of these shapes and on this device, are computed at once."""
    if next(iter(gradients.values())).device.type != "cuda":
        return 1
    return min(MAX_IMAGES, max(1, MAX_NUMBERS // sum(gradient.numel() for gradient in gradients.values())))


def whole_images(train: TrainConfig, batch_size: int) -> TrainConfig:
    """Return the settings of steps with whole images that change no weight: the optimiser needs no moments."""
    changes = {"batch_size": batch_size, "optimizer": "sgd", "momentum": 0.0, "mask_ratio": 0.0}
    return train.model_copy(update=changes)
