"""What a run will take on this machine, before it starts: time, memory, disk.

Operations, message sizes and states come from the dry run of :mod:`vitfleet.costs.cost_model`. How many operations per
second this machine manages is measured with a few training steps of the model, or with a matrix product where a step
would take too long. An estimate is made to see whether a run takes seconds, hours or days; expect it to be right
within a factor of two. Once a run has finished a round, its own time per round is better.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.schema import Config
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.dataset_size import DatasetSize, known_size
from vitfleet.costs.flops import FlopCounter, shapes_of
from vitfleet.costs.report import cost_method, typical_labels
from vitfleet.costs.speed import SpeedRequest, measure_speed
from vitfleet.data.features import Features, FeatureSet
from vitfleet.message import State
from vitfleet.methods import Method, declared_work, make_head_solver
from vitfleet.methods.aggregation.server_optimizers import moment_bytes
from vitfleet.models.families.request import USUAL_GRID, fewer_patches
from vitfleet.models.net import Net
from vitfleet.training.execution.memory_budget import estimate_client_bytes
from vitfleet.training.execution.settings import set_up_execution, thread_limit
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.step import kind_of_step

Labels = NDArray[np.int64]

FLOAT_BYTES = 4
START_SECONDS = 2.0  # model, partition, first figures, and figures at the end
PROCESS_SECONDS = 2.0  # imports of a run that has a process of its own
REPORT_SECONDS = 2.0  # tables and page of a comparison
ROUND_SECONDS = 0.05  # records, checkpoint and evaluation, besides the passes through the model
DECODED_BYTES_PER_SECOND = 50e6
PROCESS_BYTES = 500 * 2**20  # Python with torch
FOLDER_BYTES = 300 * 2**10  # figures, curves, configuration
RECORD_BYTES = 600  # per client and round: records and curves
MANY_PATCHES = 256  # more than the usual 196 of 224 x 224 pixels are remarked on


@dataclass(frozen=True)
class RunEstimate:
    """What a run, or several, will take.

    Attributes
    ----------
    seconds
        Time of all rounds, with loading the data and evaluation.
    memory_bytes
        Largest memory of the process on the device that trains: the GPU's if there is one, else the machine's.
    disk_bytes
        Size of the run's folder at the end.
    device
        ``cpu`` or ``cuda``: what ``seconds`` and ``memory_bytes`` are about.
    remark
        What makes it slow and which keys would change that, in a sentence; empty if there is nothing to remark.
    cores
        Processor cores that the run computes on at a time.
    """

    seconds: float
    memory_bytes: int
    disk_bytes: int
    device: str = "cpu"
    remark: str = ""
    cores: int = 1

    @property
    def on_gpu(self) -> bool:
        """Whether clients are trained on a GPU."""
        return self.device.startswith("cuda")

    @property
    def memory_kind(self) -> str:
        """What the memory is called."""
        return "GPU memory" if self.on_gpu else "memory"


@dataclass(frozen=True)
class Available:
    """Memory of the device that trains, and disk space of a folder, that are free now; ``None``: unknown."""

    memory_bytes: int | None
    disk_bytes: int | None


def estimate_run(
    config: Config, size: DatasetSize | None = None, speed: Callable[[SpeedRequest], float] | None = None
) -> RunEstimate | None:
    """Estimate a run on this machine in about a second; ``None`` if the sizes of its data set are not known.

    Where clients are on machines of their own, it is an estimate of the server alone. ``size`` is
    ``DatasetSize.of(data)`` for a loaded data set, by default :func:`~vitfleet.costs.dataset_size.known_size`.
    ``speed`` returns the operations per second of the training; measured by default.
    """
    size = size or known_size(config.data)
    if size is None:
        return None
    method, net = cost_method(config, size)
    client_bytes = estimate_client_bytes(net, config.train, declared_work(config).images_per_step)
    work = _RunWork.of(config, size, method, net)
    with thread_limit(torch.get_num_threads()):  # restores the number that the configuration sets
        machine = set_up_execution(config.machine, net.embed_dim, client_bytes)
        trained_here = 0 if _remote(config) else config.fleet.asked
        at_once = min(trained_here, max(machine.workers, machine.stack_size))
        parallel = at_once if machine.device.type == "cuda" else min(trained_here, machine.workers)
        request = SpeedRequest(net, work.training, config.train, machine, work.flops_per_sample, max(1, parallel))
        flops_per_second = (speed or measure_speed)(request)
        cores = torch.get_num_threads()
    return RunEstimate(
        seconds=START_SECONDS
        + size.image_bytes / DECODED_BYTES_PER_SECOND
        + config.rounds * ROUND_SECONDS
        + work.total_flops / flops_per_second,
        memory_bytes=(PROCESS_BYTES if machine.device.type == "cpu" else 0)
        + size.image_bytes
        + at_once * client_bytes
        + work.server_bytes,
        disk_bytes=FOLDER_BYTES + config.rounds * config.fleet.asked * RECORD_BYTES + work.stored_bytes,
        device=machine.device.type,
        remark=_patches_remark(config, size, net),
        cores=cores,
    )


def _patches_remark(config: Config, size: DatasetSize, net: Net) -> str:
    """Return a remark on a model that takes large images in their own size: it cuts them into many patches."""
    if config.model.image_size is not None or net.image_size != size.image_size or net.num_patches <= MANY_PATCHES:
        return ""
    return (
        f"model.image_size is not set: the model takes the images at {size.image_size} x {size.image_size} pixels in "
        f"{net.num_patches:,} patches, and attention costs their square; {fewer_patches(size.image_size)} makes "
        f"{USUAL_GRID**2} patches"
    )


def combine(estimates: Sequence[RunEstimate], jobs: int = 1) -> RunEstimate:
    """Estimate the runs of a comparison, ``jobs`` of them at a time, in their order.

    Runs at a time share the cores, or the GPU: time is saved where one run leaves cores unused, and none is assumed to
    be saved on a GPU.
    """
    at_a_time = sorted((estimate.memory_bytes for estimate in estimates), reverse=True)[:jobs]
    cores = max(estimate.cores for estimate in estimates)
    side_by_side = max(1, min(jobs, len(estimates), (os.cpu_count() or 1) // cores))
    if any(estimate.on_gpu for estimate in estimates):
        side_by_side = 1
    ends = [0.0] * side_by_side
    for estimate in estimates:  # the next run begins where one ends first
        ends[ends.index(min(ends))] += estimate.seconds + (PROCESS_SECONDS if jobs > 1 else 0)
    return RunEstimate(
        seconds=max(ends) + REPORT_SECONDS,
        memory_bytes=sum(at_a_time),
        disk_bytes=sum(estimate.disk_bytes for estimate in estimates),
        device=estimates[0].device,
        remark=_first_remark(estimates),
        cores=cores,
    )


def mean_estimate(estimates: Sequence[RunEstimate]) -> RunEstimate:
    """Return the mean of several estimates."""
    count = len(estimates)
    return RunEstimate(
        sum(estimate.seconds for estimate in estimates) / count,
        sum(estimate.memory_bytes for estimate in estimates) // count,
        sum(estimate.disk_bytes for estimate in estimates) // count,
        estimates[0].device,
        _first_remark(estimates),
        max(estimate.cores for estimate in estimates),
    )


def _first_remark(estimates: Sequence[RunEstimate]) -> str:
    return next((estimate.remark for estimate in estimates if estimate.remark), "")


def available(device: str, folder: Path) -> Available:
    """Return the free memory of a device and the free space of the disk that a folder is, or will be, on."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    disk = None if existing is None else shutil.disk_usage(existing).free
    if device == "cuda":
        return Available(torch.cuda.mem_get_info()[0], disk)
    return Available(_free_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup")), disk)


def _free_memory(meminfo: Path, control_group: Path) -> int | None:
    """Return the memory that this process can still get on Linux: the machine's, or what its container allows."""
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = control_group / "memory.max", control_group / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text()) + _file_cache(control_group / "memory.stat")))
    return free


def _file_cache(stat: Path) -> int:
    """Return the bytes of files in a container's memory that the system gives up when memory is needed."""
    lines = stat.read_text().splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


@dataclass(frozen=True)
class _RunWork:
    """Operations and bytes of a whole run."""

    # A typical training of a client, and its operations per sample
    training: LocalTraining
    flops_per_sample: int
    total_flops: float
    # Memory of the server's state and of cached views, and bytes of the checkpoints and models in the run's folder
    server_bytes: int
    stored_bytes: int

    @classmethod
    def of(cls, config: Config, size: DatasetSize, method: Method[Any], net: Net) -> _RunWork:
        cost_model = CostModel(method, net, config.train, size.image_size)
        labels = typical_labels(config, size)
        first, late = cost_model.dry_run(method.cost_round, 0, labels[0]), cost_model.late_round(labels)
        images = _images_per_round(config, size, method, labels)
        samples = max(1, round(images))
        client = sum(cost_model.training_flops(run.trainings, samples) for run in (first, late)) / 2
        of_views = cost_model.training_flops(late.recordings, samples)
        seen = 0 if _remote(config) else min(config.fleet.clients, config.rounds * config.fleet.asked)
        forward_flops = cost_model.counter.evaluation
        trained = 0 if _remote(config) else config.fleet.asked
        per_round = trained * client + _evaluation_passes(config, size, method, labels) * forward_flops
        parameters = net.parts.count_parameters(net.parts.whole)
        weights, moments = FLOAT_BYTES * parameters, moment_bytes(config.server, parameters)
        # The checkpoint before the last has the states that its successor replaced.
        state_bytes = (late.update.client_state or State()).num_bytes
        kept = 0 if _remote(config) else (config.fleet.clients + config.fleet.asked) * state_bytes
        features = config.fleet.clients * cost_model.up_bytes(late) if method.server_work(1, 1) else 0
        typical = (first.recordings or first.trainings)[0]
        return cls(
            typical,
            cost_model.counter.step(typical, kind_of_step(typical.step, 0)).per_sample.training,
            config.rounds * per_round
            + seen * of_views
            + _server_flops(config, size, method, net)
            + sum(_head_flops(each, size) for each in (config, config.of_last_head()) if each is not None),
            server_bytes=2 * weights + moments + features + seen * late.views_bytes,
            # Two checkpoints with the server's weights and moments, the model at the end, and what every client
            # received once.
            stored_bytes=4 * weights + 2 * moments + kept + features,
        )


def _remote(config: Config) -> bool:
    """Whether clients train, evaluate and keep their states on machines of their own."""
    return config.fleet.kind == "flower"


def _images_per_round(config: Config, size: DatasetSize, method: Method[Any], labels: Sequence[Labels]) -> float:
    """Return the mean number of images on which a client trains in a round: those of a task, or of all tasks so far."""
    if config.data.tasks is None:
        return size.samples / config.fleet.clients
    counts = [len(task_labels) for task_labels in labels]
    return float(np.mean(np.cumsum(counts) if method.accumulates_tasks else counts))


def _evaluation_passes(config: Config, size: DatasetSize, method: Method[Any], labels: Sequence[Labels]) -> float:
    """Return the images per round on which accuracy is measured, counted once per model."""
    if _remote(config):
        has_model = method.has_global_model and config.data.tasks is None
        return size.test_samples / config.eval.every if has_model else 0.0
    if (tasks := config.data.tasks) is not None:
        # A client has all test images of its classes. After each task, all clients are measured on their tasks so far.
        classes = np.mean([len(np.unique(task_labels)) for task_labels in labels])
        of_task = float(classes) * size.test_samples / size.num_classes
        if tasks.partitioned:  # a client has its part of a task's test images; the server's model is measured on all
            by_clients = config.fleet.asked / config.fleet.clients * size.test_samples / tasks.count / config.eval.every
            return by_clients + size.test_samples * (tasks.count + 1) / 2 / tasks.count / tasks.rounds_per_task
        return of_task * (config.fleet.asked + config.fleet.clients * (tasks.count + 1) / 2 / tasks.rounds_per_task)
    local = config.fleet.asked * size.test_samples / config.fleet.clients
    models = 1 if method.has_global_model else min(config.eval.clients or config.fleet.clients, config.fleet.clients)
    return models * size.test_samples / config.eval.every + local


def _head_flops(config: Config, size: DatasetSize) -> float:
    """Return the operations of all clients for solving the head."""
    if not config.head.is_solved or _remote(config):
        return 0.0
    method, net = cost_method(config, size)
    solver = make_head_solver(method.context)
    assert solver is not None
    cost_model = CostModel(solver, net, solver.context.train, size.image_size)
    passes = cost_model.dry_run(1, 0, np.arange(size.num_classes))
    return config.head.times_solved(config.rounds) * float(cost_model.round_flops(passes, size.samples))


def _server_flops(config: Config, size: DatasetSize, method: Method[Any], net: Net) -> float:
    """Return the operations of the server's own training in all rounds."""
    fleet, per_client = config.fleet, size.samples / config.fleet.clients
    work = method.server_work(1, 1)
    if work is None:
        return 0.0
    tokens = torch.empty(1, method.context.num_tokens, net.embed_dim, device="meta")
    training = replace(work.training(shapes_of(net)), features=FeatureSet([Features(tokens, tokens.new_empty(1))]))
    flops = FlopCounter(net, config.train).step(training).per_sample.training
    passes, unseen = 0.0, float(fleet.clients)
    for _ in range(min(config.rounds, 1000)):
        unseen *= 1 - fleet.asked / fleet.clients
        seen = (fleet.clients - unseen) * per_client
        current = method.server_work(round(seen), round(fleet.asked * per_client))
        passes += current.samples if current else 0
    return passes * flops * max(1.0, config.rounds / 1000)
