"""Global accuracy on the common test set, local accuracy on each client's own split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import EvalConfig
from vitfleet.data.batches import Preprocess
from vitfleet.data.images import ImageSet
from vitfleet.data.partition import Deal
from vitfleet.fleet.base import Verdict
from vitfleet.fleet.inline import Stage
from vitfleet.message import State, Tensors
from vitfleet.methods.base import Method
from vitfleet.models.net import Net
from vitfleet.progress import SILENCE, Progress
from vitfleet.randomness import Address, Purpose
from vitfleet.train.judge import Judge
from vitfleet.train.machine import Machine


@dataclass(frozen=True)
class Evaluator:
    """Measures models on the test images, whole (never masked), in large batches on the device.

    Attributes
    ----------
    deal, stages
        The test images of every client, stage after stage of its stream of tasks (one, where there is none).
    tasks
        The task of each class, ``[classes]``, where an image's task is known; ``None``: any class can win.
    """

    net: Net
    preprocess: Preprocess
    test: ImageSet
    deal: Deal
    machine: Machine
    config: EvalConfig
    seed: int
    stages: int = 1
    tasks: Tensor | None = None

    def common(
        self,
        method: Method[Any],
        round: int,
        server: State,
        base: Tensors,
        own: Callable[[int], State | None],
        progress: Progress = SILENCE,
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
                right, losses = self.answer(method.model(server, base, state))
                measured.append((float(right.mean()), float(losses.mean())))
        accuracy, loss = (sum(column) / len(measured) for column in zip(*measured, strict=True))
        return accuracy, loss if math.isfinite(loss) else None, len(measured)

    def judge(self, model: Tensors, places: list[Stage]) -> list[Verdict]:
        """Try a model out on the test images of clients' stages: together, in large batches, each image once."""
        held = [self.images_of(client, stage) for client, stage in places]
        index, back = np.unique(np.concatenate(held), return_inverse=True)
        if not len(index):
            return [Verdict(0, 0)] * len(places)
        right = self.answer(model, index)[0].cpu().numpy()[back]
        parts = np.split(right, np.cumsum([len(one) for one in held])[:-1])
        return [Verdict(int(part.sum()), len(part)) for part in parts]

    def images_of(self, client: int, stage: int) -> NDArray[np.int64]:
        """Return a client's test images of a stage."""
        return self.deal.of(client * self.stages + stage)

    def answer(self, weights: Tensors, index: NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor]:
        """Return, for each test image, whether it is named rightly (0 or 1) and its cross-entropy."""
        judge = Judge(self.net, self.preprocess, self.machine, self.config.batch_size, self.tasks)
        chosen = None if index is None else torch.from_numpy(index).to(self.machine.device)
        return judge.answer(weights, self.test, chosen)

    def _draw_clients(self, round: int) -> list[int]:
        candidates = np.arange(self.deal.clients // self.stages)
        limit = self.config.clients
        if limit is not None and limit < len(candidates):
            rng = Address(self.seed, Purpose.EVALUATE, round).generator()
            candidates = np.sort(rng.choice(candidates, limit, replace=False))
        return [int(client) for client in candidates]
