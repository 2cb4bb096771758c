"""Measuring a run's metrics after a round: what a metric is given, and which values it may return."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitfleet.config.registry import METRICS
from vitfleet.errors import UserError
from vitfleet.fleet.base import EvalRequest, EvalResult
from vitfleet.message import Tensors
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.randomness import Address, Purpose
from vitfleet.run.clients import held_out_clients, training_clients
from vitfleet.run.evaluate.predictions import Predictions
from vitfleet.run.records import UNAVAILABLE, MetricValue, RoundRecord

if TYPE_CHECKING:
    from vitfleet.run.context import RunContext
    from vitfleet.run.state import RunState


class MetricUnavailableError(Exception):
    """A metric cannot be measured in this run; the message is the reason."""


class MetricContext:
    """A run after one of its rounds, for metrics. Results are shared between the metrics of a round.

    Attributes
    ----------
    round
        The round, from 1.
    seed
        The run's seed, for draws with :class:`~vitfleet.randomness.Address`.
    class_names
        Name of each class; a label is an index into them.
    record
        The round's record, without metrics.
    training_clients
        The clients that can be chosen for training: all but those held out.
    held_out_clients
        The clients that never train (``fleet.held_out``).
    """

    def __init__(self, run: RunContext, state: RunState, record: RoundRecord, progress: Progress = NO_PROGRESS) -> None:
        self._has_last_head = bool(state.last_head.tensors)
        self._run, self._state = run.at_the_end(state)
        self._progress = progress
        self._results: dict[int, EvalResult | None] = {}
        self.round = state.round
        self.seed = run.config.seed
        self.class_names = run.data.classes
        self.record = record
        self.training_clients = training_clients(run.config)
        self.held_out_clients = held_out_clients(run.config)

    @cached_property
    def global_weights(self) -> Tensors:
        """Weights of the global model; where the server has none, of the model that a new client starts with."""
        return self._run.method.model_weights(self._state.server, self._run.base.tensors, None)

    @cached_property
    def predictions(self) -> Predictions:
        """The global model's predictions on the common test set."""
        with self._progress.task(f"round {self.round}: predictions", 1):
            return self._run.evaluator.predict(self.global_weights)

    def sample_clients(self, share: float) -> list[int]:
        """Return a share of the training clients, at least one. The same share has the same clients in every round."""
        if share >= 1:
            return list(self.training_clients)
        count = max(1, round(share * len(self.training_clients)))
        rng = Address(self.seed, Purpose.METRIC_CLIENTS).generator()
        return [int(client) for client in np.sort(rng.choice(self.training_clients, count, replace=False))]

    def evaluate_clients(self, clients: Iterable[int]) -> dict[int, EvalResult]:
        """Evaluate clients' current models on their own test images; of several tasks, those learned so far.

        A client that has not trained yet has the global model. Clients without test images are left out, and so are
        clients of a real fleet that do not reply.
        """
        asked = list(clients)
        missing = [client for client in asked if client not in self._results]
        if missing:
            self._results |= self._evaluate(missing)
        results = {client: self._results[client] for client in asked}
        return {client: result for client, result in results.items() if result is not None and result.tested}

    def _evaluate(self, clients: Sequence[int]) -> dict[int, EvalResult | None]:
        num_tasks = self._run.config.task_index(self.round) + 1
        last_rounds = {client: self._state.last_seen.get(client) for client in clients}
        results: dict[int, EvalResult | None] = {}
        with self._progress.task(f"round {self.round}: local accuracy", len(clients)) as advance:
            request = EvalRequest(self._state.server, num_tasks, last_rounds, self._has_last_head)
            for reply in self._run.fleet.evaluate(request):
                advance(1)
                correct = sum(result.correct for result in reply.evaluations)
                tested = sum(result.tested for result in reply.evaluations)
                results[reply.client] = EvalResult(correct, tested) if reply.failure is None else None
        return results

    def client_weights(self, client: int) -> Tensors:
        """Return the weights of a client's current model.

        Raises
        ------
        MetricUnavailableError
            The clients run on machines of their own.
        """
        if self._run.has_remote_clients:
            raise MetricUnavailableError("it needs the clients' models, which stay on the clients' machines")
        seen = client in self._state.last_seen
        client_state = self._run.fleet.client_state(client) if seen else None
        return self._run.method.model_weights(self._state.server, self._run.base.tensors, client_state)


def with_metrics(
    run: RunContext, state: RunState, record: RoundRecord, is_last: bool, progress: Progress = NO_PROGRESS
) -> RoundRecord:
    """Return a round's record with the metrics that are due after it and not measured yet."""
    due = {
        name: params
        for name, params in run.config.metrics.items()
        if name not in record.metrics and params.is_due(record.round, is_last)
    }
    if not due:
        return record
    context = MetricContext(run, state, record, progress)
    measured = {name: _measure(name, params, context) for name, params in due.items()}
    return replace(record, metrics={**record.metrics, **measured})


def _measure(name: str, params: Any, context: MetricContext) -> dict[str, MetricValue]:
    try:
        values = METRICS[name].target(params, context)
    except MetricUnavailableError as reason:
        return {UNAVAILABLE: str(reason)}
    if not isinstance(values, Mapping):
        raise UserError(f"metric {name!r}: must return a mapping of values by name, not {type(values).__name__}")
    return {str(key): plain_value(value, f"{name}.{key}") for key, value in values.items()}


def plain_value(value: object, label: str) -> MetricValue:
    """Return a value as JSON can hold it; a number that is not finite becomes ``None``. Messages name the label."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(item, label) for item in value]
    raise UserError(f"metric {label}: a value must be a number, a text or a list of them, not {type(value).__name__}")
