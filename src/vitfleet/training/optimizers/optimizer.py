"""The optimiser and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vitfleet.config.schema import TrainConfig

ADAMW_BETAS = (0.9, 0.999)
ADAMW_EPSILON = 1e-8


def learning_rate(config: TrainConfig, round: int, rounds: int) -> float:
    """Return the learning rate of a round.

    A client takes few steps per round, so the schedule runs over rounds and is constant within a round: it rises
    linearly over ``warmup_rounds``, then follows half a cosine towards zero, which it never reaches. Rounds count from
    1. After ``rounds``, those of the run or of one task, the schedule starts again.
    """
    round = (round - 1) % rounds + 1
    if round <= config.warmup_rounds:
        return config.lr * round / (config.warmup_rounds + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (round - 1 - config.warmup_rounds) / max(1, rounds - config.warmup_rounds)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """A new optimiser for each of one or several clients. No state is kept between rounds.

    It calls torch's fused kernel once per client, on views of the stacked weights. ``torch.optim`` itself has one step
    count for all weights; here every client has its own. A client without a step skips it: the kernel's flag for that
    was made for gradient overflows. One call per client keeps few of a GPU's processors busy: there AdamW is a Triton
    kernel that is called once per tensor. ``num_clients`` is the length of the leading axis of clients; ``None``: the
    leaves, the weights that train, have no such axis.
    """

    def __init__(
        self, config: TrainConfig, leaves: Mapping[str, Tensor], num_clients: int | None, kernels: bool = False
    ) -> None:
        self.config = config
        self.num_clients = num_clients
        device = next(iter(leaves.values())).device if leaves else torch.device("cpu")
        is_adamw = config.optimizer == "adamw"
        num_moments = 2 if is_adamw else (1 if config.momentum else 0)
        self.leaves = {name: leaf.detach() for name, leaf in leaves.items()}
        # Not initialised: a training begins with `restart`.
        self.moments = [{name: torch.empty_like(leaf) for name, leaf in leaves.items()} for _ in range(num_moments)]
        # The kernel for GPUs reads the learning rate as float32, the one for CPUs takes it as a double.
        self.lr = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self.step_counts = torch.zeros(num_clients or 1, device=device)
        self.kernel: Any = None
        if kernels and is_adamw and num_clients is not None:
            # Imported only here, because it needs Triton.
            self.kernel = import_module("vitfleet.training.optimizers.fused_adamw")

    def restart(self, lr: float) -> None:
        """Reset all state, and set the learning rate."""
        self.lr.fill_(lr)
        torch._foreach_zero_([self.step_counts, *(tensor for moment in self.moments for tensor in moment.values())])

    def first(self, count: int) -> Optimizer:
        """Return the optimiser of the first ``count`` clients, which works on the same memory."""
        part = copy(self)
        part.num_clients = count
        part.step_counts = self.step_counts[:count]
        part.leaves = {name: leaf[:count] for name, leaf in self.leaves.items()}
        part.moments = [{name: tensor[:count] for name, tensor in moment.items()} for moment in self.moments]
        return part

    def step(self, gradients: Mapping[str, Tensor], active: Tensor | None) -> None:
        """Take a step; ``active`` is 1 for each client that takes it, else 0, on the device; ``None``: all take it."""
        self.step_counts += 1 if active is None else active
        if self.kernel is not None:
            self._step_stacked(gradients, torch.ones_like(self.step_counts) if active is None else active)
            return
        weights = self._per_client(self.leaves.values())
        client_gradients = self._per_client(gradients[name] for name in self.leaves)
        moments = [self._per_client(moment.values()) for moment in self.moments]
        step_counts = self.step_counts.unbind()
        skips = [None] * len(weights) if active is None else (1 - active).reshape(-1).unbind()
        for client, skip in enumerate(skips):
            client_moments = [moment[client] for moment in moments]
            self._step_client(weights[client], client_gradients[client], client_moments, step_counts[client], skip)

    def _step_stacked(self, gradients: Mapping[str, Tensor], active: Tensor) -> None:
        """Take an AdamW step of all clients, with one kernel launch per tensor."""
        first_moments, second_moments = self.moments
        for name, leaf in self.leaves.items():
            self.kernel.adamw(
                leaf,
                gradients[name],
                first_moments[name],
                second_moments[name],
                self.step_counts,
                active,
                self.lr,
                betas=ADAMW_BETAS,
                epsilon=ADAMW_EPSILON,
                weight_decay=self.config.weight_decay,
            )

    def _step_client(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        step_count: Tensor,
        skip: Tensor | None,
    ) -> None:
        """Take a step of one client with torch's fused kernel."""
        config = self.config
        if config.optimizer == "sgd":
            torch._fused_sgd_(
                weights,
                gradients,
                moments[0] if moments else [],
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # the momentum buffer is zero, which has the same result
                found_inf=skip,
            )
            return
        torch._fused_adamw_(
            weights,
            gradients,
            moments[0],
            moments[1],
            [],
            [step_count] * len(weights),
            lr=self.lr,
            beta1=ADAMW_BETAS[0],
            beta2=ADAMW_BETAS[1],
            weight_decay=config.weight_decay,
            eps=ADAMW_EPSILON,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )

    def _per_client(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of each client."""
        if self.num_clients is None:
            return [list(tensors)]
        return [list(row) for row in zip(*(tensor.unbind() for tensor in tensors), strict=True)]
