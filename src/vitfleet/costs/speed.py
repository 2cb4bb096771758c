"""Measure how many operations per second this machine manages while it trains a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vitfleet.config.schema import TrainConfig
from vitfleet.costs.flops import forward
from vitfleet.models.net import Net
from vitfleet.training.machine import Machine, thread_limit
from vitfleet.training.objective import Fit

MEASURED_FLOPS = 5e9  # a step with more operations is not tried out
PRODUCT_SIDE = 1024  # of the matrices whose product is timed instead
PRODUCT_EFFICIENCY = 0.5  # operations per second in a whole training step, as a share of those in a matrix product


@dataclass(frozen=True)
class SpeedRequest:
    """A training whose speed is asked for: its model, a training of a client, and how many clients train in parallel.

    On a GPU these are stacked. On a CPU stacked clients gain nothing: only workers train in parallel.
    """

    net: Net
    fit: Fit
    train: TrainConfig
    machine: Machine
    flops_per_sample: int
    clients_at_once: int


def measure_speed(request: SpeedRequest) -> float:
    """Return the operations per second with which this machine trains: of all clients that train at once."""
    machine, at_once = request.machine, request.clients_at_once
    if machine.device.type == "cuda":
        # Stacked clients whose steps are replayed take about as long as one training with a batch of all their images.
        images = request.train.batch_size * at_once
        fast = images * request.flops_per_sample < 100 * MEASURED_FLOPS
        measured = _step_speed(request, images) if fast else _product(machine.device)
        torch.cuda.empty_cache()  # what the measurement took is free again when the free memory is read
        return measured
    with thread_limit(max(1, torch.get_num_threads() // machine.workers)):
        images = request.train.batch_size
        fast = images * request.flops_per_sample < MEASURED_FLOPS
        return at_once * (_step_speed(request, images) if fast else _product(machine.device))


def _step_speed(request: SpeedRequest, images: int) -> float:
    """Time steps with a number of images: the forward pass and, if anything trains, backward and the optimiser's."""
    device = request.machine.device
    net = request.net.with_constants_on(str(device))
    objective = request.fit.objective
    trainable = set(net.parts.select(net.parts.trainable(objective.trainable)))
    weights = {
        name: torch.zeros(tensor.shape, device=device, requires_grad=name in trainable)
        for name, tensor in request.fit.weights.items()
    }
    leaves = [weights[name] for name in sorted(trainable)]
    optimizer = torch.optim.AdamW(leaves, foreach=True) if leaves else None
    pixels = torch.zeros(images, len(net.mean), net.image_size, net.image_size, device=device)
    kept = net.num_kept_patches(request.train.mask_ratio)
    keep = torch.arange(kept, device=device).expand(images, kept) if request.train.mask_ratio else None

    def step() -> None:
        with request.machine.autocast():
            loss = forward(net, objective, weights, pixels, keep).sum()
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return images * request.flops_per_sample / _seconds(step, device)


def _product(device: torch.device) -> float:
    """Time matrix products, and return the speed of training that follows from it."""
    factor = torch.zeros(PRODUCT_SIDE, PRODUCT_SIDE, device=device)
    return PRODUCT_EFFICIENCY * 2 * PRODUCT_SIDE**3 / _seconds(lambda: factor @ factor, device)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return how long an action takes, the shortest of three times after a first one."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
