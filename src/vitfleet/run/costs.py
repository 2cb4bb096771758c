"""What a client's training costs: torch's own count of operations, without training anything.

The client half is asked for its training on tensors that have shapes but no numbers. What it wants trained, masked,
frozen, left out or parted is in the objective it yields, so the count follows from the same selection as the training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import State, Tensors
from vitfleet.methods.base import Job, Method, Work
from vitfleet.models.net import Net
from vitfleet.train.objective import Fit, Fitted, Objective


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


def client_flops(method: Method[Any], net: Net, mask_ratio: float) -> Flops:
    """Count the operations of one sample in a method's client training, the mean over the epochs of a first round.

    What a memory of earlier tasks adds is not in it: its gradients cost as much again for every stored sample.
    """
    blank = {name: torch.empty(shape, device="meta") for name, shape in net.anatomy.shapes.items()}
    server: State = method.start(blank)
    down = method.instruct(server, 1, 0, None)
    nothing = torch.empty(0, dtype=torch.long)
    pixels = torch.empty(0, len(net.mean), net.side, net.side, dtype=torch.uint8)
    job = Job(1, 0, down, method.base(blank).tensors, None, Shard(ImageSet(pixels, nothing), nothing))
    # Index tables of some families are constants of the module: on a copy, they lose their numbers too.
    bare = Net(**{**vars(net), "module": copy.deepcopy(net.module).to("meta")})
    fits = list(trainings(method.work(job)))
    epochs = sum(fit.epochs for fit in fits)
    counted = [(count(bare, fit.objective, fit.weights, mask_ratio), fit.epochs) for fit in fits]
    return Flops(
        sum(flops.forward * times for flops, times in counted) // epochs,
        sum(flops.training * times for flops, times in counted) // epochs,
    )


def trainings(work: Work) -> Iterator[Fit]:
    """Yield the trainings that a client half wants, answering each as for a client without images."""
    try:
        fit = next(work)
        while True:
            yield fit
            transform = fit.objective.transform
            none = {name: torch.zeros(()) for name in (transform.counts if transform else ())}
            weights = fit.objective.trains.take(fit.weights)
            fit = work.send(Fitted(weights, torch.zeros(()), 0, 0, none, torch.empty(0)))
    except StopIteration:
        return


def count(net: Net, objective: Objective, weights: Tensors, mask_ratio: float) -> Flops:
    """Count one sample's operations under an objective."""
    trains = net.anatomy.trainable(objective.trains)
    leaves = {name: torch.empty_like(weights[name], device="meta", requires_grad=True) for name in trains}
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    channels = len(net.mean)
    images = torch.empty(1, channels, net.side, net.side, device="meta")
    keep = torch.empty(1, net.kept(mask_ratio), dtype=torch.long, device="meta") if mask_ratio else None
    net.module.eval()  # batch norm would want more than one sample
    with FlopCounterMode(display=False) as counter:
        if objective.split is None:
            logits = net({**blank, **leaves}, images, keep, objective.depth)
        else:
            features = net.until({**blank, **leaves}, images, keep, objective.split)
            logits = net.onward({**blank, **leaves}, features, objective.split)
        forward = counter.get_total_flops()
        torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)
        return Flops(forward, counter.get_total_flops())
