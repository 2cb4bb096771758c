"""From a configuration to a run that is ready for its next round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.memory import round_memory
from vitfleet.data.from_objects import fingerprint
from vitfleet.data.images import DataSet, Shard
from vitfleet.data.sources import load_dataset
from vitfleet.data.subsets import hold_out_validation, limit_images
from vitfleet.data.tasks import assign_classes_to_tasks
from vitfleet.errors import ConfigError, UserError
from vitfleet.files import read_json, write_atomically
from vitfleet.fleet.base import Fleet
from vitfleet.fleet.build import Components, build_components, build_net
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.fleet.distributed import SINGLE_PROCESS, DistributedFleet, ProcessGroup
from vitfleet.fleet.inline import InlineFleet
from vitfleet.message import Message, to_device
from vitfleet.methods import declared_work, make_method
from vitfleet.models.net import Net
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.base_file import write_base
from vitfleet.run.checkpoint import Checkpoints
from vitfleet.run.context import RunContext
from vitfleet.run.data_info import write_data_info
from vitfleet.run.evaluation import FleetEvaluator
from vitfleet.run.partitions import RunPartition, empty_partition, open_partition, train_labels, train_shard
from vitfleet.run.round_plan import RoundPlanner
from vitfleet.run.unseen import unseen_clients
from vitfleet.run.virtual_fleet import VirtualFleet, make_virtual_fleet
from vitfleet.training.machine import Machine, gpu_memory_bytes, resolve_machine_config, set_up_machine
from vitfleet.training.memory_budget import estimate_client_bytes

STATE_CACHE_SHARE = 16  # client states may take 1/16 of a GPU's memory

#: Makes the fleet of remote clients for a run in a folder, given the base message that every new client gets.
MakeFleet: TypeAlias = Callable[[Config, DataSet, Path, Message], Fleet]


def open_run(
    config: Config,
    folder: Path,
    progress: Progress = NO_PROGRESS,
    make_fleet: MakeFleet | None = None,
    processes: ProcessGroup = SINGLE_PROCESS,
    data: DataSet | None = None,
) -> RunContext:
    """Open a run in its folder: a new one, or one to resume.

    Parameters
    ----------
    make_fleet
        Makes a fleet of remote clients, which have their own images. ``None``: the clients run in this process.
    processes
        The processes that share the run.
    data
        The data set, where it is passed from Python instead of being loaded.
    """
    if (config.fleet.kind == "inline") != (make_fleet is None):
        remedy = "is started with `vitfleet server`; in one process it is inline"
        raise ConfigError("fleet.kind", config.fleet.kind, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    data = load_dataset(config.data, progress) if data is None else _checked(config, data)
    net = build_net(config, len(data.classes), data.train.channels, data.train.image_size)
    with processes.first_before_others():
        machine = _open_machine(config, folder, net)
        data = data.to(machine.device)
        if processes.is_first:
            write_data_info(data, config.data.eval_split, folder)
        partition = open_partition(config, data, folder) if make_fleet is None else empty_partition(config)
        checkpoints = Checkpoints(folder, verify=processes.is_first, keep_every=config.kept_rounds)
    class_tasks = _class_tasks(config, data)
    components = build_components(config, net, len(data.classes), machine, class_tasks)
    base = components.method.base_message(to_device(components.net.initial_weights(), machine.device))
    if processes.is_first:
        write_base(base, folder)
    evaluator = _make_evaluator(config, components, data, partition, has_local_clients=make_fleet is None)
    cost_model = _make_cost_model(config, components, data)
    virtual: VirtualFleet | None = None
    if make_fleet is not None:  # remote clients have real clocks
        fleet = make_fleet(config, data, folder, base)
    else:
        virtual = _make_virtual_fleet(config, components, data, partition, cost_model)
        fleet = _make_local_fleet(config, components, data, partition, base, evaluator, checkpoints, processes)
    if virtual is not None and processes.is_first:
        virtual.write(folder)
    planner = RoundPlanner(config, components.method, base, virtual)
    return RunContext(
        config, folder, data, partition, components, base, fleet, evaluator, checkpoints, cost_model, planner, processes
    )


def _checked(config: Config, data: DataSet) -> DataSet:
    """Check that data from Python is what the run began with; apply ``data.limit`` and ``data.validation``."""
    if config.data.fingerprint != fingerprint(data):
        remedy = "pass the data set that the run was started with"
        raise ConfigError("data.fingerprint", config.data.fingerprint, f"the data passed is another one; {remedy}")
    return hold_out_validation(limit_images(data, config.data.limit), config.data.validation)


def _open_machine(config: Config, folder: Path, net: Net) -> Machine:
    """Set this process up. A resumed run computes as it began, whatever this shell or machine would choose."""
    path = folder / "machine.json"
    if path.exists():
        try:
            recorded = MachineConfig.model_validate(read_json(path))
        except ValidationError:
            raise UserError(f"{path}: is damaged; restore it from a copy") from None
        return set_up_machine(recorded, net.embed_dim)
    client_bytes = estimate_client_bytes(net, config.train, declared_work(config).images_per_step)
    machine = set_up_machine(config.machine, net.embed_dim, client_bytes)
    write_atomically(path, resolve_machine_config(config.machine, machine).model_dump_json(indent=2).encode())
    return machine


def _class_tasks(config: Config, data: DataSet) -> torch.Tensor | None:
    """Return the task of each class; ``None`` if the model is not told an image's task."""
    if config.data.tasks is None or not config.task_known:
        return None
    tasks = assign_classes_to_tasks(config.data.tasks, config.seed, len(data.classes))
    return torch.from_numpy(tasks).to(data.train.labels.device)


def _make_evaluator(
    config: Config, components: Components, data: DataSet, partition: RunPartition, has_local_clients: bool
) -> FleetEvaluator:
    trainer = components.trainer
    # The models of remote clients are not accessible: without a global model there is none to evaluate here.
    evaluation = config.eval if has_local_clients else config.eval.model_copy(update={"clients": 0})
    return FleetEvaluator(
        components.net,
        trainer.preprocess,
        data.test,
        partition.test,
        trainer.machine,
        evaluation,
        config.seed,
        trainer.class_tasks,
        unseen_clients(config),
    )


def _make_cost_model(config: Config, components: Components, data: DataSet) -> CostModel:
    on_host = replace(components.method.context, device=torch.device("cpu"))
    return CostModel(make_method(config.method, on_host), components.net, config.train, data.train.image_size)


def _make_virtual_fleet(
    config: Config, components: Components, data: DataSet, partition: RunPartition, cost_model: CostModel
) -> VirtualFleet | None:
    def labels(client: int, round: int) -> NDArray[np.int64]:
        return train_labels(data, partition, client, config.task_index(round), components.method.accumulates_tasks)

    def memory_bytes() -> int:
        largest = int(partition.class_counts.sum(axis=1).argmax())
        tasks = range(config.num_tasks)
        last_round = cost_model.late_round([train_labels(data, partition, largest, task) for task in tasks])
        return round_memory(components.net, last_round, config.train, components.trainer.machine.bf16).total

    return make_virtual_fleet(config, memory_bytes, cost_model, labels)


def _make_local_fleet(
    config: Config,
    components: Components,
    data: DataSet,
    partition: RunPartition,
    base: Message,
    evaluator: FleetEvaluator,
    checkpoints: Checkpoints,
    processes: ProcessGroup,
) -> Fleet:
    """Return a fleet whose clients run in this process, or in several processes that share the run."""
    device = components.trainer.machine.device

    def shard(client: int, task_index: int) -> Shard:
        return train_shard(data, partition, client, task_index, components.method.accumulates_tasks)

    # Each of several processes would cache the states of all clients, not only of those that it trains.
    cache_bytes = gpu_memory_bytes(device) // STATE_CACHE_SHARE if processes.size == 1 else 0
    runtime = ClientRuntime(components.method, components.trainer, config.seed, evaluator.evaluate_clients)
    inline = InlineFleet(runtime, shard, base.tensors, checkpoints.client, cache_bytes)
    return inline if processes.size == 1 else DistributedFleet(inline, processes)
