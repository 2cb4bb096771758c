"""Optimisers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vitfleet.config.schema import TrainConfig

BETAS = (0.9, 0.999)  # AdamW's usual
EPSILON = 1e-8


def learning_rate(config: TrainConfig, round: int, rounds: int) -> float:
    """Return the learning rate of a round (counted from 1).

    A client sees few steps a round, so the schedule runs over rounds: linear up over ``warmup_rounds``, then half a
    cosine towards (never reaching) zero. It is constant within a round. ``rounds`` are those of the whole run, or of
    one task: after them it begins anew.
    """
    round = (round - 1) % rounds + 1
    if round <= config.warmup_rounds:
        return config.lr * round / (config.warmup_rounds + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (round - 1 - config.warmup_rounds) / max(1, rounds - config.warmup_rounds)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """A fresh optimiser for each of one or several clients: no state is kept between rounds.

    It is torch's own fused kernel, called once a client on views of the stacked weights: with its flag for a step to
    be skipped, which was made for overflows, a client that has no step takes none. `torch.optim` itself has one step
    count and one flag for all its weights. On a GPU that keeps few of its processors busy; there AdamW is a kernel of
    our own, called once a tensor.

    Parameters
    ----------
    leaves
        The weights that train; stacked on a leading axis where ``clients`` is not ``None``.
    kernels
        Whether there are kernels of our own.
    """

    def __init__(
        self, config: TrainConfig, leaves: Mapping[str, Tensor], clients: int | None, kernels: bool = False
    ) -> None:
        self.config = config
        self.clients = clients
        device = next(iter(leaves.values())).device if leaves else torch.device("cpu")
        adaptive = config.optimizer == "adamw"
        moments = 2 if adaptive else (1 if config.momentum else 0)
        self.leaves = {name: leaf.detach() for name, leaf in leaves.items()}
        # Whatever they hold: a training begins with a restart.
        self.moments = [{name: torch.empty_like(leaf) for name, leaf in leaves.items()} for _ in range(moments)]
        # A GPU's kernel reads a float, a CPU's takes the number as it is.
        self.rate = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self.taken = torch.zeros(clients or 1, device=device)
        self.kernel: Any = None
        if kernels and adaptive and clients is not None:
            self.kernel = import_module("vitfleet.training.fused_adamw")  # only then: it needs Triton

    def restart(self, rate: float) -> None:
        """Forget what was, and set the learning rate."""
        self.rate.fill_(rate)
        torch._foreach_zero_([self.taken, *(one for moment in self.moments for one in moment.values())])

    def first(self, count: int) -> Optimizer:
        """Return the optimiser of the first so many clients, which works on the same tensors."""
        some = copy(self)
        some.clients = count
        some.taken = self.taken[:count]
        some.leaves = {name: one[:count] for name, one in self.leaves.items()}
        some.moments = [{name: one[:count] for name, one in moment.items()} for moment in self.moments]
        return some

    def step(self, gradients: Mapping[str, Tensor], active: Tensor | None) -> None:
        """Take a step.

        Parameters
        ----------
        active
            Which clients take it, as 1 or 0, on the device; ``None``: all of them.
        """
        self.taken += 1 if active is None else active
        if self.kernel is not None:
            self._apply_to_all(gradients, torch.ones_like(self.taken) if active is None else active)
            return
        rows = self._views(gradients[name] for name in self.leaves)
        weights = self._views(self.leaves.values())
        states = [self._views(moment.values()) for moment in self.moments]
        counts = self.taken.unbind()
        skips = [None] * len(rows) if active is None else (1 - active).reshape(-1).unbind()
        for client, skip in enumerate(skips):
            self._apply(weights[client], rows[client], [state[client] for state in states], counts[client], skip)

    def _apply_to_all(self, gradients: Mapping[str, Tensor], active: Tensor) -> None:
        firsts, seconds = self.moments
        for name, leaf in self.leaves.items():
            self.kernel.adamw(
                leaf,
                gradients[name],
                firsts[name],
                seconds[name],
                self.taken,
                active,
                self.rate,
                betas=BETAS,
                epsilon=EPSILON,
                decay=self.config.weight_decay,
            )

    def _apply(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[list[Tensor]],
        count: Tensor,
        skip: Tensor | None,
    ) -> None:
        config = self.config
        if config.optimizer == "sgd":
            torch._fused_sgd_(
                weights,
                gradients,
                states[0] if states else [],
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                lr=self.rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # its velocity is zero, which comes to the same
                found_inf=skip,
            )
            return
        torch._fused_adamw_(
            weights,
            gradients,
            states[0],
            states[1],
            [],
            [count] * len(weights),
            lr=self.rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=config.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )

    def _views(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return each client's own tensors."""
        if self.clients is None:
            return [list(tensors)]
        return [list(row) for row in zip(*(one.unbind() for one in tensors), strict=True)]
