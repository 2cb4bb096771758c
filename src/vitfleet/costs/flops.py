"""Floating-point operations and bytes of a client's round, without training.

A dry run executes the method's client update on meta tensors, which have shapes but no values. The objectives that it
yields define which weights train, how images are masked, and how deep or where the model is split; the update that it
returns is the message to send. Operations and bytes thus follow from the same selection as the training. The memory of
a training is computed by :mod:`vitfleet.costs.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitfleet.config.schema import TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.base import ClientJob, ClientUpdate, Method
from vitfleet.models.net import Net
from vitfleet.training.cohort_inputs import memory_widths
from vitfleet.training.composition import composition_of
from vitfleet.training.game import SequentialGame
from vitfleet.training.memories import Teachers
from vitfleet.training.objective import Fit, FitResult, Loss, Objective
from vitfleet.wire import encoded_size

NO_LABELS: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # labels of a client without images


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per sample; a multiply-add counts as two.

    Attributes
    ----------
    forward
        Forward pass of a training step: masked, through the layers of the client's model.
    training
        Forward and backward pass. A frozen layer still propagates the gradient, but needs none for its weights.
    """

    forward: int
    training: int


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run of a client's round.

    Attributes
    ----------
    fits
        The trainings that the client would run.
    update
        The message it would send and the state it would keep.
    held_tensors
        Tensors held during the whole round: received tensors, and state kept from earlier rounds.
    """

    fits: list[Fit]
    update: ClientUpdate
    held_tensors: list[Tensor]


def dry_run(
    method: Method[Any],
    net: Net,
    side: int,
    labels: NDArray[np.int64],
    round: int = 1,
    client: int = 0,
    task_index: int = 0,
    client_state: State | None = None,
    blank: Tensors | None = None,
) -> DryRun:
    """Execute a client's round on meta tensors, which have shapes but no values.

    Parameters
    ----------
    side
        Height and width of the client's images, in pixels.
    labels
        Labels of the client's images in this task.
    task_index
        Number of tasks before this one.
    client_state
        State kept from earlier rounds, as meta tensors; ``None``: first round of the client.
    blank
        The model's weights as meta tensors; created if not given.
    """
    blank = shapes_of(net) if blank is None else blank
    received = method.client_message(method.initial_state(blank), round, client, None)
    targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    pixels = torch.empty(len(targets), len(net.mean), side, side, dtype=torch.uint8, device="meta")
    shard = Shard(ImageSet(pixels, targets), torch.arange(len(targets)))
    base = method.base_message(blank).tensors
    fit_requests = method.client_update(ClientJob(round, client, received, base, client_state, shard, task_index))
    held_tensors = [
        *received.tensors.values(),
        *base.values(),
        *(client_state.tensors.values() if client_state else ()),
    ]
    fits: list[Fit] = []
    try:
        fit = next(fit_requests)
        while True:
            fits.append(fit)
            num_classes, training = method.context.num_classes, (client_state is None, len(fits))
            fit = fit_requests.send(_blank_result(fit, len(targets), num_classes, training))
    except StopIteration as end:
        update: ClientUpdate = end.value
        return DryRun(fits, update, held_tensors)


def shapes_of(net: Net) -> dict[str, Tensor]:
    """Return a model's weights as meta tensors."""
    return {name: torch.empty(shape, device="meta") for name, shape in net.anatomy.shapes.items()}


@lru_cache(maxsize=4096)
def _blank_weight(name: str, shape: torch.Size, training: tuple[bool, int]) -> Tensor:
    """Return a weight as a meta tensor; cached, because creating it takes longer than the rest of a dry run.

    Memory is counted per tensor. ``training`` is therefore part of the key: different trainings of a round, and first
    and later rounds, have different tensors.
    """
    return torch.empty(shape, device="meta")


def _blank_result(fit: Fit, samples: int, num_classes: int, training: tuple[bool, int]) -> FitResult:
    objective = fit.objective
    trained = {name: _blank_weight(name, fit.weights[name].shape, training) for name in objective.trainable}
    # Methods read the observer state on the host, so it needs values: zeros.
    observed = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in fit.observer_state.items()}
    for rule in (objective.transform, objective.companion):
        if rule is not None:
            observed |= {name: torch.zeros(()) for name in rule.counts}
    scored, steps = samples if fit.score_samples else 0, max(1, fit.epochs)
    companion = {
        name: _blank_weight(f"companion {name}", tensor.shape, training)
        for name, tensor in (fit.companion_weights or {}).items()
    }
    return FitResult(
        trained,
        torch.zeros(()),
        samples,
        steps,
        observed,
        sample_losses=torch.zeros(scored),
        finite_steps=torch.tensor(float(steps)),
        sample_logits=torch.empty(scored, num_classes, device="meta"),
        companion_weights=companion,
    )


class CostModel:
    """Computes the costs of clients' rounds; the FLOPs of each distinct objective are counted once and cached.

    Parameters
    ----------
    method
        A method whose tensors are on the CPU; nothing is computed with them.
    side
        Height and width of the clients' images in pixels; by default, the model's input size.
    """

    def __init__(self, method: Method[Any], net: Net, train: TrainConfig, side: int | None = None) -> None:
        self.method = method
        self.train = train
        self.net = net.with_constants_on("meta")
        self.side = side or net.image_size
        self.blank = shapes_of(net)
        self._flops_cache: dict[object, Flops] = {}

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
        given = frozenset(_forward_weights(self.net, objective, fit.weights))
        key = (select(objective.trainable), objective.depth, objective.split, ratio, given)
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
    parts = [parts_in_step(fit, step) for step in range(steps)]
    return sum(sum(widths) if count == len(widths) else count * widths[0] for count in parts)


def parts_in_step(fit: Fit, step: int) -> int:
    """Return of how many stored tasks a step of an epoch computes the gradients."""
    stored_tasks, selector = 0 if fit.memory is None else len(fit.memory), fit.objective.selector
    select, restore = fit.objective.reference_work(step)
    if not restore:
        return 0
    return stored_tasks if select or selector is None else min(selector.k, stored_tasks)


def client_flops(method: Method[Any], net: Net, mask_ratio: float) -> Flops:
    """Count the operations per sample of a method's client training."""
    cost_model = CostModel(method, net, method.context.train.model_copy(update={"mask_ratio": mask_ratio}))
    return cost_model.average(cost_model.dry_run(method.cost_round, 0, NO_LABELS))


def message_size(message: Message) -> int:
    """Return a message's encoded size in bytes; an empty message is not sent, so its size is 0."""
    return encoded_size(message) if message.tensors or message.numbers else 0


def full_flops(net: Net) -> Flops:
    """Count the operations of full training on an unmasked image, the reference for comparisons."""
    meta_net = net.with_constants_on("meta")
    return count_flops(meta_net, Objective(net.anatomy.whole), shapes_of(net), 0.0)


def count_flops(net: Net, objective: Objective, weights: Tensors, mask_ratio: float) -> Flops:
    """Count the operations per sample under an objective.

    Where weights are composed, the operations of the composition are not counted: they are few, and per step.
    """
    trainable = net.anatomy.select(net.anatomy.trainable(objective.trainable))
    weights = _forward_weights(net, objective, weights)
    leaves = {name: torch.empty_like(weights[name], device="meta", requires_grad=True) for name in trainable}
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    images = torch.empty(1, len(net.mean), net.image_size, net.image_size, device="meta")
    keep = torch.empty(1, net.num_kept_patches(mask_ratio), dtype=torch.long, device="meta") if mask_ratio else None
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        logits = forward(net, objective, {**blank, **leaves}, images, keep)
        forward_flops = counter.get_total_flops()
        torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)
        return Flops(forward_flops, counter.get_total_flops())


def _convolution_backward_flops(
    grad_output: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *arguments: Any, **options: Any
) -> int:
    """Count the operations of a convolution's backward pass by shapes.

    Each of its two products takes as many as the forward pass. torch's own formula for the gradient of the weight
    ignores groups, and counts a depthwise convolution as often as it has channels.
    """
    needs_inputs, needs_weight, _ = arguments[-1]
    return 2 * prod(grad_output) * prod(weight[1:]) * (int(needs_inputs) + int(needs_weight))


def _forward_weights(net: Net, objective: Objective, weights: Tensors) -> Tensors:
    """Return the weights that a forward pass reads: a model may have more than its own, such as a teacher's.

    Where the objective composes the model's weights, the others are what they are composed of.
    """
    is_composed = composition_of(objective.trainable) is not None
    return net.anatomy.select(weights).take(weights) if is_composed else weights


def forward(
    net: Net, objective: Objective, weights: Tensors, images: torch.Tensor, keep: torch.Tensor | None
) -> torch.Tensor:
    """Run the forward pass with the depth or the split of an objective."""
    if objective.split is None:
        return net.outputs(weights, images, keep, objective.depth)
    features = net.forward_to(weights, images, keep, objective.split)
    return net.forward_from(weights, features, objective.split)


def typical_client(sizes: Sequence[int]) -> int:
    """Return the client with the median number of samples among those with at least one; 0 if there is none."""
    order = sorted((size, client) for client, size in enumerate(sizes) if size)
    return order[(len(order) - 1) // 2][1] if order else 0
