"""Operations and bytes of clients' rounds, without training: dry runs and their counted operations.

The memory of a training is computed by :mod:`vitfleet.costs.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.schema import TrainConfig
from vitfleet.costs.dry_run import NO_LABELS, DryRun, dry_run, message_size, shapes_of
from vitfleet.costs.flops import Flops, count_flops, forward_weights
from vitfleet.message import Numbers, State
from vitfleet.methods.base import Method
from vitfleet.models.net import Net
from vitfleet.training.cohort_inputs import memory_widths
from vitfleet.training.game import SequentialGame
from vitfleet.training.memories import Teachers
from vitfleet.training.objective import Fit, Loss


class CostModel:
    """Computes the costs of clients' rounds; the FLOPs of each distinct objective are counted once and cached.

    Parameters
    ----------
    method
        A method whose tensors are on the CPU; nothing is computed with them.
    side
        Height and width of the clients' images in pixels; by default, the model's input size.
    counted
        Operations that were counted before, for models of the same shapes; new counts are added.
    """

    def __init__(
        self,
        method: Method[Any],
        net: Net,
        train: TrainConfig,
        side: int | None = None,
        counted: dict[object, Flops] | None = None,
    ) -> None:
        self.method = method
        self.train = train
        self.net = net.with_constants_on("meta")
        self.side = side or net.image_size
        self.blank = shapes_of(net)
        self._flops_cache = {} if counted is None else counted

    def dry_run(
        self,
        round: int,
        client: int,
        labels: NDArray[np.int64],
        task_index: int = 0,
        client_metrics: Numbers | None = None,
    ) -> DryRun:
        """Execute a client's round on meta tensors.

        Parameters
        ----------
        task_index
            Number of tasks before this one.
        client_metrics
            The numbers of the client's last message; ``None``: first round of the client.
        """
        kept = None if client_metrics is None else self._kept_state(client_metrics)
        return dry_run(self.method, self.net, self.side, labels, round, client, task_index, kept, self.blank)

    def late_round(self, labels: Sequence[NDArray[np.int64]]) -> DryRun:
        """Dry-run the most expensive round of a client: its second one in the last task, after a round in every task.

        Parameters
        ----------
        labels
            Labels of the client's images in each task.
        """
        client_metrics: Numbers | None = None
        for position in range(len(labels) + 1):
            task_index = min(position, len(labels) - 1)
            first_task = 0 if self.method.accumulates_tasks else task_index
            task_labels = np.concatenate(labels[first_task : task_index + 1])
            dry_run_result = self.dry_run(self.method.cost_round, 0, task_labels, task_index, client_metrics)
            client_metrics = dry_run_result.update.message.numbers
        return dry_run_result

    @cached_property
    def _first_round_state(self) -> State | None:
        """State that a client without images keeps after its first round."""
        return dry_run(self.method, self.net, self.side, NO_LABELS).update.client_state

    def _kept_state(self, client_metrics: Numbers) -> State | None:
        if self._first_round_state is None:
            return None
        stored = self.method.client_state_shapes(client_metrics, len(self.net.mean), self.side)
        numbers = {name: client_metrics.get(name, kept) for name, kept in self._first_round_state.numbers.items()}
        return State({**self._first_round_state.tensors, **stored}, numbers)

    def flops(self, fit: Fit, masked: bool = True) -> Flops:
        """Count the operations per sample of a training; without ``masked``, those of an unmasked image."""
        objective, ratio = fit.objective, (fit.train or self.train).mask_ratio if masked else 0.0
        select = self.net.anatomy.select
        given = {name: weight.shape for name, weight in forward_weights(self.net, objective, fit.weights).items()}
        architecture = (self.net.layout.functional, frozenset(given.items()))
        key = (architecture, select(objective.trainable), objective.depth, objective.split, ratio)
        if key not in self._flops_cache:
            self._flops_cache[key] = count_flops(self.net, objective, fit.weights, ratio)
        return self._flops_cache[key]

    def average(self, dry_run_result: DryRun) -> Flops:
        """Return the operations per sample, averaged over the epochs of all trainings of a round."""
        per_fit = [(self.flops(fit), fit.epochs, num_trained_models(fit)) for fit in dry_run_result.fits]
        epochs = sum(fit_epochs for _, fit_epochs, _ in per_fit)
        return Flops(
            sum(flops.forward * fit_epochs * models for flops, fit_epochs, models in per_fit) // epochs,
            sum(flops.training * fit_epochs * models for flops, fit_epochs, models in per_fit) // epochs,
        )

    def round_flops(self, dry_run_result: DryRun, samples: int) -> int:
        """Count the operations of a client's whole round.

        A training may also replay stored samples in its steps, process them for reference gradients, compute a second
        gradient at the reference weights, train a companion, and score every sample at its end.
        """
        total = 0
        for fit in dry_run_result.fits:
            steps = -(-samples // (fit.train or self.train).batch_size)
            per_sample = 1 if fit.replay is None else 1 + fit.replay.replays * memory_passes(fit.objective.loss)
            passes = fit.epochs * samples * per_sample
            total += passes * (num_trained_models(fit) + (fit.reference_weights is not None)) * self.flops(fit).training
            if isinstance(fit.memory, Teachers):
                total += fit.epochs * self._distillation_flops(fit, samples)
            elif stored := fit.epochs * stored_passes(fit, steps):
                total += stored * self.flops(fit, masked=fit.objective.mask_memory).training
            if fit.score_samples:  # on whole images
                total += samples * self.flops(fit, masked=False).forward
        return total

    def _distillation_flops(self, fit: Fit, samples: int) -> int:
        """Count the operations per epoch for the reference gradients of teachers, on the batches of the steps.

        One forward pass of the model, and for each teacher its forward pass and a backward pass of the model.
        """
        batch_size, flops = (fit.train or self.train).batch_size, self.flops(fit)
        total = 0
        for step in range(-(-samples // batch_size)):
            if teachers := parts_in_step(fit, step):
                size = min(batch_size, samples - step * batch_size)
                total += size * (flops.forward + teachers * flops.training)
        return total

    def up_bytes(self, dry_run_result: DryRun) -> int:
        """Return the encoded size of a client's message; an empty message is not sent."""
        return message_size(dry_run_result.update.message)

    def down_bytes(self) -> tuple[int, int]:
        """Return the encoded sizes of the server's message in the method's cost round and of the base message."""
        blank = shapes_of(self.net)
        server: State = self.method.initial_state(blank)
        return (
            message_size(self.method.client_message(server, self.method.cost_round, 0, None)),
            message_size(self.method.base_message(blank)),
        )


def memory_passes(loss: Loss) -> int:
    """Return how often a step passes its replayed samples through the model."""
    return loss.memory_passes if isinstance(loss, SequentialGame) else 1


def num_trained_models(fit: Fit) -> int:
    """Return how many sets of weights a training trains: one, or two with a companion."""
    return 1 if fit.companion_weights is None else 2


def stored_passes(fit: Fit, steps: int) -> int:
    """Count the forward and backward passes of stored samples per epoch, for the reference gradients of a training.

    In a step in which the selector selects, it needs the gradients of all stored tasks; in the other steps only those
    of the k selected tasks are computed, or none where gradients are reused.
    """
    if fit.memory is None or not len(fit.memory):
        return 0
    widths = memory_widths([fit.memory])
    return sum(sum(widths[: parts_in_step(fit, step)]) for step in range(steps))


def parts_in_step(fit: Fit, step: int) -> int:
    """Return of how many stored tasks a step of an epoch computes the gradients."""
    stored_tasks, selector = 0 if fit.memory is None else len(fit.memory), fit.objective.selector
    select, restore = fit.objective.reference_work(step)
    if not restore:
        return 0
    return stored_tasks if select or selector is None else min(selector.k, stored_tasks)
