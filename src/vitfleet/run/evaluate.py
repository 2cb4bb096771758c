"""Global accuracy on the common test set, local accuracy on each client's own split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import EvalConfig
from vitfleet.data.batches import Preprocess
from vitfleet.data.images import ImageSet
from vitfleet.data.partition import Deal
from vitfleet.message import State, Tensors
from vitfleet.methods.base import Method
from vitfleet.models.net import Net
from vitfleet.randomness import Address, Purpose
from vitfleet.run.records import Accuracy
from vitfleet.train.machine import Machine


@dataclass(frozen=True)
class Evaluator:
    """Measures models on the test images, whole (never masked), in large batches on the device."""

    net: Net
    preprocess: Preprocess
    test: ImageSet
    deal: Deal
    machine: Machine
    config: EvalConfig
    seed: int

    def evaluate(
        self,
        method: Method[Any],
        round: int,
        server: State,
        base: Tensors,
        own: Callable[[int], State | None],
    ) -> Accuracy:
        """Measure a method as it stands after a round.

        Where all clients use one model a single pass over the test set gives both figures. Where they have
        models of their own, at most ``eval.clients`` of them are measured, drawn anew each time.
        """
        if not method.personal:
            return self._shared(method.model(server, base, None))
        clients = self._draw_clients(round)
        if method.has_global_model:
            right, losses = self.answer(method.model(server, base, None))
            local = [
                self.answer(method.model(server, base, own(client)), self.deal.of(client))[0].mean()
                for client in clients
            ]
            return Accuracy(float(right.mean()), _mean(local), float(losses.mean()), len(clients))
        everywhere, at_home, test_losses = [], [], []
        for client in clients:
            right, losses = self.answer(method.model(server, base, own(client)))
            everywhere.append(right.mean())
            at_home.append(right[torch.from_numpy(self.deal.of(client)).to(right.device)].mean())
            test_losses.append(losses.mean())
        return Accuracy(_mean(everywhere), _mean(at_home), _mean(test_losses), len(clients))

    @torch.inference_mode()
    def answer(self, weights: Tensors, index: NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor]:
        """Return, for each test image, whether it is named rightly (0 or 1) and its cross-entropy."""
        self.net.module.eval()
        device = self.machine.device
        chosen = torch.arange(len(self.test), device=device) if index is None else torch.from_numpy(index).to(device)
        right, losses = [], []
        for part in torch.split(chosen, self.config.batch_size):
            images = self.preprocess(self.test.images[part])
            labels = self.test.labels[part]
            with self.machine.autocast():
                logits = self.net(weights, images)
            right.append(logits.argmax(dim=1) == labels)
            losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
        return torch.cat(right).float(), torch.cat(losses)

    def _shared(self, weights: Tensors) -> Accuracy:
        right, losses = self.answer(weights)
        verdicts = right.cpu().numpy()
        sizes = self.deal.sizes()
        owner = np.repeat(np.arange(self.deal.clients), sizes)
        hits = np.bincount(owner, weights=verdicts[self.deal.indices], minlength=self.deal.clients)
        has = sizes > 0
        local = float((hits[has] / sizes[has]).mean())
        return Accuracy(float(verdicts.mean()), local, float(losses.mean()), int(has.sum()))

    def _draw_clients(self, round: int) -> list[int]:
        candidates = np.flatnonzero(self.deal.sizes() > 0)
        limit = self.config.clients
        if limit is not None and limit < len(candidates):
            rng = Address(self.seed, Purpose.EVALUATE, round).generator()
            candidates = np.sort(rng.choice(candidates, limit, replace=False))
        return [int(client) for client in candidates]


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())
