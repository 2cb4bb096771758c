"""What a FedWEIT client keeps of its tasks, and its state as a value: base weights, the latest task, earlier tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vitfleet.message import Number, State, Tensors, add_prefix, with_prefix
from vitfleet.methods.continual.decomposition import (
    ADAPTIVE,
    ATTENTION,
    KNOWLEDGE,
    MASK,
    PAST_ADAPTIVE,
    PAST_MASK,
    TARGET,
    masked,
)
from vitfleet.methods.continual.sparse_weights import OTHERS_MULTIPLE, SparseVector
from vitfleet.models.parts import Selection

TRANSFER, UNDIVIDED, PAST = "transfer.", "undivided.", "past."
# Numbers that are reported; the first two are also kept.
LATEST_TASK, KEPT, PAST_TASKS, OTHERS = "latest_task", "adaptive_kept", "past_tasks", "adaptive_received"


@dataclass(frozen=True)
class TaskWeights:
    """What the decomposed weights of one task consist of, besides the base weights B; by name of the weight.

    Attributes
    ----------
    mask, adaptive
        m_t and A_t.
    transfer
        Σ_c α_c A_c, after the last training of the task; empty without other clients' weights.
    """

    mask: Tensors
    adaptive: Tensors
    transfer: Tensors = field(default_factory=dict)

    def compose(self, base: Tensors, transfer: bool = True) -> dict[str, Tensor]:
        """Return B ⊙ σ(m_t) + A_t, and Σ_c α_c A_c added to it unless it is left out."""
        composed = {name: masked(base[name], mask) + self.adaptive[name] for name, mask in self.mask.items()}
        added = self.transfer if transfer else {}
        return {name: weight + added[name] if name in added else weight for name, weight in composed.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {
            **add_prefix(MASK, self.mask),
            **add_prefix(ADAPTIVE, self.adaptive),
            **add_prefix(TRANSFER, self.transfer),
        }

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> TaskWeights:
        """Return the weights whose :meth:`tensors` are among these."""
        return cls(*(with_prefix(tensors, prefix) for prefix in (MASK, ADAPTIVE, TRANSFER)))


@dataclass(frozen=True)
class PastTask:
    """A task before the client's latest one.

    Attributes
    ----------
    weights
        Its mask, transfer and adaptive weights. The adaptive weights are still trained, to make up for changes of B.
    target
        θ*, B ⊙ σ(m) + A after the client's last training of the task.
    undivided
        All weights of the model that are not decomposed, after that training.
    """

    weights: TaskWeights
    target: Tensors
    undivided: Tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        kept = add_prefix(TARGET, self.target), add_prefix(UNDIVIDED, self.undivided)
        return {**self.weights.tensors(), **kept[0], **kept[1]}

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> PastTask:
        """Return the task whose :meth:`tensors` these are."""
        return cls(TaskWeights.of_tensors(tensors), with_prefix(tensors, TARGET), with_prefix(tensors, UNDIVIDED))


@dataclass(frozen=True)
class ClientTasks:
    """The state of a client.

    Attributes
    ----------
    model
        Base weights B, and the weights that are not decomposed, after the client's last training.
    latest_task
        The index of the task that it trained last; −1: none.
    latest
        The weights of that task.
    attention
        α of that task, by name of the weight, ``[others]``.
    knowledge
        The adaptive weights of other clients that it uses, as it received them.
    past
        The tasks before the latest one, by index, in rising order.
    kept
        How many adaptive weights the client sent in its last round.
    """

    model: Tensors
    latest_task: int = -1
    latest: TaskWeights | None = None
    attention: Tensors = field(default_factory=dict)
    knowledge: Sequence[SparseVector] = ()
    past: Mapping[int, PastTask] = field(default_factory=dict)
    kept: int = 0

    def reported(self) -> dict[str, Number]:
        """Return the numbers that the client reports."""
        return {**self._numbers(), PAST_TASKS: len(self.past), OTHERS: len(self.knowledge)}

    def _numbers(self) -> dict[str, Number]:
        return {LATEST_TASK: self.latest_task, KEPT: self.kept}

    def state(self) -> State:
        """Return the client's state."""
        latest = {} if self.latest is None else self.latest.tensors()
        tensors = {**self.model, **latest, **add_prefix(ATTENTION, self.attention)}
        for row, vector in enumerate(self.knowledge):
            tensors |= vector.tensors(f"{KNOWLEDGE}{row:04d}.")
        for task_index, task in self.past.items():
            tensors |= add_prefix(f"{PAST}{task_index:04d}.", task.tensors())
        return State(tensors, self._numbers())

    @classmethod
    def of_state(cls, state: State, whole: Selection) -> ClientTasks:
        """Return the state whose :meth:`state` this is."""
        latest_task, kept = state.numbers[LATEST_TASK], state.numbers[KEPT]
        assert isinstance(latest_task, int)
        assert isinstance(kept, int)
        past = with_prefix(state.tensors, PAST)
        indices = sorted({name.split(".", 1)[0] for name in past})
        return cls(
            whole.take(state.tensors),
            latest_task,
            TaskWeights.of_tensors(state.tensors) if latest_task >= 0 else None,
            with_prefix(state.tensors, ATTENTION),
            read_knowledge(state.tensors),
            {int(index): PastTask.of_tensors(with_prefix(past, f"{index}.")) for index in indices},
            kept,
        )

    def tasks_before(self, task_index: int, decomposed: Selection) -> dict[int, PastTask]:
        """Return all tasks but the one that begins or continues; the latest one becomes a past one where it is over."""
        if self.latest is None or self.latest_task == task_index:
            return dict(self.past)
        base = decomposed.take(self.model)
        undivided = {name: tensor for name, tensor in self.model.items() if name not in base}
        ended = PastTask(self.latest, self.latest.compose(base, transfer=False), undivided)
        return {**self.past, self.latest_task: ended}

    def with_others(self, knowledge: Sequence[SparseVector], shapes: Mapping[str, torch.Size]) -> ClientTasks:
        """Return the same, without values, of a client that uses these weights of others since its second task.

        Parameters
        ----------
        shapes
            The shape of each decomposed weight.
        """

        def with_transfer(weights: TaskWeights) -> TaskWeights:
            return replace(weights, transfer={name: empty(*shape) for name, shape in shapes.items()})

        rows = -(-len(knowledge) // OTHERS_MULTIPLE) * OTHERS_MULTIPLE
        return replace(
            self,
            latest=None if self.latest is None else with_transfer(self.latest),
            attention={name: empty(rows) for name in shapes},
            knowledge=knowledge,
            past={
                task_index: replace(task, weights=with_transfer(task.weights)) if task_index else task
                for task_index, task in self.past.items()
            },
        )

    def task_model(self, task_index: int) -> dict[str, Tensor]:
        """Return the model of a task, with its own mask and adaptive weights; of an unknown one, that of the latest."""
        if task_index in self.past:
            task = self.past[task_index]
            return {**task.undivided, **task.weights.compose(self.model)}
        return {**self.model, **({} if self.latest is None else self.latest.compose(self.model))}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def read_knowledge(tensors: Tensors) -> list[SparseVector]:
    """Return the adaptive weights of other clients in a message or a state, in their order."""
    found = with_prefix(tensors, KNOWLEDGE)
    rows = sorted({name.split(".", 1)[0] for name in found})
    return [SparseVector.of_tensors(with_prefix(found, f"{row}.")) for row in rows]


def past_tensors(past: Mapping[int, PastTask], names: Selection) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what trains of past tasks and what is constant, stacked over tasks.

    See :mod:`~vitfleet.methods.continual.decomposition`.
    """
    if not past:
        return {}, {}
    tasks = list(past.values())

    def stacked(prefix: str, column: Sequence[Tensors]) -> dict[str, Tensor]:
        return {prefix + name: torch.stack([tensors[name] for tensors in column]) for name in names}

    trained = stacked(PAST_ADAPTIVE, [task.weights.adaptive for task in tasks])
    masks = stacked(PAST_MASK, [task.weights.mask for task in tasks])
    return trained, {**masks, **stacked(TARGET, [task.target for task in tasks])}
