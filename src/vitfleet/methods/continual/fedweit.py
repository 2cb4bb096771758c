"""FedWEIT: Yoon et al., "Federated Continual Learning with Weighted Inter-client Transfer", ICML 2021 (2003.03196).

The weights of a client's task t are decomposed (equation 2):

    θ_t = B ⊙ σ(m_t) + A_t + Σ_c α_c A_c.

B are base weights that all clients and tasks share: the server averages them. m_t is a mask with one number per output
unit, A_t are sparse adaptive weights of the task. A_c are the adaptive weights of the other clients from the task
before. They are frozen; the client learns their weights α_c, one per client and weight tensor. It minimises
(equation 3)

    loss + λ₁ (Σ_{i≤t} ‖A_i‖₁ + ‖σ(m_t)‖₁) + λ₂/2 Σ_{i<t} ‖B ⊙ σ(m_i) + A_i − θ_i*‖²

by B, m_t, A_1 … A_t and α. θ_i* is B ⊙ σ(m_i) + A_i as it was after task i: where B changes, the adaptive weights of
earlier tasks follow. A task is evaluated with its own m_i, A_i and transferred weights, at the current B.

A client sends B and A_t. Of A_t only values above λ₁ are sent, with their positions. The server keeps the adaptive
weights of every client and sends them to every other client once per task. So the download of a task grows with the
number of clients, and that of a run with clients × tasks; the records have the bytes of every message.

Decisions:

- The matrices and kernels of all blocks are decomposed. All other weights of the body (biases, norms, embedding) are
  averaged with B, and every task keeps the values of its last training; so do heads, which are local.
- m_t begins at 0 and A_t as a third of B, as in the authors' code; α at 0.
- B is sent whole. The paper sends B ⊙ m_t, where m_t is zero for some units; σ(m_t) never is.
- A client does not know which of its rounds is its last one of a task: it sends A_t in every round, and the server
  keeps the latest. In the paper all clients take part in all rounds and send it once.
- A client that did not take part in the task before has no adaptive weights of it. Those of its latest task before the
  current one are used instead. A client that took part in none contributes nothing.
- θ_i* is fixed once task i is over. (In the paper's equation the reference moves on with each task.)
- All tensors have the same optimiser and learning rate. With AdamW, the values that ‖A‖₁ drives to zero end within
  about one learning rate of it: a rate well above λ₁ leaves A_t dense.

Besides its model a client keeps, per earlier task, A_i, θ_i* and the transferred weights, each as large as the
decomposed weights, and in training the adaptive weights of all other clients as dense tensors: memory grows with tasks
and with clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.fleet import BufferedSchedule
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError
from vitfleet.message import (
    Message,
    Number,
    Numbers,
    State,
    Tensors,
    add_numbers,
    add_prefix,
    to_device,
    with_numbers,
    with_prefix,
)
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    StateAfterTasks,
    train_metrics,
)
from vitfleet.methods.continual.sparse_weights import OTHERS_MULTIPLE, SparseVector, check_sparse, densify, sparsify
from vitfleet.methods.reported import ClientMetric, RejectedUpdateError
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

# Prefixes of tensors: see `DecomposedStep` and `ClientTasks`.
MASK, ADAPTIVE, ATTENTION, KNOWLEDGE, PAST = "mask.", "adaptive.", "attention.", "knowledge.", "past."
PAST_ADAPTIVE, PAST_MASK, TARGET = "past_adaptive.", "past_mask.", "target."
# Numbers that are reported; the first two are also kept.
LATEST_TASK, KEPT, PAST_TASKS, OTHERS = "latest_task", "adaptive_kept", "past_tasks", "adaptive_received"
STORED_TASKS = 2  # of each client, whose adaptive weights the server keeps


class FedWeitParams(MethodParams):
    """Shared weights, and sparse adaptive weights of every task that are exchanged between clients (FedWEIT)."""

    sparsity_weight: float = Field(
        1e-3, ge=0, description="weight λ₁ of ‖A‖₁ and of the mask; adaptive weights up to λ₁ are not sent"
    )
    drift_weight: float = Field(100.0, ge=0, description="weight λ₂ of the changes of earlier tasks' weights")
    adaptive_start: float = Field(1 / 3, ge=0, description="adaptive weights of a new task begin as this fraction of B")


def masked(base: Tensor, mask: Tensor) -> Tensor:
    """Return B ⊙ σ(m). The mask may have leading axes, of tasks, that the base weights do not have."""
    return base * mask.sigmoid().reshape(*mask.shape, *[1] * (base.dim() - 1))


def transferred(attention: Tensor, knowledge: Tensor) -> Tensor:
    """Return Σ_c α_c A_c."""
    weighted: Tensor = torch.tensordot(attention, knowledge, dims=1)
    return weighted


@dataclass(frozen=True)
class DecomposedStep:
    """Follows the gradient of the loss of equation 3 by what the weights θ_t are composed of.

    The tensors of a decomposed weight have the weight's name with a prefix; B has the name itself. For a weight of the
    shape ``[units, …]`` these train:

    - ``mask.``, ``[units]``: m_t; σ(m_t) is the share of B that each output unit uses
    - ``adaptive.``, ``[units, …]``: A_t
    - ``attention.``, ``[others]``: α_c, one per other client
    - ``past_adaptive.``, ``[tasks, units, …]``: A_i of the tasks before this one

    These are constants:

    - ``knowledge.``, ``[others, units, …]``: A_c of other clients
    - ``past_mask.``, ``[tasks, units]``: m_i of the tasks before this one
    - ``target.``, ``[tasks, units, …]``: θ_i*, B ⊙ σ(m_i) + A_i when task i was trained last
    """

    names: tuple[str, ...]  # the decomposed weights
    sparsity: float  # λ₁
    drift: float  # λ₂
    others: int  # other clients whose adaptive weights are used, with padding
    past_tasks: int

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(self.loss, batch, compose=self.compose)

    def compose(self, trained: Tensors, constants: Tensors) -> Tensors:
        """Return θ_t = B ⊙ σ(m_t) + A_t + Σ_c α_c A_c."""
        composed: dict[str, Tensor] = {}
        for name in self.names:
            weight = masked(trained[name], trained[MASK + name]) + trained[ADAPTIVE + name]
            if self.others:
                weight = weight + transferred(trained[ATTENTION + name], constants[KNOWLEDGE + name])
            composed[name] = weight
        return composed

    def loss(self, outputs: Outputs) -> Tensor:
        """Return the loss of a batch."""
        trained, constants = outputs.weights, outputs.constants
        sizes: list[Tensor] = []
        drifts: list[Tensor] = []
        for name in self.names:
            sizes += [trained[ADAPTIVE + name].abs().sum(), trained[MASK + name].sigmoid().sum()]
            if self.past_tasks:
                past = trained[PAST_ADAPTIVE + name]
                sizes.append(past.abs().sum())
                restored = masked(trained[name], constants[PAST_MASK + name]) + past
                drifts.append((restored - constants[TARGET + name]).square().sum())
        loss = cross_entropy(outputs) + self.sparsity * torch.stack(sizes).sum()
        return loss + 0.5 * self.drift * torch.stack(drifts).sum() if drifts else loss


@dataclass(frozen=True)
class TaskWeights:
    """What the decomposed weights of one task consist of, besides the base weights B; by name of the weight."""

    mask: Tensors  # m_t
    adaptive: Tensors  # A_t; that of an earlier task is still trained, to make up for changes of B
    transfer: Tensors = field(default_factory=dict)  # Σ_c α_c A_c, after the last training of the task
    attention: Tensors = field(default_factory=dict)  # α_c of the latest task, if there are other clients' weights
    target: Tensors = field(default_factory=dict)  # of an earlier task: θ*, B ⊙ σ(m) + A after its last training
    undivided: Tensors = field(default_factory=dict)  # of an earlier task: all weights that are not decomposed

    def restore(self, base: Tensors) -> dict[str, Tensor]:
        """Return B ⊙ σ(m_t) + A_t."""
        return {name: masked(base[name], mask) + self.adaptive[name] for name, mask in self.mask.items()}

    def compose(self, base: Tensors) -> dict[str, Tensor]:
        """Return θ_t = B ⊙ σ(m_t) + A_t + Σ_c α_c A_c."""
        added = self.transfer
        return {name: weight + added[name] if added else weight for name, weight in self.restore(base).items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, with the name of their field as prefix."""
        groups = {group.name: getattr(self, group.name) for group in fields(self)}
        return {f"{group}.{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> TaskWeights:
        """Return the weights whose :meth:`tensors` are among these."""
        return cls(**{group.name: with_prefix(tensors, f"{group.name}.") for group in fields(cls)})


@dataclass(frozen=True)
class ClientTasks:
    """The state of a client: the base weights B, and what it keeps of its tasks."""

    model: Tensors  # B, and the weights that are not decomposed, after the client's last training
    latest_task: int = -1  # index of the task that it trained last; −1: none
    latest: TaskWeights | None = None  # of that task
    knowledge: Sequence[SparseVector] = ()  # adaptive weights of other clients that it uses, as it received them
    past: Mapping[int, TaskWeights] = field(default_factory=dict)  # the tasks before, by index, in rising order
    kept: int = 0  # how many adaptive weights the client sent in its last round

    def reported(self) -> dict[str, Number]:
        """Return the numbers that the client reports."""
        return {**self.state().numbers, PAST_TASKS: len(self.past), OTHERS: len(self.knowledge)}

    def state(self) -> State:
        """Return the client's state."""
        latest = {} if self.latest is None else self.latest.tensors()
        past = add_numbers(PAST, {task_index: task.tensors() for task_index, task in self.past.items()})
        knowledge = add_numbers(KNOWLEDGE, {row: vector.tensors() for row, vector in enumerate(self.knowledge)})
        tensors = {**self.model, **latest, **knowledge, **past}
        return State(tensors, {LATEST_TASK: self.latest_task, KEPT: self.kept})

    @classmethod
    def of_state(cls, state: State, whole: Selection) -> ClientTasks:
        """Return the state whose :meth:`state` this is."""
        latest_task, kept = state.numbers[LATEST_TASK], state.numbers[KEPT]
        assert isinstance(latest_task, int)
        assert isinstance(kept, int)
        latest = TaskWeights.of_tensors(state.tensors) if latest_task >= 0 else None
        past = {index: TaskWeights.of_tensors(task) for index, task in with_numbers(state.tensors, PAST).items()}
        return cls(whole.take(state.tensors), latest_task, latest, read_knowledge(state.tensors), past, kept)

    def tasks_before(self, task_index: int) -> dict[int, TaskWeights]:
        """Return all tasks but the one that begins or continues; the latest one becomes a past one where it is over."""
        if self.latest is None or self.latest_task == task_index:
            return dict(self.past)
        target = self.latest.restore(self.model)
        undivided = {name: tensor for name, tensor in self.model.items() if name not in target}
        return {**self.past, self.latest_task: replace(self.latest, attention={}, target=target, undivided=undivided)}

    def task_model(self, task_index: int) -> dict[str, Tensor]:
        """Return the model of a task, with its own mask and adaptive weights; of an unknown one, that of the latest."""
        task = self.past.get(task_index, self.latest)
        return dict(self.model) if task is None else {**self.model, **task.undivided, **task.compose(self.model)}


def read_knowledge(tensors: Tensors) -> list[SparseVector]:
    """Return the adaptive weights of other clients in a message or a state, in their order."""
    return [SparseVector(**vector) for vector in with_numbers(tensors, KNOWLEDGE).values()]


@register_method("fedweit", FedWeitParams, title="FedWEIT")
class FedWeit(Method[FedWeitParams]):
    """Decomposed weights; adaptive weights of all clients."""

    needs_tasks = True
    has_global_model = False
    has_task_models = True
    client_metrics = (
        ClientMetric(KEPT, "adaptive weights sent, mean over clients and rounds", "mean", form="count"),
        ClientMetric(OTHERS, "other clients whose adaptive weights a client uses, most", "max", form="count"),
        ClientMetric(PAST_TASKS, "earlier tasks whose weights a client keeps, most", "max", form="count"),
        ClientMetric(LATEST_TASK, "index of the latest task that the client trained", form="task"),
    )

    @classmethod
    def check_config(cls, params: FedWeitParams, config: Config) -> None:
        """Check that a task is known when it is evaluated, and that all clients learn the same task at a time."""
        super().check_config(params, config)
        if config.data.tasks is not None and not config.task_known:
            remedy = f"must be task: with {params.name} every task has a model of its own"
            raise ConfigError("data.tasks.scenario", config.data.tasks.scenario, remedy)
        if isinstance(config.fleet.schedule, BufferedSchedule):
            remedy = f"must be another one: with {params.name} all clients learn the same task at a time"
            raise ConfigError("fleet.schedule.kind", config.fleet.schedule.kind, remedy)

    def __init__(self, params: FedWeitParams, context: MethodContext) -> None:
        super().__init__(params, context)
        blocks = self.parts.trainable(self.parts.union(*self.parts.blocks))
        self.decomposed = self.parts.select(name for name in blocks if len(self.parts.shapes[name]) >= 2)
        self.shapes = {name: self.parts.shapes[name] for name in self.decomposed}
        self.rounds_per_task = max(1, context.rounds // context.num_tasks)

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial head: all clients start from the same one."""
        return Message(self.parts.head.take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial base weights, and all other weights of the body."""
        return State(self.parts.body.take(initial_weights))

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the shared weights; in a client's first round of a task, the other clients' adaptive weights too.

        They are those of every other client, from the latest task that it learned before this one.
        """
        task_index = self.task_of(round)
        if last_round is not None and self.task_of(last_round) == task_index:
            return Message(server_state.tensors)
        latest: dict[int, Tensors] = {}
        for name in sorted(server_state.parts):
            owner, task = owner_and_task(name)
            if owner != client and task < task_index:
                latest[owner] = server_state.parts[name].tensors  # the later task comes later
        knowledge = {row: to_device(latest[owner], self.context.device) for row, owner in enumerate(sorted(latest))}
        return Message({**server_state.tensors, **add_numbers(KNOWLEDGE, knowledge)})

    def check_update(self, expected: Message, update: Message) -> None:
        """Reject an update without the whole body; the aggregator checks the adaptive weights."""
        shared = {name: tensor for name, tensor in update.tensors.items() if not name.startswith(ADAPTIVE)}
        honest = {name: tensor for name, tensor in expected.tensors.items() if not name.startswith(ADAPTIVE)}
        super().check_update(Message(honest), Message(shared, update.numbers))

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the mean of the shared weights and the store of adaptive weights."""
        return AdaptiveStoreUpdate(self, server_state, self.task_of(round))

    def task_of(self, round: int) -> int:
        """Return the index of the task of a round."""
        return (round - 1) // self.rounds_per_task

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the decomposed weights of the current task; send B and the sparse adaptive weights."""
        before = self.tasks_of(job)
        continues = before.latest_task == job.task_index
        model = {**before.model, **self.parts.body.take(job.message.tensors)}
        knowledge = before.knowledge if continues else self.received_knowledge(job.message.tensors)
        others = densify(knowledge, self.shapes)
        current = before.latest if continues and before.latest is not None else self.new_task(model, others)
        past = before.tasks_before(job.task_index)
        result = yield self.training(model, current, past, others)
        if not result.samples:
            numbers = {**train_metrics(result), **before.reported()}
            return ClientUpdate(Message(numbers=numbers), before.task_model(before.latest_task), before.state())
        trained, past_adaptive = TaskWeights.of_tensors(result.weights), with_prefix(result.weights, PAST_ADAPTIVE)
        transfer = {name: transferred(weights, others[name]) for name, weights in trained.attention.items()}
        adaptive = self.decomposed.take(trained.adaptive)
        sent = sparsify(adaptive, self.params.sparsity_weight, before.kept if continues else None)
        after = ClientTasks(
            {**model, **self.parts.whole.take(result.weights)},
            job.task_index,
            replace(trained, transfer=transfer),
            knowledge,
            {
                index: replace(task, adaptive={name: rows[row] for name, rows in past_adaptive.items()})
                for row, (index, task) in enumerate(past.items())
            },
            len(sent),
        )
        tensors = {**self.parts.body.take(after.model), **sent.tensors(ADAPTIVE)}
        numbers = {**train_metrics(result), **after.reported()}
        return ClientUpdate(Message(tensors, numbers), after.task_model(job.task_index), after.state())

    def tasks_of(self, job: ClientRoundInput) -> ClientTasks:
        """Return the client's state; before its first round, the received model without any task."""
        if job.client_state is None:
            received = self.parts.body.take(job.message.tensors)
            return ClientTasks({**received, **self.parts.head.take(job.base_weights)})
        return ClientTasks.of_state(job.client_state, self.parts.whole)

    def received_knowledge(self, tensors: Tensors) -> list[SparseVector]:
        """Return the adaptive weights of other clients in a message, without the empty ones; check what a server sent.

        Each becomes as large as the decomposed weights: of more than there are other clients the device has no memory.
        """
        received = [vector for vector in read_knowledge(tensors) if len(vector)]
        others = self.context.config.fleet.clients - 1
        if len(received) > others:
            raise UserError(f"the server sends adaptive weights of {len(received)} other clients; the run has {others}")
        length = sum(prod(shape) for shape in self.shapes.values())
        try:
            for vector in received:
                if not vector.values.is_meta:  # of a dry run
                    check_sparse(vector.tensors(), length)
        except RejectedUpdateError as error:
            raise UserError(f"adaptive weights that the server sends cannot be used: {error}") from None
        return received

    def new_task(self, model: Tensors, others: Tensors) -> TaskWeights:
        """Return m_t, A_t and α as they begin."""
        base = self.decomposed.take(model)
        return TaskWeights(
            mask={name: weight.new_zeros(weight.shape[0]) for name, weight in base.items()},
            adaptive={name: self.params.adaptive_start * weight for name, weight in base.items()},
            attention={name: rows.new_zeros(rows.shape[0]) for name, rows in others.items()},
        )

    def training(
        self, model: Tensors, current: TaskWeights, past: Mapping[int, TaskWeights], others: Tensors
    ) -> LocalTraining:
        """Return the training of the current task, given earlier tasks and the adaptive weights of other clients."""

        def stacked(prefix: str, column: Sequence[Tensors]) -> dict[str, Tensor]:
            return {prefix + name: torch.stack([tensors[name] for tensors in column]) for name in self.decomposed}

        trained, constants = replace(current, transfer={}).tensors(), add_prefix(KNOWLEDGE, others)
        if past:
            trained |= stacked(PAST_ADAPTIVE, [task.adaptive for task in past.values()])
            constants |= stacked(PAST_MASK, [task.mask for task in past.values()])
            constants |= stacked(TARGET, [task.target for task in past.values()])
        step = DecomposedStep(
            self.decomposed.names,
            self.params.sparsity_weight,
            self.params.drift_weight,
            len(next(iter(others.values()), ())),
            len(past),
        )
        # All weights of the model train, those that are decomposed being B, and what else θ_t is composed of.
        prefixes = [MASK, ADAPTIVE, *([ATTENTION] if others else []), *([PAST_ADAPTIVE] if past else [])]
        composing = [prefix + name for prefix in prefixes for name in self.decomposed]
        selection, epochs = Selection((*self.parts.whole, *composing)), self.context.train.epochs
        return LocalTraining({**model, **trained}, selection, epochs, step, constants=constants)

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the model of the task that the client trained last; before its first round, the server's weights."""
        return self.task_weights(server_state, base_weights, client_state, -1)

    def task_weights(
        self, server_state: State, base_weights: Tensors, client_state: State | None, task_index: int
    ) -> Tensors:
        """Return the model of a task; of one that the client has not trained, that of the task it trained last."""
        if client_state is None:
            return {**base_weights, **server_state.tensors}
        return ClientTasks.of_state(client_state, self.parts.whole).task_model(task_index)

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return the state with all tasks, and adaptive weights of other clients: of each as many as its own."""
        numbers = [reported.get(name) for name in (LATEST_TASK, PAST_TASKS, OTHERS, KEPT)]
        latest, past, others, kept = (number if isinstance(number, int) else -1 for number in numbers)
        if min(latest, past, others, kept) < 0:
            return after_tasks(())
        state = after_tasks([*range(min(past, latest)), latest])
        if state is None or not others:
            return state
        knowledge = [SparseVector(_empty(kept), _empty(kept, dtype=torch.int32)) for _ in range(others)]
        tasks, rows = ClientTasks.of_state(state, self.parts.whole), -(-others // OTHERS_MULTIPLE) * OTHERS_MULTIPLE
        # In the first task there is nothing from other clients.
        transfer = {name: _empty(*shape) for name, shape in self.shapes.items()}
        attention = {name: _empty(rows) for name in self.shapes}
        used = None if tasks.latest is None else replace(tasks.latest, transfer=transfer, attention=attention)
        earlier = {index: replace(task, transfer=transfer) if index else task for index, task in tasks.past.items()}
        return replace(tasks, latest=used, knowledge=knowledge, past=earlier).state()


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class AdaptiveStoreUpdate(Aggregator):
    """Averages the shared weights, and stores the adaptive weights that each client sent in a round of a task.

    Of every client those of its two latest tasks are stored, one part of the server's state each: those of the task
    that all clients are learning now, and those that other clients receive, from the task before.
    """

    def __init__(self, method: FedWeit, server_state: State, task_index: int) -> None:
        self.mean = WeightedMean(server_state, method.context.aggregation)
        self.sizes = self.mean.sizes
        self.parts = dict(server_state.parts)
        self.length = sum(prod(shape) for shape in method.shapes.values())
        self.task_index = task_index
        self.received: dict[int, State] = {}

    def add(self, client: int, message: Message) -> None:
        """Add one client's update; that of a client without samples has no tensors."""
        self._check_numbers(message.numbers)
        self.mean.earlier_sizes, self.mean.earlier_samples = self.earlier_sizes, self.earlier_samples
        if not message.tensors:
            self.mean.add(client, message)
            return
        vector = check_sparse(with_prefix(message.tensors, ADAPTIVE), self.length, self.mean.config.max_change)
        if message.numbers[LATEST_TASK] != self.task_index:
            raise RejectedUpdateError(
                f"its adaptive weights are of task {message.numbers[LATEST_TASK]}; expected: {self.task_index}"
            )
        shared = {name: tensor for name, tensor in message.tensors.items() if not name.startswith(ADAPTIVE)}
        self.mean.add(client, replace(message, tensors=shared))
        if message.numbers[KEPT] != len(vector):
            raise RejectedUpdateError(f"its number {KEPT!r} is not that of its {len(vector)} adaptive weights")
        on_host = to_device(vector.tensors(), torch.device("cpu"))
        self.received[client] = State(on_host, {"client": client, "task": self.task_index})

    def _check_numbers(self, numbers: Numbers) -> None:
        """Reject numbers that cannot be: the costs of the client's next round are computed from them."""
        owners = {owner_and_task(name)[0] for name in self.parts}
        limits = {LATEST_TASK: self.task_index, PAST_TASKS: self.task_index, OTHERS: len(owners), KEPT: self.length}
        for name, limit in limits.items():
            number = numbers.get(name)
            if not isinstance(number, int) or not -1 <= number <= limit:
                raise RejectedUpdateError(f"its number {name!r} is {number}; expected: at most {limit}")

    def finish(self) -> State:
        """Return the server's new state."""
        state = self.mean.finish()
        self.rejected, self.counted_samples = self.mean.rejected, self.mean.counted_samples
        for client, part in self.received.items():
            if client not in self.rejected:
                self.parts[part_name(client, self.task_index)] = part
                own = [name for name in sorted(self.parts) if owner_and_task(name)[0] == client]
                for name in own[:-STORED_TASKS]:
                    del self.parts[name]
        return replace(state, parts=self.parts)


def part_name(client: int, task_index: int) -> str:
    """Return the name of the part of the server's state with a client's adaptive weights of a task."""
    return f"adaptive-{client:06d}-task-{task_index:04d}"


def owner_and_task(name: str) -> tuple[int, int]:
    """Return the client and the task in the name of a part."""
    _, client, _, task_index = name.split("-")
    return int(client), int(task_index)
