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
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.message import Numbers, Tensors, add_prefix, with_prefix
from vitfleet.methods.base import ClientJob
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.shared_body import HeadsParams, LocalTraining, LocalTrainingResult, SharedBody
from vitfleet.methods.weight_importance import measured_importance
from vitfleet.models.parts import Selection
from vitfleet.training.objective import Fit, Objective, Step, cross_entropy

_IMPORTANCE, _ANCHOR, _OFFSET = "importance.", "anchor.", "offset"
_PENALTY, _LATEST = "penalty.", "latest_importance."


class PenaltyParams(HeadsParams):
    """Parameters of all methods with a quadratic penalty. Subclasses set the default."""

    penalty_weight: float = Field(1.0, ge=0, description="weight λ of the penalty")


@dataclass(frozen=True)
class Penalty:
    """The penalty of all tasks that a client has learned before its current one.

    Attributes
    ----------
    importance, anchor
        Ω and θ*, by the name of the weight.
    offset
        The least value of Σ_tasks Σ_j Ω_j (θ_j − θ*_j)², a scalar; 0 unless anchors of several tasks were merged.
    """

    importance: Tensors
    anchor: Tensors
    offset: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {
            **add_prefix(_IMPORTANCE, self.importance),
            **add_prefix(_ANCHOR, self.anchor),
            _OFFSET: self.offset,
        }


@dataclass(frozen=True)
class LearnedTasks:
    """What a client keeps of the tasks it has learned.

    Attributes
    ----------
    penalty
        Of all tasks but the latest one; ``None``: there are no others.
    latest_task
        Index of the latest task of which the client had samples; ``None``: there is none.
    latest_importance
        The importance of that task. Its anchor is the client's model.
    """

    penalty: Penalty | None = None
    latest_task: int | None = None
    latest_importance: Tensors = field(default_factory=dict)


def learned_tensors(learned: LearnedTasks) -> dict[str, Tensor]:
    """Return what a client keeps of its tasks, as tensors of its state."""
    penalty = {} if learned.penalty is None else learned.penalty.tensors()
    return {
        **add_prefix(_PENALTY, penalty),
        **{f"{_LATEST}{learned.latest_task:04d}.{name}": tensor for name, tensor in learned.latest_importance.items()},
    }


def read_learned(client_tensors: Tensors) -> LearnedTasks:
    """Return what a client keeps of its tasks, from the tensors of its state."""
    penalty = None
    if _PENALTY + _OFFSET in client_tensors:
        importance = with_prefix(client_tensors, _PENALTY + _IMPORTANCE)
        anchor = with_prefix(client_tensors, _PENALTY + _ANCHOR)
        penalty = Penalty(importance, anchor, client_tensors[_PENALTY + _OFFSET])
    latest = {key.split(".", 1)[1]: tensor for key, tensor in with_prefix(client_tensors, _LATEST).items()}
    task_indices = {int(key.split(".", 1)[0]) for key in with_prefix(client_tensors, _LATEST)}
    return LearnedTasks(penalty, max(task_indices, default=None), latest)


@dataclass(frozen=True)
class PenalizedLoss:
    """Cross-entropy plus ``factor``·Σ_j Ω_j (θ_j − θ*_j)². The penalty is in the step's constants."""

    factor: float

    def __call__(self, step: Step) -> Tensor:
        """Return the loss of a step."""
        total = step.constants[_OFFSET]
        for name, weight in step.weights.items():
            distance = (weight - step.constants[_ANCHOR + name]).square()
            total = total + (step.constants[_IMPORTANCE + name] * distance).sum()
        return cross_entropy(step) + self.factor * total


Params = TypeVar("Params", bound=PenaltyParams)


class QuadraticPenalty(SharedBody[Params]):
    """Shared body; every client has its own penalty. A subclass defines importance and consolidation."""

    needs_tasks = True
    client_metrics = (
        ClientMetric("penalized", "rounds with a penalty", "sum", form="count"),
        ClientMetric("latest_task", "index of the latest task whose importance is known", form="number"),
    )
    #: The penalty's factor c for λ = 1.
    factor: ClassVar[float]

    @abstractmethod
    def importance_fit(self, job: ClientJob, weights: Tensors) -> Fit:
        """Return the pass over the client's images that measures the importance of each weight."""

    @abstractmethod
    def consolidate(self, penalty: Penalty | None, importance: Tensors, anchor: Tensors) -> Penalty:
        """Return the penalty of earlier tasks with one more task.

        Parameters
        ----------
        penalty
            ``None``: it is the first task.
        importance, anchor
            Of the task that is added, by the name of the weight.
        """

    @property
    def penalized(self) -> Selection:
        """The weights that have an importance: all that train."""
        return self.parts.trainable(self.trainable)

    def learned_before(self, job: ClientJob) -> LearnedTasks:
        """Return what the client keeps of its tasks; a task before the current one is consolidated."""
        if job.client_state is None:
            return LearnedTasks()
        learned = read_learned(job.client_state.tensors)
        if learned.latest_task is None or learned.latest_task == job.task_index:
            return learned
        anchor = self.penalized.take(job.client_state.tensors)
        return LearnedTasks(self.consolidate(learned.penalty, learned.latest_importance, anchor))

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Train body and head with the penalty of earlier tasks; measure the importance for this one."""
        learned = self.learned_before(job)
        penalty = learned.penalty
        loss = cross_entropy if penalty is None else PenalizedLoss(self.factor * self.params.penalty_weight)
        constants = {} if penalty is None else penalty.tensors()
        result = yield Fit(weights, Objective(self.trainable, loss), self.context.train.epochs, constants)
        trained = {**weights, **result.weights}
        measured = yield self.importance_fit(job, trained)
        if measured.samples:
            importance = measured_importance(measured, next(iter(trained.values())).device)
            learned = LearnedTasks(penalty, job.task_index, importance)
        numbers = {"penalized": int(penalty is not None), "latest_task": _task_number(learned)}
        return LocalTrainingResult(trained, result, numbers, learned_tensors(learned))

    def client_state_shapes(self, reported: Numbers, channels: int, image_size: int) -> Tensors:
        """Return the shapes of importance and anchor."""
        shapes = {name: torch.empty(self.parts.shapes[name], device="meta") for name in self.penalized}
        penalty = Penalty(shapes, shapes, torch.empty((), device="meta")) if reported.get("penalized") else None
        latest = reported.get("latest_task")
        if not isinstance(latest, int) or not 0 <= latest < self.context.num_tasks:
            return learned_tensors(LearnedTasks(penalty))
        return learned_tensors(LearnedTasks(penalty, latest, shapes))


def _task_number(learned: LearnedTasks) -> int:
    return -1 if learned.latest_task is None else learned.latest_task
