"""What a configuration would cost, method by method and device by device, without data and without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitfleet.config.fleet import DeviceName
from vitfleet.config.load import validate
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.costs.flops import CostModel, full_flops, typical_client
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, MEGABYTE, RoundWorkload, workload_seconds
from vitfleet.costs.memory import round_memory
from vitfleet.data.partition import make_partition
from vitfleet.data.sources import load_dataset
from vitfleet.data.tasks import make_task_streams
from vitfleet.errors import UserError
from vitfleet.methods import MethodContext, adapt_model, make_method
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.progress import NO_PROGRESS, Progress

DAY = 86_400.0


@dataclass(frozen=True)
class Images:
    """What must be known of a data set to cost it: classes, channels, pixels a side, training images."""

    classes: int
    channels: int
    side: int
    samples: int


KNOWN_IMAGES = {
    "cifar10": Images(10, 3, 32, 50_000),
    "cifar100": Images(100, 3, 32, 50_000),
    "fc100": Images(100, 3, 32, 50_000),
    "ucmerced": Images(21, 3, 256, 1_680),
    "tinyimagenet": Images(200, 3, 64, 100_000),
    "miniimagenet": Images(100, 3, 84, 50_000),
    "core50": Images(50, 3, 128, 120_000),
    "core50_sessions": Images(550, 3, 128, 120_000),
    "fashion_mnist": Images(10, 1, 28, 60_000),
    "digits": Images(10, 1, 8, 1_438),
}


@dataclass(frozen=True)
class SampleCost:
    """What training on one sample costs.

    Attributes
    ----------
    forward_gmac, train_gflops
        Multiply-adds of the forward pass, operations of forward and backward pass, in billions.
    train_ratio_to_full
        How many times cheaper a sample is than a whole image through the whole model, all of which trains.
    """

    method: str
    mask_ratio: float
    params: int
    trainable_params: int
    forward_gmac: float
    train_gflops: float
    train_ratio_to_full: float


@dataclass(frozen=True)
class CostReport(SampleCost):
    """What one method costs a typical client.

    Attributes
    ----------
    peak_memory_bytes, memory
        Peak memory of a training step, and its parts.
    up_bytes, down_bytes, first_bytes
        Messages per round, and what a client receives once in addition.
    samples, round_gflops
        The typical client's images, and the operations of its whole round: not its first one, and with tasks one of the
        last, with samples stored of all others.
    devices
        For each hardware profile, seconds per round, whether the training fits into its memory, and megabytes per day.
    """

    peak_memory_bytes: int
    memory: dict[str, int]
    up_bytes: int
    down_bytes: int
    first_bytes: int
    samples: int
    round_gflops: float
    devices: dict[DeviceName, dict[str, Any]]


def cost_reports(config: Config, methods: Sequence[str] = (), progress: Progress = NO_PROGRESS) -> Iterator[CostReport]:
    """Cost a configuration under its own method first, then under others.

    Other methods are taken with their default parameters and on whole images, but for EFTViT, which masks.

    Parameters
    ----------
    methods
        Which others; by default all that the model can be used with.
    """
    if unknown := [name for name in methods if name not in METHODS]:
        raise UserError(f"--method {unknown[0]}: no such method; there are {', '.join(METHODS.names())}")
    images = _images(config, progress)
    labels = _typical_labels(config, images)
    full = full_flops(_net(config, images)).training
    own = config.method.name
    names = list(methods) or [own, *(name for name in METHODS.names() if name != own)]
    with progress.task("costs", len(names)) as advance:
        for name in names:
            try:
                yield _sheet(config if name == own else _with_method(config, name), images, labels, full)
            except UserError:
                if name == own or methods:
                    raise
                # Not every method suits every model (a family without tokens, fewer layers than it wants).
            advance(1)


def _with_method(config: Config, name: str) -> Config:
    tree = config.model_dump(mode="json")
    tree["method"] = {"name": name}
    tree["train"]["mask_ratio"] = METHODS[name].target.usual_mask_ratio
    return validate(tree)


def _net(config: Config, images: Images, adaptation: Callable[[nn.Module], None] | None = None) -> Net:
    # Pretrained or not, a model costs the same: nothing is read.
    model = config.model.model_copy(update={"weights": None})
    return build_model(model, images.classes, images.channels, images.side, config.seed, adaptation)


def _sheet(config: Config, images: Images, labels: Sequence[NDArray[np.int64]], full: int) -> CostReport:
    net = _net(config, images, partial(adapt_model, config.method))
    num_tasks = config.data.tasks.count if config.data.tasks else 1
    context = MethodContext.from_net(
        net, config.train, config.rounds, config.seed, images.classes, torch.device("cpu"), num_tasks
    )
    method = make_method(config.method, context)
    cost_model = CostModel(method, net, config.train, images.side)
    flops = cost_model.average(cost_model.dry_run(1, 0, labels[0]))
    dry_run_result = cost_model.late_round(labels)
    memory = round_memory(net, dry_run_result, config.train, config.machine.precision == "bf16")
    up_bytes = cost_model.up_bytes(dry_run_result)
    down_bytes, first_bytes = cost_model.down_bytes()
    samples = len(labels[-1])
    round_flops = cost_model.round_flops(dry_run_result, samples)
    workload = RoundWorkload(down_bytes, round_flops, up_bytes)
    return CostReport(
        method=config.method.name,
        mask_ratio=config.train.mask_ratio,
        params=net.anatomy.count_parameters(net.anatomy.whole),
        trainable_params=net.anatomy.count_parameters(method.trainable),
        forward_gmac=flops.forward / 2e9,
        train_gflops=flops.training / 1e9,
        train_ratio_to_full=full / flops.training,
        peak_memory_bytes=memory.total,
        memory={
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
        },
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        first_bytes=first_bytes,
        samples=samples,
        round_gflops=round_flops / 1e9,
        devices={name: _on_device(config, name, workload, memory.total) for name in HARDWARE_PROFILES},
    )


def _on_device(config: Config, name: DeviceName, workload: RoundWorkload, memory_bytes: int) -> dict[str, Any]:
    line = None if config.fleet.bandwidth is None else config.fleet.bandwidth * MEGABYTE
    seconds = workload_seconds(HARDWARE_PROFILES[name], workload, line)
    fits = HARDWARE_PROFILES[name].holds(memory_bytes)
    a_day = (workload.down_bytes + workload.up_bytes) / MEGABYTE * DAY / seconds if fits else 0.0
    return {"round_seconds": seconds, "fits_memory": fits, "megabytes_a_day": a_day}


def _images(config: Config, progress: Progress) -> Images:
    """Look a named set up; of one's own images, only they themselves know."""
    if config.data.path is None and config.data.name in KNOWN_IMAGES:
        known = KNOWN_IMAGES[config.data.name]
        limit = config.data.limit or known.samples
        return Images(known.classes, known.channels, known.side, min(limit, known.samples))
    data = load_dataset(config.data, progress)
    return Images(len(data.classes), data.train.channels, data.train.image_size, len(data.train))


def _typical_labels(config: Config, images: Images) -> list[NDArray[np.int64]]:
    """Deal as many labels as the set has, the same of every class, and return the typical client's.

    Task by task, where there are tasks, the typical one last.
    """
    labels = np.arange(images.samples, dtype=np.int64) % images.classes
    clients, seed = config.fleet.clients, config.seed
    if config.data.tasks is not None:
        streams = make_task_streams(config.data.tasks, clients, seed, labels, labels, images.classes)
        client = typical_client(streams.class_counts.sum(axis=1).tolist())
        held = [labels[streams.train.for_client(client, task_index)] for task_index in range(streams.num_tasks)]
        typical = typical_client([len(one) for one in held])
        return [*held[:typical], *held[typical + 1 :], held[typical]]
    if config.data.partition.kind in {"source", "file"}:  # known only with the images: as if dealt evenly
        return [labels[::clients]]
    deal = make_partition(config.data.partition, clients, seed, labels, labels, images.classes, None, None)
    return [labels[deal.train.for_client(typical_client(deal.class_counts.sum(axis=1).tolist()))]]
