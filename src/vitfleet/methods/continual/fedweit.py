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

from dataclasses import replace
from math import prod

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.base import MethodParams
from vitfleet.config.fleet import BufferedSchedule
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.message import Message, Number, Numbers, State, Tensors, add_prefix, with_prefix
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
from vitfleet.methods.continual.adaptive_store import AdaptiveStoreUpdate, knowledge_for
from vitfleet.methods.continual.decomposed_tasks import (
    KEPT,
    LATEST_TASK,
    OTHERS,
    PAST_TASKS,
    ClientTasks,
    PastTask,
    TaskWeights,
    empty,
    past_tensors,
    read_knowledge,
)
from vitfleet.methods.continual.decomposition import (
    ADAPTIVE,
    ATTENTION,
    KNOWLEDGE,
    MASK,
    PAST_ADAPTIVE,
    DecomposedStep,
    decomposed_weights,
    transferred,
)
from vitfleet.methods.continual.sparse_weights import SparseVector, densify, sparsify
from vitfleet.methods.reported import ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalResult, LocalTraining


class FedWeitParams(MethodParams):
    """Shared weights, and sparse adaptive weights of every task that are exchanged between clients (FedWEIT)."""

    sparsity_weight: float = Field(
        1e-3, ge=0, description="weight λ₁ of ‖A‖₁ and of the mask; adaptive weights up to λ₁ are not sent"
    )
    drift_weight: float = Field(100.0, ge=0, description="weight λ₂ of the changes of earlier tasks' weights")
    adaptive_start: float = Field(1 / 3, ge=0, description="adaptive weights of a new task begin as this fraction of B")


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
        ClientMetric(LATEST_TASK, "index of the latest task that the client trained", form="number"),
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
        self.decomposed = decomposed_weights(self.parts)
        self.shapes = {name: self.parts.shapes[name] for name in self.decomposed}
        self.rounds_per_task = max(1, context.rounds // context.num_tasks)

    @property
    def trainable(self) -> Selection:
        """The whole model. The tensors that its weights are composed of train too."""
        return self.parts.whole

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial head: all clients start from the same one."""
        return Message(self.parts.head.take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial base weights, and all other weights of the body."""
        return State(self.parts.body.take(initial_weights))

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the shared weights; in a client's first round of a task, the other clients' adaptive weights too."""
        task_index = self.task_of(round)
        if last_round is not None and self.task_of(last_round) == task_index:
            return Message(server_state.tensors)
        knowledge, _ = knowledge_for(server_state.parts, client, task_index, self.context.device)
        return Message({**server_state.tensors, **knowledge})

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the mean of the shared weights and the store of adaptive weights."""
        mean = WeightedMean(server_state, self.context.aggregation)
        length = sum(prod(shape) for shape in self.shapes.values())
        return AdaptiveStoreUpdate(server_state, mean, length, self.task_of(round))

    def task_of(self, round: int) -> int:
        """Return the index of the task of a round."""
        return (round - 1) // self.rounds_per_task

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the decomposed weights of the current task; send B and the sparse adaptive weights."""
        before = self.tasks_of(job)
        continues = before.latest_task == job.task_index
        received = self.parts.body.take(job.message.tensors)
        model = {**before.model, **received}
        knowledge = before.knowledge if continues else read_knowledge(job.message.tensors)
        past = before.tasks_before(job.task_index, self.decomposed)
        dense = add_prefix(KNOWLEDGE, densify(knowledge, self.shapes))
        current = self.task_tensors(before if continues else None, model, dense)
        past_adaptive, past_constants = past_tensors(past, self.decomposed)
        others = next((len(tensor) for tensor in dense.values()), 0)
        step = DecomposedStep(
            self.decomposed.names, self.params.sparsity_weight, self.params.drift_weight, others, len(past)
        )
        result = yield LocalTraining(
            {**model, **current, **past_adaptive},
            step.trainable(self.parts.whole),
            self.context.train.epochs,
            step,
            constants={**dense, **past_constants},
        )
        if not result.samples:
            numbers = {**train_metrics(result), **before.reported()}
            return ClientUpdate(Message(numbers=numbers), before.task_model(before.latest_task), before.state())
        adaptive = with_prefix(result.weights, ADAPTIVE)
        sent = sparsify(adaptive, self.params.sparsity_weight, before.kept if continues else None)
        after = ClientTasks(
            {**model, **self.parts.whole.take(result.weights)},
            job.task_index,
            TaskWeights(with_prefix(result.weights, MASK), adaptive, transfer(result, dense)),
            with_prefix(result.weights, ATTENTION),
            knowledge,
            trained_past(past, result),
            len(sent),
        )
        message = Message(
            {**self.parts.body.take(after.model), **sent.tensors(ADAPTIVE)},
            {**train_metrics(result), **after.reported()},
        )
        return ClientUpdate(message, after.task_model(job.task_index), after.state())

    def tasks_of(self, job: ClientRoundInput) -> ClientTasks:
        """Return the client's state; before its first round, the received model without any task."""
        if job.client_state is None:
            received = self.parts.body.take(job.message.tensors)
            return ClientTasks({**received, **self.parts.head.take(job.base_weights)})
        return ClientTasks.of_state(job.client_state, self.parts.whole)

    def task_tensors(self, continued: ClientTasks | None, model: Tensors, knowledge: Tensors) -> dict[str, Tensor]:
        """Return m_t, A_t and α as they begin: those of the client's last round, or new ones for a new task."""
        if continued is not None:
            assert continued.latest is not None
            latest = continued.latest
            mask, adaptive, attention = latest.mask, latest.adaptive, continued.attention
        else:
            base = self.decomposed.take(model)
            mask = {name: weight.new_zeros(weight.shape[0]) for name, weight in base.items()}
            adaptive = {name: self.params.adaptive_start * weight for name, weight in base.items()}
            dense = with_prefix(knowledge, KNOWLEDGE)
            attention = {name: tensor.new_zeros(tensor.shape[0]) for name, tensor in dense.items()}
        return {**add_prefix(MASK, mask), **add_prefix(ADAPTIVE, adaptive), **add_prefix(ATTENTION, attention)}

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
        latest, past, others, kept = (_count(reported.get(name)) for name in (LATEST_TASK, PAST_TASKS, OTHERS, KEPT))
        if min(latest, past, others, kept) < 0:
            return after_tasks(())
        state = after_tasks([*range(min(past, latest)), latest])
        if state is None or not others:
            return state
        knowledge = [SparseVector(empty(kept), empty(kept, dtype=torch.int32)) for _ in range(others)]
        return ClientTasks.of_state(state, self.parts.whole).with_others(knowledge, self.shapes).state()


def _count(number: Number | None) -> int:
    """Return a reported number; −1 if it is no number of anything."""
    return number if isinstance(number, int) else -1


def transfer(result: LocalResult, knowledge: Tensors) -> dict[str, Tensor]:
    """Return Σ_c α_c A_c with the trained α; empty without other clients' weights."""
    attention = with_prefix(result.weights, ATTENTION)
    return {name: transferred(weights, knowledge[KNOWLEDGE + name]) for name, weights in attention.items()}


def trained_past(past: dict[int, PastTask], result: LocalResult) -> dict[int, PastTask]:
    """Return the past tasks with their trained adaptive weights."""
    stacked = with_prefix(result.weights, PAST_ADAPTIVE)
    return {
        task_index: replace(
            task, weights=replace(task.weights, adaptive={name: rows[row] for name, rows in stacked.items()})
        )
        for row, (task_index, task) in enumerate(past.items())
    }
