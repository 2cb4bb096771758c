"""Measure how many operations per second this machine manages while it trains a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.costs.flops import empty_batch
from vitfleet.data.images import ImageSet, Shard
from vitfleet.models.net import Net
from vitfleet.training.execution.settings import ExecutionSettings, thread_limit
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining, RngContext, stack_inputs
from vitfleet.training.step import kind_of_step
from vitfleet.training.trainer import Trainer, preprocess_for

MEASURED_FLOPS = 5e9  # a step with more operations is not tried out
PRODUCT_SIDE = 1024  # of the matrices whose product is timed instead
PRODUCT_EFFICIENCY = 0.5  # operations per second in a whole training step, as a share of those in a matrix product


@dataclass(frozen=True)
class SpeedRequest:
    """A training whose speed is asked for: its model, a training of a client, and how many clients train in parallel.

    On a GPU these are stacked. On a CPU stacked clients gain nothing: only workers train in parallel.
    """

    net: Net
    training: LocalTraining
    train: TrainConfig
    machine: ExecutionSettings
    flops_per_sample: int
    clients_at_once: int


def measure_speed(request: SpeedRequest) -> float:
    """Return the operations per second with which this machine trains: of all clients that train at once."""
    machine, at_once = request.machine, request.clients_at_once
    if machine.device.type == "cuda":
        # Stacked clients whose steps are replayed take about as long as one training with a batch of all their images.
        images = request.train.batch_size * at_once
        fast = images * request.flops_per_sample < 100 * MEASURED_FLOPS
        measured = _step_speed(request, images) if fast else product_speed(machine.device)
        torch.cuda.empty_cache()  # what the measurement took is free again when the free memory is read
        return measured
    with thread_limit(max(1, torch.get_num_threads() // machine.workers)):
        images = request.train.batch_size
        fast = images * request.flops_per_sample < MEASURED_FLOPS
        return at_once * (_step_speed(request, images) if fast else product_speed(machine.device))


def _step_speed(request: SpeedRequest, images: int) -> float:
    """Time steps of the trainer with a number of images."""
    machine = replace(request.machine, graphs=False, compile=False)
    net, train = request.net.with_constants_on(str(machine.device)), request.train
    groups = request.training.tensor_groups()
    zeros = {
        group: {name: torch.zeros_like(like, device=machine.device) for name, like in tensors.items()}
        for group, tensors in groups.items()
    }
    training = request.training.with_tensor_groups(zeros)
    trainer = Trainer(net, preprocess_for(net, machine.device), train, AugmentConfig(), 1, machine)
    pixels = torch.zeros(
        images, len(net.mean), net.image_size, net.image_size, dtype=torch.uint8, device=machine.device
    )
    index = torch.arange(images, device=machine.device)
    group = [ClientTraining(training, Shard(ImageSet(pixels, torch.zeros_like(index)), index), RngContext(0, 1, 0))]
    stack = ClientStack(trainer.engine_for(training), group, stack_inputs(group, machine.device))
    stack.restart(None, train.lr)
    batch = empty_batch(net, training, train, images, str(machine.device)).map(torch.zeros_like)
    batch = replace(batch, sample_weight=batch.sample_weight + 1 / images, active=torch.ones_like(batch.active))
    epoch, kind = torch.zeros((), dtype=torch.long, device=machine.device), kind_of_step(training.step, 0)

    def step() -> None:
        stack.take_step(batch, epoch, kind, all_active=True)

    return images * request.flops_per_sample / _seconds(step, machine.device)


@cache
def product_speed(device: torch.device) -> float:
    """Time matrix products, and return the speed of training that follows from it; measured once in a process."""
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
