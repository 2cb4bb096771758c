"""What a client's round costs, without training anything: operations and bytes.

The client half is played on tensors that have shapes but no numbers. What it wants trained, masked, frozen, left out
or parted is in the objectives it yields, and what it would send is its answer, so operations and bytes follow from the
same selection as the training. The memory of a training is told by :mod:`vitfleet.costs.memory`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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
from vitfleet.training.objective import Fit, FitResult, Objective
from vitfleet.wire import encoded_size

NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # the labels of a client without images


@dataclass(frozen=True)
class Flops:
    """Floating-point operations (two a multiply-add) of one sample.

    Attributes
    ----------
    forward
        The forward pass of a training step: masked, through as many layers as the client's model has.
    training
        Forward and backward. A frozen layer still passes the gradient on; it is spared only that of its weights.
    """

    forward: int
    training: int


@dataclass(frozen=True)
class DryRun:
    """A client's round, played without numbers.

    Attributes
    ----------
    fits
        The trainings it would ask for.
    answer
        What it would send and keep.
    held
        What it has in its hands all the while: what it was sent, and what it had kept.
    """

    fits: list[Fit]
    answer: ClientUpdate
    held: list[Tensor]


def dry_run(
    method: Method[Any],
    net: Net,
    side: int,
    labels: NDArray[np.int64],
    round: int = 1,
    client: int = 0,
    task_index: int = 0,
    own: State | None = None,
    blank: Tensors | None = None,
) -> DryRun:
    """Play a client's round; what it asks for and sends has shapes, but no numbers.

    Parameters
    ----------
    side
        Pixels a side of the client's images.
    labels
        Of the client's images at this stage.
    task_index
        Number of tasks that the client has finished.
    own
        What it has kept, in shapes; ``None``: its first round.
    blank
        The model's weights in shapes, where somebody has them at hand.
    """
    blank = shapes_of(net) if blank is None else blank
    down = method.client_message(method.initial_state(blank), round, client, None)
    held = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    pixels = torch.empty(len(held), len(net.mean), side, side, dtype=torch.uint8, device="meta")
    shard = Shard(ImageSet(pixels, held), torch.arange(len(held)))
    base = method.base_message(blank).tensors
    work = method.client_update(ClientJob(round, client, down, base, own, shard, task_index))
    held_tensors = [*down.tensors.values(), *base.values(), *(own.tensors.values() if own else ())]
    fits: list[Fit] = []
    try:
        fit = next(work)
        while True:
            fits.append(fit)
            fit = work.send(_as_if_trained(fit, len(held), (own is None, len(fits))))
    except StopIteration as end:
        answer: ClientUpdate = end.value
        return DryRun(fits, answer, held_tensors)


def shapes_of(net: Net) -> dict[str, Tensor]:
    """Return a model's weights without numbers."""
    return {name: torch.empty(shape, device="meta") for name, shape in net.anatomy.shapes.items()}


@lru_cache(maxsize=4096)
def _blank(name: str, shape: torch.Size, training: tuple[bool, int]) -> Tensor:
    """Return a weight without numbers; made once, because making it takes longer than all the rest.

    Other trainings, and what a client keeps of its first round, have tensors of their own: memory is counted by them.
    """
    return torch.empty(shape, device="meta")


def _as_if_trained(fit: Fit, samples: int, training: tuple[bool, int]) -> FitResult:
    objective = fit.objective
    trained = {name: _blank(name, fit.weights[name].shape, training) for name in objective.trainable}
    # What was observed is read on the host: it has numbers, all of them zero.
    observed = {name: torch.zeros_like(one, device="cpu") for name, one in fit.observer_state.items()}
    if objective.transform:
        observed |= {name: torch.zeros(()) for name in objective.transform.counts}
    losses = torch.zeros(samples if fit.score_samples else 0)
    return FitResult(trained, torch.zeros(()), samples, max(1, fit.epochs), observed, losses)


class CostModel:
    """Counts what clients' rounds cost; each kind of training is counted once.

    Parameters
    ----------
    method
        On the host: nothing of it is computed.
    side
        Pixels a side of the clients' images; by default, as many as the model takes.
    """

    def __init__(self, method: Method[Any], net: Net, train: TrainConfig, side: int | None = None) -> None:
        self.method = method
        self.train = train
        self.net = with_constants_on(net, "meta")
        self.side = side or net.image_size
        self.blank = shapes_of(net)
        self._counted: dict[object, Flops] = {}

    def dry_run(
        self,
        round: int,
        client: int,
        labels: NDArray[np.int64],
        task_index: int = 0,
        client_metrics: Numbers | None = None,
    ) -> DryRun:
        """Play a client's round.

        Parameters
        ----------
        task_index
            Number of tasks that the client has finished.
        client_metrics
            The numbers of the client's last update; ``None`` in its first round.
        """
        own = None if client_metrics is None else self._own(client_metrics)
        return dry_run(self.method, self.net, self.side, labels, round, client, task_index, own, self.blank)

    def late_round(self, labels: Sequence[NDArray[np.int64]]) -> DryRun:
        """Play a round of a client that has taken part in every task before, the last one too: the dearest it has.

        Parameters
        ----------
        labels
            Of the client's images at each stage.
        """
        client_metrics: Numbers | None = None
        for task_index, held in enumerate([*labels, labels[-1]]):
            last = min(task_index, len(labels) - 1)
            dry_run_result = self.dry_run(1, 0, held, last, client_metrics)
            client_metrics = dry_run_result.answer.message.numbers
        return dry_run_result

    @cached_property
    def _model(self) -> State | None:
        """What a client without images keeps after its first round."""
        return dry_run(self.method, self.net, self.side, NOTHING).answer.client_state

    def _own(self, client_metrics: Numbers) -> State | None:
        if self._model is None:
            return None
        kept = self.method.client_state_shapes(client_metrics, len(self.net.mean), self.side)
        return State({**self._model.tensors, **kept}, self._model.numbers)

    def flops(self, objective: Objective, weights: Tensors, masked: bool = True) -> Flops:
        """Count one sample's operations under an objective; of a whole image where it is not ``masked``."""
        ratio = self.train.mask_ratio if masked else 0.0
        key = (objective.trainable, objective.depth, objective.split, ratio)
        if key not in self._counted:
            self._counted[key] = count(self.net, objective, weights, ratio)
        return self._counted[key]

    def average(self, dry_run_result: DryRun) -> Flops:
        """Return the operations of one sample, the mean over the epochs of a client's trainings."""
        counted = [(self.flops(fit.objective, fit.weights), fit.epochs) for fit in dry_run_result.fits]
        epochs = sum(times for _, times in counted)
        return Flops(
            sum(flops.forward * times for flops, times in counted) // epochs,
            sum(flops.training * times for flops, times in counted) // epochs,
        )

    def round_flops(self, dry_run_result: DryRun, samples: int) -> int:
        """Count the operations of a client's whole round.

        Besides its own samples, a training may pass stored ones for reference gradients, take a gradient elsewhere, and
        score every sample at its end.
        """
        total = 0
        steps = -(-samples // self.train.batch_size)
        for fit in dry_run_result.fits:
            passes = fit.epochs * samples * (1 if fit.reference_weights is None else 2)
            total += passes * self.flops(fit.objective, fit.weights).training
            stored = fit.epochs * stored_passes(fit, steps)
            if stored or fit.score_samples:  # neither is masked
                whole = self.flops(fit.objective, fit.weights, masked=False)
                total += stored * whole.training + (samples * whole.forward if fit.score_samples else 0)
        return total

    def up_bytes(self, dry_run_result: DryRun) -> int:
        """Count the bytes of a client's answer on the wire; one with nothing in it is not sent."""
        return message_size(dry_run_result.answer.message)

    def down_bytes(self) -> tuple[int, int]:
        """Count the bytes of the server's first message to a client, and what is given to it besides, only once."""
        blank = {name: torch.empty(shape, device="meta") for name, shape in self.net.anatomy.shapes.items()}
        server: State = self.method.initial_state(blank)
        return message_size(self.method.client_message(server, 1, 0, None)), message_size(
            self.method.base_message(blank)
        )


def stored_passes(fit: Fit, steps: int) -> int:
    """Count how often a stored sample is passed in an epoch for the gradients of a training's memory.

    Where a chooser chooses, it has to see the gradients of all parts; until it chooses again only the chosen ones.
    """
    if fit.memory is None or not len(fit.memory):
        return 0
    parts, selector = len(fit.memory), fit.objective.selector
    widths = memory_widths([fit.memory])
    if selector is None or parts <= selector.k:
        return steps * sum(widths)
    choices = -(-steps // selector.every)
    return choices * sum(widths) + (steps - choices) * selector.k * widths[0]


def client_flops(method: Method[Any], net: Net, mask_ratio: float) -> Flops:
    """Count the operations of one sample in a method's client training."""
    cost_model = CostModel(method, net, method.context.train.model_copy(update={"mask_ratio": mask_ratio}))
    return cost_model.average(cost_model.dry_run(1, 0, NOTHING))


def with_constants_on(net: Net, device: str) -> Net:
    """Return a twin whose constants (index tables of some families) lie on another device.

    Its weights are an argument of every call: those of the module itself are shared, not copied.
    """
    shared = {id(weight): weight for weight in net.module.parameters()}
    module = copy.deepcopy(net.module, shared)
    for part in module.modules():
        for name, constant in part.named_buffers(recurse=False):
            part._buffers[name] = constant.to(device)
    return replace(net, module=module)


def message_size(message: Message) -> int:
    """Return a message's bytes on the wire; one with nothing in it is not sent."""
    return encoded_size(message) if message.tensors or message.numbers else 0


def full_flops(net: Net) -> Flops:
    """Count one whole image through the whole model, all of which trains: what others are compared with."""
    bare = with_constants_on(net, "meta")
    return count(bare, Objective(net.anatomy.whole), shapes_of(net), 0.0)


def count(net: Net, objective: Objective, weights: Tensors, mask_ratio: float) -> Flops:
    """Count one sample's operations under an objective."""
    trains = net.anatomy.trainable(objective.trainable)
    leaves = {name: torch.empty_like(weights[name], device="meta", requires_grad=True) for name in trains}
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    images = torch.empty(1, len(net.mean), net.image_size, net.image_size, device="meta")
    keep = torch.empty(1, net.num_kept_patches(mask_ratio), dtype=torch.long, device="meta") if mask_ratio else None
    net.module.eval()  # batch norm would want more than one sample
    with FlopCounterMode(display=False) as counter:
        logits = forward(net, objective, {**blank, **leaves}, images, keep)
        passed = counter.get_total_flops()
        torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)
        return Flops(passed, counter.get_total_flops())


def forward(
    net: Net, objective: Objective, weights: Tensors, images: torch.Tensor, keep: torch.Tensor | None
) -> torch.Tensor:
    """Run a model the way an objective wants it run."""
    if objective.split is None:
        return net(weights, images, keep, objective.depth)
    features = net.forward_to(weights, images, keep, objective.split)
    return net.forward_from(weights, features, objective.split)


def typical_client(sizes: Sequence[int]) -> int:
    """Return the client with the median number of samples among those that have any."""
    order = sorted((size, client) for client, size in enumerate(sizes) if size)
    return order[(len(order) - 1) // 2][1] if order else 0
