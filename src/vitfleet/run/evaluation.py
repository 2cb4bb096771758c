"""Global accuracy on the common test set, local accuracy on each client's own split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import EvalConfig
from vitfleet.data.client_indices import ClientIndices
from vitfleet.data.images import ImageSet
from vitfleet.data.preprocess import Preprocess
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.message import State, Tensors
from vitfleet.methods.base import Method
from vitfleet.models.net import Net
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.randomness import Address, Purpose
from vitfleet.training.evaluator import Evaluator
from vitfleet.training.machine import Machine


@dataclass(frozen=True)
class FleetEvaluator:
    """Measures models on the test images, whole (never masked), in large batches on the device.

    Attributes
    ----------
    deal
        Each client's test images, task by task.
    tasks
        The task of each class, ``[classes]``, where an image's task is known; ``None``: any class can win.
    """

    net: Net
    preprocess: Preprocess
    test: ImageSet
    deal: ClientIndices
    machine: Machine
    config: EvalConfig
    seed: int
    class_tasks: Tensor | None = None

    def evaluate_global(
        self,
        method: Method[Any],
        round: int,
        server: State,
        base: Tensors,
        own: Callable[[int], State | None],
        progress: Progress = NO_PROGRESS,
    ) -> tuple[float | None, float | None, int]:
        """Return accuracy and loss on the common test set, and how many models they are the mean of.

        Where the server has no model of its own, the models of at most ``eval.clients`` clients stand for it,
        drawn anew each time; where none of them may be looked at, there is nothing to measure.
        """
        if method.has_global_model:
            states: list[State | None] = [None]
        else:
            # Clients that never took part all have the same model: it is measured once and counts for each of them.
            states = sorted((own(client) for client in self._draw_clients(round)), key=lambda state: state is None)
        if not states:
            return None, None, 0
        measured: list[tuple[float, float]] = []
        with progress.task(f"round {round}: evaluation", len(states)) as advance:
            for position, state in enumerate(states):
                advance(1)
                if state is None and position and states[position - 1] is None:
                    measured.append(measured[-1])
                    continue
                correct, losses = self.evaluate(method.model_weights(server, base, state))
                measured.append((float(correct.mean()), float(losses.mean())))
        accuracy, loss = (sum(column) / len(measured) for column in zip(*measured, strict=True))
        return accuracy, loss if math.isfinite(loss) else None, len(measured)

    def evaluate_clients(self, model: Tensors, places: Sequence[ClientTask]) -> list[EvalResult]:
        """Try a model out on the test images of clients' stages: together, in large batches, each image once."""
        held = [self.test_indices(client, task_index) for client, task_index in places]
        index, back = np.unique(np.concatenate(held), return_inverse=True)
        if not len(index):
            return [EvalResult(0, 0)] * len(places)
        correct = self.evaluate(model, index)[0].cpu().numpy()[back]
        parts = np.split(correct, np.cumsum([len(one) for one in held])[:-1])
        return [EvalResult(int(part.sum()), len(part)) for part in parts]

    def test_indices(self, client: int, task_index: int) -> NDArray[np.int64]:
        """Return a client's test images of a stage."""
        return self.deal.for_client(client, task_index)

    def evaluate(self, weights: Tensors, index: NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor]:
        """Return, for each test image, whether it is named rightly (0 or 1) and its cross-entropy."""
        judge = Evaluator(self.net, self.preprocess, self.machine, self.config.batch_size, self.class_tasks)
        chosen = None if index is None else torch.from_numpy(index).to(self.machine.device)
        return judge.evaluate(weights, self.test, chosen)

    def _draw_clients(self, round: int) -> list[int]:
        candidates = np.arange(self.deal.num_clients)
        limit = self.config.clients
        if limit is not None and limit < len(candidates):
            rng = Address(self.seed, Purpose.EVALUATE, round).generator()
            candidates = np.sort(rng.choice(candidates, limit, replace=False))
        return [int(client) for client in candidates]
