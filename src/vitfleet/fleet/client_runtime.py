"""One client's round, from a request to a reply. Every fleet runs its clients through this module."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import torch

from vitfleet.data.images import Shard
from vitfleet.fleet.base import ClientTask, EvalReply, EvalResult, Reply, Request, RequestKind
from vitfleet.fleet.build import Components
from vitfleet.message import Message, State, Tensors, all_finite
from vitfleet.methods.base import ClientRoundInput, ClientUpdate, Method, start_client_update
from vitfleet.training.driver import PendingUpdate, run_updates
from vitfleet.training.execution.memory_budget import is_out_of_memory
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

#: Evaluates model weights on the test images of clients' tasks.
EvaluateTasks: TypeAlias = Callable[[Tensors, Sequence[ClientTask]], list[EvalResult]]
#: Returns a client's update before its first step.
MakeUpdate: TypeAlias = Callable[[Request], PendingUpdate[ClientUpdate]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientRuntime:
    """Runs a method's client side on a trainer.

    The caller provides a client's images, base weights and state, and decides where they are stored.
    """

    method: Method[Any]
    trainer: Trainer
    seed: int
    evaluate_tasks: EvaluateTasks
    head_solver: Method[Any] | None = None  # its client side answers requests for the head
    #: Makes the one for the model with the head of ``[head.last]``, if the run ends with that.
    make_last: Callable[[], ClientRuntime] | None = None

    @cached_property
    def _last(self) -> ClientRuntime:
        assert self.make_last is not None
        return self.make_last()

    def for_kind(self, kind: RequestKind) -> ClientRuntime:
        """Return the runtime that answers requests of a kind."""
        return self._last if kind == "last-head" and self.make_last is not None else self

    def pending_update(
        self, request: Request, base_weights: Tensors, client_state: State | None, shard: Shard
    ) -> PendingUpdate[ClientUpdate]:
        """Return a client's update before its first step."""
        runtime = self.for_kind(request.kind)
        if runtime is not self:
            return runtime.pending_update(request, base_weights, client_state, shard)
        message, base = (self.method.from_wire(sent) for sent in (request.message, Message(base_weights)))
        job = ClientRoundInput(
            request.round, request.client, message, base.tensors, client_state, shard, request.task_index
        )
        if request.kind != "round":
            assert self.head_solver is not None
            own = self.method.own_body(client_state)
            job = replace(job, base_weights={**base.tensors, **own}, client_state=None)
            update = self.head_solver.client_update(job)
        else:
            update = start_client_update(self.method, job)
        return PendingUpdate(update, shard, RngContext(self.seed, request.round, request.client))

    def train(self, requests: Sequence[Request], make_update: MakeUpdate) -> Iterator[tuple[Reply, ClientUpdate]]:
        """Train clients together, and yield each one's reply with its update. All requests are of one kind.

        Where captured steps diverged, the client is trained again without them. If it diverges again, training
        diverges, and no client of this trainer is trained again.
        """
        runtime = self.for_kind(requests[0].kind)
        if runtime is not self:
            yield from runtime.train(requests, make_update)
            return
        for request, update in self._train_within_memory(requests, make_update):
            reply = self.reply(request, update)
            doubtful = self.trainer.machine.graphs and not self.trainer.runners.execution.diverged
            if reply.failure is not None and doubtful:
                yield self._train_again(request, make_update(request), reply.failure)
            else:
                yield reply, update

    def _train_within_memory(
        self, requests: Sequence[Request], make_update: MakeUpdate
    ) -> Iterator[tuple[Request, ClientUpdate]]:
        """Train clients together, as many at a time as fit in memory, and yield each one's update.

        The trainer divides a training that does not fit. A method's own tensors may not fit either: then the captured
        steps, which hold tensors of earlier trainings, are dropped, and from now on half of the clients are trained at
        a time.
        """
        runners, budget = self.trainer.runners, self.trainer.memory_budget
        steps_captured = runners.num_graphs > 0
        if len(requests) <= budget.max_together:
            try:
                updates = run_updates([make_update(request) for request in requests], self.trainer)
            except RuntimeError as error:
                if not is_out_of_memory(error) or (len(requests) == 1 and not steps_captured):
                    raise
            else:
                yield from zip(requests, updates, strict=True)
                return
            if len(requests) > 1:
                budget.max_together = (len(requests) + 1) // 2
                message = "the GPU's memory is full; clients trained at a time from now on: %d"
                logger.warning(message, budget.max_together)
            runners.clear()
            if self.trainer.machine.device.type == "cuda":
                torch.cuda.empty_cache()
        size = int(min(len(requests), budget.max_together))
        for start in range(0, len(requests), size):
            yield from self._train_within_memory(requests[start : start + size], make_update)

    def _train_again(
        self, request: Request, pending: PendingUpdate[ClientUpdate], failure: str
    ) -> tuple[Reply, ClientUpdate]:
        """Train a client with plain steps. Those that were captured are dropped first: they hold memory."""
        trainer = self.trainer
        trainer.runners.clear()
        plain = replace(trainer, machine=replace(trainer.machine, graphs=False, compile=False))
        (update,) = run_updates([pending], plain)
        reply = self.reply(request, update)
        trainer.runners.execution.add_repeated_client(diverged=reply.failure is not None)
        if reply.failure is None:
            logger.warning(
                "captured steps: %s; plain steps did not fail: their result counts, and steps are captured anew (only "
                "plain steps: -o machine.graphs=false -o machine.compile=false)",
                failure,
            )
        return reply, update

    def reply(self, request: Request, update: ClientUpdate) -> Reply:
        """Return the reply to a request: the update's message and evaluation, or that training diverged."""
        failure = divergence(update, request.client, request.round)
        if failure is not None:
            return Reply(request.client, None, failure=failure)
        evaluation = None
        if request.evaluate and update.model_weights:
            (evaluation,) = self.evaluate_tasks(update.model_weights, [ClientTask(request.client, request.task_index)])
        return Reply(request.client, self.method.to_wire(update.message), evaluation)

    def evaluate(
        self, server: State, base_weights: Tensors, client_state: State | None, clients: Sequence[int], num_tasks: int
    ) -> list[EvalReply]:
        """Evaluate the model of clients that have the same state, on each client's first tasks."""
        base_weights = self.method.from_wire(Message(base_weights)).tensors
        if self.method.has_task_models:
            columns = []
            for task_index in range(num_tasks):
                weights = self.method.task_weights(server, base_weights, client_state, task_index)
                columns.append(self.evaluate_tasks(weights, [ClientTask(client, task_index) for client in clients]))
            return [EvalReply(client, row) for client, row in zip(clients, zip(*columns, strict=True), strict=True)]
        weights = self.method.model_weights(server, base_weights, client_state)
        tasks = [ClientTask(client, task_index) for client in clients for task_index in range(num_tasks)]
        evaluations = iter(self.evaluate_tasks(weights, tasks))
        return [EvalReply(client, tuple(islice(evaluations, num_tasks))) for client in clients]


def make_runtime(components: Components, evaluate_tasks: EvaluateTasks) -> ClientRuntime:
    """Return the client side of what was built for a run."""
    method = components.method
    return ClientRuntime(
        method, components.trainer, method.context.seed, evaluate_tasks, head_solver=components.head_solver
    )


def divergence(update: ClientUpdate, client: int, round: int) -> str | None:
    """Return why a client's update must not be used; ``None`` if its numbers are finite.

    The loss is computed before the step, so the weights are checked too: the last step may be the one that diverged.
    """
    numbers = update.message.numbers
    loss = numbers.get("loss", 0.0)  # a client that trains nothing has none
    if not isinstance(loss, float) or not math.isfinite(loss):
        step = f", step {numbers['diverged_step']}" if "diverged_step" in numbers else ""
        return f"training diverged: non-finite loss ({loss}) at client {client}, round {round}{step}"
    stored = update.client_state.tensors.values() if update.client_state else ()
    # A tensor that is both sent and stored is checked once.
    if not all_finite({id(tensor): tensor for tensor in (*update.message.tensors.values(), *stored)}.values()):
        return f"training diverged: non-finite weights at client {client}, after round {round}"
    return None
