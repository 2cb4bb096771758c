"""Cost reports of a configuration per method and hardware profile, without training and without image files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitfleet.config.fleet import DeviceName
from vitfleet.config.load import from_tree, parse_method
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.costs.cost_model import CostModel, DryRun
from vitfleet.costs.dataset_size import DatasetSize, known_size
from vitfleet.costs.flops import full_flops
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, MEGABYTE, RoundWorkload, workload_seconds
from vitfleet.costs.memory import TrackedStep, round_memory
from vitfleet.data.partitions.assign import assign_tasks, make_partition
from vitfleet.data.sources.load import load_dataset
from vitfleet.data.tasks import class_to_task
from vitfleet.errors import UserError
from vitfleet.methods import Method, MethodContext, declared_work, make_head_solver, make_method, model_adaptation
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model, weights_without_values
from vitfleet.progress import NO_PROGRESS, Progress

SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True)
class HeadCost:
    """Costs of solving the head (``[head]``), of a typical client."""

    times: int  # how often in a run
    gflops: float  # operations each time
    up_bytes: int  # size of what it sends each time
    peak_memory_bytes: int


@dataclass(frozen=True)
class ViewsCost:
    """What cached views cost a client.

    Attributes
    ----------
    views
        Views of each image.
    gflops
        Operations in the client's first round, besides those of every round.
    kept_bytes
        What the client keeps.
    """

    views: int
    gflops: float
    kept_bytes: int


@dataclass(frozen=True)
class CostReport:
    """Costs of one method for a typical client.

    Attributes
    ----------
    forward_gmac, train_gflops
        Of an image seen in training, with all passes: multiply-adds of the forward ones, and all operations, in
        billions.
    train_ratio_to_full
        Operations of full training on an unmasked image, divided by those of this method.
    batch_size, peak_memory_bytes, memory
        Images of a training batch, the peak memory of a step, and its parts.
    epochs, images_per_step
        Epochs that run in a round, and images of a step with drawn stored samples: see
        :class:`~vitfleet.methods.base.Work`.
    up_bytes, down_bytes, first_bytes
        Message sizes per round, and the size of the initial broadcast, which a client receives once.
    samples, round_gflops
        Number of the typical client's images, and the operations of a whole round. It is not the client's first round;
        with tasks, it is in the last task, with stored samples of all others.
    devices
        For each hardware profile: seconds per round, whether the training fits into its memory, and megabytes per day.
    head
        What solving the head costs besides the rounds; ``None`` if it is never solved.
    views
        What cached views cost a client in its first round alone; ``None`` if it keeps none.
    head, last_head
        What solving the head costs besides the rounds, and the one that ends the run where that is another; ``None`` if
        it is never solved.
    """

    method: str
    mask_ratio: float
    params: int
    trainable_params: int
    forward_gmac: float
    train_gflops: float
    train_ratio_to_full: float
    batch_size: int
    peak_memory_bytes: int
    memory: dict[str, int]
    epochs: int
    images_per_step: int
    up_bytes: int
    down_bytes: int
    first_bytes: int
    samples: int
    round_gflops: float
    devices: dict[DeviceName, dict[str, Any]]
    head: HeadCost | None = None
    views: ViewsCost | None = None
    last_head: HeadCost | None = None


@dataclass(frozen=True)
class _SharedCounts:
    """What was counted for one method and is the same for others, which train the same weights of the same model."""

    full_flops: int  # of full training on an unmasked image
    flops: dict[Hashable, Any] = field(default_factory=dict)
    steps: list[TrackedStep] = field(default_factory=list)


def cost_reports(
    config: Config,
    methods: Sequence[str] = (),
    progress: Progress = NO_PROGRESS,
    left_out: Callable[[str, UserError], object] = lambda name, reason: None,
) -> Iterator[CostReport]:
    """Yield the cost report of the configured method first, then those of other methods.

    The other ``methods`` are ``NAME [KEY=VALUE…]``; what is not set has their defaults and their usual mask ratio.
    Without any they are all that support the configuration; ``left_out`` is called with each that does not, and why.
    """
    if unknown := [name for name, _ in map(parse_method, methods) if name not in METHODS]:
        raise UserError(f"--method {unknown[0]}: no such method; there are {', '.join(METHODS.names())}")
    dataset = _dataset_size(config, progress)
    labels = typical_labels(config, dataset)
    shared = _SharedCounts(full_flops(cost_net(config, dataset)).training)
    configured = config.method.name
    names = list(methods) or [configured, *(name for name in METHODS.names() if name != configured)]
    with progress.task("costs", len(names)) as advance:
        for name in names:
            try:
                report = _cost_report(method_config(config, name), dataset, labels, shared)
                yield replace(report, method=name)
            except UserError as reason:
                if name == configured or methods:
                    raise
                left_out(name, reason)  # some need tokens, more layers, or a head of their own
            advance(1)


def method_config(config: Config, method: str) -> Config:
    """Return the configuration with the method ``NAME [KEY=VALUE…]``; another one has its usual mask ratio."""
    name, keys = parse_method(method)
    tree = config.model_dump(mode="json")
    if name != config.method.name:
        tree["method"] = {"name": name}
        tree["server"] = {}  # not every method has an optimiser on its server, and none costs a client anything
        tree["train"]["mask_ratio"] = METHODS[name].target.usual_mask_ratio
    elif not keys:
        return config
    return from_tree(tree, keys)


def cost_net(config: Config, dataset: DatasetSize, adaptation: Callable[[nn.Module], None] | None = None) -> Net:
    """Build a configuration's model with weights without values, which do not change the costs."""
    model = config.model.model_copy(update={"weights": None})
    with weights_without_values():
        return build_model(model, dataset.num_classes, dataset.channels, dataset.image_size, config.seed, adaptation)


def cost_method(config: Config, dataset: DatasetSize) -> tuple[Method[Any], Net]:
    """Return a configuration's method and its model, whose weights have no values."""
    net = cost_net(config, dataset, model_adaptation(config, dataset.num_classes))
    context = MethodContext(config, net, dataset.num_classes, torch.device("cpu"))
    return make_method(config.method, context), net


def training_bytes(config: Config) -> int:
    """Return the peak memory of a typical client's training, without its other costs."""
    dataset = _dataset_size(config, NO_PROGRESS)
    method, net = cost_method(config, dataset)
    cost_model = CostModel(method, net, config.train, dataset.image_size)
    late_round = cost_model.late_round(typical_labels(config, dataset))
    return round_memory(net, late_round, config.train, config.machine.precision == "bf16").total


def _cost_report(
    config: Config, dataset: DatasetSize, labels: Sequence[NDArray[np.int64]], shared: _SharedCounts
) -> CostReport:
    method, net = cost_method(config, dataset)
    cost_model = CostModel(method, net, config.train, dataset.image_size, shared.flops)
    flops = cost_model.per_image(cost_model.dry_run(method.cost_round, 0, labels[0]))
    dry_run_result = cost_model.late_round(labels)
    memory = round_memory(
        net, dry_run_result, config.train, config.machine.precision == "bf16", known_steps=shared.steps
    )
    up_bytes = cost_model.up_bytes(dry_run_result)
    down_bytes, first_bytes = cost_model.down_bytes()
    samples = len(labels[-1])
    round_flops = cost_model.round_flops(dry_run_result, samples)
    workload = RoundWorkload(down_bytes, round_flops, up_bytes)
    work, last = declared_work(config), config.of_last_head()
    return CostReport(
        method=config.method.name,
        mask_ratio=config.train.mask_ratio,
        params=net.parts.count_parameters(net.parts.whole),
        trainable_params=net.parts.count_parameters(method.trainable),
        forward_gmac=flops.forward / 2e9,
        train_gflops=flops.training / 1e9,
        train_ratio_to_full=shared.full_flops / flops.training,
        batch_size=config.train.batch_size,
        peak_memory_bytes=memory.total,
        memory=asdict(memory),
        epochs=work.epochs,
        images_per_step=work.images_per_step,
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        first_bytes=first_bytes,
        samples=samples,
        round_gflops=round_flops / 1e9,
        devices={name: _on_device(config, name, workload, memory.total) for name in HARDWARE_PROFILES},
        head=_head_cost(method, dataset, labels[-1]),
        last_head=None if last is None else _head_cost(cost_method(last, dataset)[0], dataset, labels[-1]),
        views=_views_cost(config, cost_model, dry_run_result, samples),
    )


def _views_cost(config: Config, cost_model: CostModel, dry_run_result: DryRun, samples: int) -> ViewsCost | None:
    if not dry_run_result.recordings:
        return None
    gflops = cost_model.training_flops(dry_run_result.recordings, samples) / 1e9
    return ViewsCost(config.train.cached_views, gflops, dry_run_result.views_bytes)


def _head_cost(method: Method[Any], dataset: DatasetSize, labels: NDArray[np.int64]) -> HeadCost | None:
    """Return what solving the head of a run with this method costs."""
    config, net, solver = method.context.config, method.context.net, make_head_solver(method.context)
    times = config.head.times_solved(config.rounds)
    if solver is None or not times:
        return None
    train = solver.context.train
    cost_model = CostModel(solver, net, train, dataset.image_size)
    passes = cost_model.dry_run(1, 0, labels)
    return HeadCost(
        times=times,
        gflops=cost_model.round_flops(passes, len(labels)) / 1e9,
        up_bytes=cost_model.up_bytes(passes),
        peak_memory_bytes=round_memory(net, passes, train, config.machine.precision == "bf16").total,
    )


def _on_device(config: Config, name: DeviceName, workload: RoundWorkload, memory_bytes: int) -> dict[str, Any]:
    bandwidth = None if config.fleet.bandwidth is None else config.fleet.bandwidth * MEGABYTE
    seconds = workload_seconds(HARDWARE_PROFILES[name], workload, bandwidth)
    fits = HARDWARE_PROFILES[name].holds(memory_bytes)
    megabytes_per_day = (
        (workload.down_bytes + workload.up_bytes) / MEGABYTE * SECONDS_PER_DAY / seconds if fits else 0.0
    )
    return {"round_seconds": seconds, "fits_memory": fits, "megabytes_a_day": megabytes_per_day}


def _dataset_size(config: Config, progress: Progress) -> DatasetSize:
    """Look up the size of a built-in data set, list an image folder; load any other data set to measure it."""
    return known_size(config.data) or DatasetSize.of(load_dataset(config.data, progress))


def typical_labels(config: Config, dataset: DatasetSize) -> list[NDArray[np.int64]]:
    """Partition balanced labels of the data set's size, and return those of the typical client, per task.

    The task with the median number of samples comes last. Without tasks, the list has one element.
    """
    labels = np.arange(dataset.samples, dtype=np.int64) % dataset.num_classes
    clients, seed = config.fleet.clients, config.seed
    if config.data.tasks is not None:
        if (
            config.is_incremental and config.data.partition.kind == "source"
        ):  # depends on the images: assume equal parts
            return _equal_tasks(config, labels, dataset.num_classes)
        streams = assign_tasks(config, labels, labels, dataset.num_classes)
        client = typical_client(streams.class_counts.sum(axis=1).tolist())
        per_task = [labels[streams.train.for_client(client, task_index)] for task_index in range(streams.num_tasks)]
        typical = typical_client([len(task_labels) for task_labels in per_task])
        return [*per_task[:typical], *per_task[typical + 1 :], per_task[typical]]
    if config.data.partition.kind in {"source", "file"}:  # depends on the images: assume equal parts
        return [labels[::clients]]
    partition = make_partition(config.data.partition, clients, seed, labels, labels, dataset.num_classes, None, None)
    return [labels[partition.train.for_client(typical_client(partition.class_counts.sum(axis=1).tolist()))]]


def _equal_tasks(config: Config, labels: NDArray[np.int64], num_classes: int) -> list[NDArray[np.int64]]:
    """Return the labels of a client with an equal part of each task."""
    of_class = np.array(class_to_task(config.data.tasks, config.seed, num_classes))
    return [labels[of_class[labels] == task][:: config.fleet.clients] for task in range(config.num_tasks)]


def typical_client(sizes: Sequence[int]) -> int:
    """Return the client with the median number of samples among those with at least one; 0 if there is none."""
    order = sorted((size, client) for client, size in enumerate(sizes) if size)
    return order[(len(order) - 1) // 2][1] if order else 0
