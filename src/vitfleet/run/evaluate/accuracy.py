"""Evaluation: global accuracy on the common test set, local accuracy on each client's own test images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import EvalConfig
from vitfleet.data.images import ImageSet
from vitfleet.data.partitions.client_indices import ClientIndices
from vitfleet.data.preprocess import Preprocess
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.message import State, Tensors
from vitfleet.methods.base import Method
from vitfleet.models.net import Net
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.randomness import Address, Purpose
from vitfleet.run.evaluate.predictions import Predictions
from vitfleet.training.evaluator import Evaluator, Scores
from vitfleet.training.execution.settings import ExecutionSettings


class GlobalEvaluation(NamedTuple):
    """Accuracy and loss on the common test set, means over a number of models; ``None`` if no model was evaluated.

    The loss is also ``None`` if it is not finite.
    """

    accuracy: float | None
    loss: float | None
    models: int


@dataclass(frozen=True)
class FleetEvaluator:
    """Evaluates models on test images: whole ones, never masked, in large batches."""

    net: Net
    preprocess: Preprocess
    test: ImageSet
    client_indices: ClientIndices  # each client's test images, task by task
    machine: ExecutionSettings
    config: EvalConfig
    seed: int
    # The task of each class, ``[classes]``, if the model is told an image's task; ``None``: all classes compete
    class_to_task: Tensor | None = None
    held_out_clients: Sequence[int] = ()  # clients that never train: their models do not stand for the global one

    def evaluate_global(
        self,
        method: Method[Any],
        round: int,
        server: State,
        base_weights: Tensors,
        client_state: Callable[[int], State | None],
        progress: Progress = NO_PROGRESS,
    ) -> GlobalEvaluation:
        """Evaluate the global model on the common test set.

        Without a global model, the models of at most ``eval.clients`` clients are evaluated instead, the same ones in
        every round. They are loaded and evaluated a few at a time, see :attr:`Evaluator.models_at_once`.
        """
        clients = [] if method.has_global_model else self._evaluated_clients()
        count = 1 if method.has_global_model else len(clients)
        if not count:
            return GlobalEvaluation(None, None, 0)

        def distinct_models() -> Iterator[Tensors]:
            untrained = count
            for state in map(client_state, clients):
                if state is not None:
                    untrained -= 1
                    yield method.model_weights(server, base_weights, state)
            if untrained:
                yield method.model_weights(server, base_weights, None)

        results: list[tuple[float, float]] = []
        models = distinct_models()
        with progress.task(f"round {round}: evaluation", count) as advance:
            while group := list(islice(models, self._evaluator.models_at_once)):
                results += self._evaluator.evaluate_models(group, self.test).means()
                advance(len(group))
        # All clients without a state have the same model. It was evaluated once, last, and counts for each of them.
        results += [results[-1]] * (count - len(results))
        accuracy, loss = (sum(column) / len(results) for column in zip(*results, strict=True))
        return GlobalEvaluation(accuracy, loss if math.isfinite(loss) else None, len(results))

    def evaluate_clients(self, weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
        """Evaluate one model on the test images of clients' tasks, each image once, in large batches."""
        indices = [self.client_indices.for_client(client, task_index) for client, task_index in tasks]
        distinct, inverse = np.unique(np.concatenate(indices), return_inverse=True)
        if not len(distinct):
            return [EvalResult(0, 0)] * len(tasks)
        correct = self.evaluate(weights, distinct).correct.cpu().numpy()[inverse]
        by_task = np.split(correct, np.cumsum([len(index) for index in indices])[:-1])
        return [EvalResult(int(part.sum()), len(part)) for part in by_task]

    def evaluate(self, weights: Tensors, index: NDArray[np.int64] | None = None) -> Scores:
        """Evaluate a model on the common test set, or on some of its images."""
        chosen = None if index is None else torch.from_numpy(index).to(self.machine.device)
        return self._evaluator.evaluate(weights, self.test, chosen)

    def logits(self, weights: Tensors, index: Tensor) -> Tensor:
        """Return a model's logits of some test images, all classes competing."""
        evaluator = replace(self._evaluator, class_to_task=None)
        return evaluator.logits(weights, self.test, index.to(self.machine.device))

    def predict(self, weights: Tensors) -> Predictions:
        """Return a model's predictions for the common test set."""
        logits = self._evaluator.logits(weights, self.test)
        return Predictions(self.test.labels.cpu().numpy(), logits.float().cpu().numpy())

    @property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.net, self.preprocess, self.machine, self.config.batch_size, self.class_to_task)

    def _evaluated_clients(self) -> list[int]:
        # The draw has no round: between other clients each time, a curve would also show how clients differ.
        candidates = np.setdiff1d(
            np.arange(self.client_indices.num_clients), np.array(self.held_out_clients, dtype=np.int64)
        )
        limit = self.config.clients
        if limit is not None and limit < len(candidates):
            rng = Address(self.seed, Purpose.EVALUATE).generator()
            candidates = np.sort(rng.choice(candidates, limit, replace=False))
        return [int(client) for client in candidates]
