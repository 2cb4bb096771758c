"""One client's round, from a request to a reply. Every fleet runs its clients through this module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from vitfleet.data.images import Shard
from vitfleet.fleet.base import ClientTask, EvalReply, EvalResult, Reply, Request
from vitfleet.message import State, Tensors, all_finite
from vitfleet.methods.base import ClientJob, ClientUpdate, Method
from vitfleet.training.cohort_driver import Participant
from vitfleet.training.cohort_inputs import RngContext
from vitfleet.training.trainer import Trainer

#: Evaluates model weights on the test images of clients' tasks.
EvaluateTasks: TypeAlias = Callable[[Tensors, Sequence[ClientTask]], list[EvalResult]]


@dataclass(frozen=True)
class ClientRuntime:
    """Runs a method's client side on a trainer.

    The caller provides a client's images, base weights and state, and decides where they are stored.

    Attributes
    ----------
    seed
        The run's seed.
    evaluate_tasks
        Evaluates a model on clients' own test images.
    """

    method: Method[Any]
    trainer: Trainer
    seed: int
    evaluate_tasks: EvaluateTasks

    def participant(
        self, request: Request, base_weights: Tensors, client_state: State | None, shard: Shard
    ) -> Participant[ClientUpdate]:
        """Return a client's update as a participant of a cohort, before its first step."""
        job = ClientJob(
            request.round, request.client, request.message, base_weights, client_state, shard, request.task_index
        )
        return Participant(self.method.client_update(job), shard, RngContext(self.seed, request.round, request.client))

    def reply(self, request: Request, update: ClientUpdate) -> Reply:
        """Return the reply to a request: the update's message and evaluation, or that training diverged."""
        failure = divergence(update, request.client, request.round)
        if failure is not None:
            return Reply(request.client, None, failure=failure)
        evaluation = None
        if request.evaluate:
            (evaluation,) = self.evaluate_tasks(update.model_weights, [ClientTask(request.client, request.task_index)])
        return Reply(request.client, update.message, evaluation)

    def evaluate(
        self, server: State, base_weights: Tensors, client_state: State | None, clients: Sequence[int], num_tasks: int
    ) -> list[EvalReply]:
        """Evaluate the model of clients that have the same state, on each client's first tasks."""
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


def divergence(update: ClientUpdate, client: int, round: int) -> str | None:
    """Return why a client's update must not be used; ``None`` if its numbers are finite.

    The loss is computed before the step, so the weights are checked too: the last step may be the one that diverged.
    """
    numbers = update.message.numbers
    loss = numbers["loss"]
    if not isinstance(loss, float) or not math.isfinite(loss):
        step = f", step {numbers['diverged_step']}" if "diverged_step" in numbers else ""
        return f"training diverged: non-finite loss ({loss}) at client {client}, round {round}{step}"
    stored = update.client_state.tensors.values() if update.client_state else ()
    # A tensor that is both sent and stored is checked once.
    if not all_finite({id(tensor): tensor for tensor in (*update.message.tensors.values(), *stored)}.values()):
        return f"training diverged: non-finite weights at client {client}, after round {round}"
    return None
