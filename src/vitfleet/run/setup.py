"""From a configuration to a run that is ready for its next round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from pydantic import ValidationError

from vitfleet.config.head import HeadSolver
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.hardware_profiles import assign_hardware
from vitfleet.costs.memory import round_memory
from vitfleet.data.images import DataSet
from vitfleet.data.sources.from_objects import fingerprint
from vitfleet.data.sources.load import load_dataset
from vitfleet.data.subsets import hold_out_validation, limit_images
from vitfleet.data.tasks import assign_classes_to_tasks
from vitfleet.errors import ConfigError, UserError
from vitfleet.files import MACHINE_FILE, read_json, write_atomically
from vitfleet.fleet.base import Fleet
from vitfleet.fleet.build import Components, build_components, build_last_components, build_net
from vitfleet.fleet.client_runtime import make_runtime
from vitfleet.fleet.distributed import SINGLE_PROCESS, DistributedFleet, ProcessGroup
from vitfleet.fleet.simulation import SimulatedFleet
from vitfleet.message import Message, to_device
from vitfleet.methods import declared_work, make_method
from vitfleet.methods.closed_form.closed_form import ClosedForm, check_pretrained
from vitfleet.models.net import Net
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.clients import ClientImages, VirtualFleet, empty_partition, held_out_clients, open_partition
from vitfleet.run.context import RunContext
from vitfleet.run.evaluate.accuracy import FleetEvaluator
from vitfleet.run.head_exchange import HeadExchange
from vitfleet.run.output.model_file import write_base, write_data_info
from vitfleet.run.round_plan import RoundPlanner
from vitfleet.training.execution.memory_budget import estimate_client_bytes
from vitfleet.training.execution.settings import (
    ExecutionSettings,
    gpu_memory_bytes,
    resolve_machine_config,
    set_up_execution,
)

STATE_CACHE_SHARE = 16  # client states may take 1/16 of a GPU's memory

#: Makes the fleet of remote clients for a run in a folder, given the initial broadcast that every new client gets.
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

    With ``make_fleet`` clients are remote and have their own images; otherwise they run in this process, or in the
    ``processes`` that share the run. ``data`` is passed from Python, or loaded.
    """
    if (config.fleet.kind == "simulation") != (make_fleet is None):
        remedy = "is started with `vitfleet server`; in one process it is simulation"
        raise ConfigError("fleet.kind", config.fleet.kind, remedy)
    if config.head.is_solved_first or isinstance(config.method, HeadSolver):
        check_pretrained(config)
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
    class_to_task = _class_to_task(config, data)
    components = build_components(config, net, len(data.classes), machine, class_to_task)
    last = build_last_components(config, len(data.classes), data.train.channels, data.train.image_size, machine)
    base = components.method.initial_broadcast(to_device(components.net.initial_weights(), machine.device))
    sent = components.method.to_wire(base)
    base = components.method.from_wire(sent)  # the server computes with what its clients have
    if processes.is_first:
        write_base(base, folder)
    images = ClientImages(config, data, partition, components.method.accumulates_tasks)
    evaluator = _make_evaluator(images, components, has_local_clients=make_fleet is None)
    on_host = replace(components.method.context, device=torch.device("cpu"))
    cost_method = make_method(config.method, on_host)
    cost_model = CostModel(cost_method, components.net, config.train, data.train.image_size)
    virtual: VirtualFleet | None = None
    if make_fleet is not None:  # remote clients have real clocks
        fleet = make_fleet(config, data, folder, sent)
    else:
        virtual = _make_virtual_fleet(images, components, cost_model) if config.fleet.devices else None
        fleet = _make_local_fleet(images, components, last, base, evaluator, checkpoints, processes)
    if virtual is not None and processes.is_first:
        virtual.write(folder)
    planner = RoundPlanner(config, components.method, sent, virtual)
    head = _make_head_exchange(images, components, virtual)
    parts = components.net, components.method, components.trainer
    context = RunContext(
        config, folder, images, *parts, base, fleet, evaluator, checkpoints, cost_model, planner, processes, head
    )
    return context if last is None else replace(context, last=_with_last_head(context, last, virtual))


def _checked(config: Config, data: DataSet) -> DataSet:
    """Check that data from Python is what the run began with; apply ``data.limit`` and ``data.validation``."""
    if config.data.fingerprint != fingerprint(data):
        remedy = "pass the data set that the run was started with"
        raise ConfigError("data.fingerprint", config.data.fingerprint, f"the data passed is another one; {remedy}")
    return hold_out_validation(limit_images(data, config.data.limit), config.data.validation)


def _open_machine(config: Config, folder: Path, net: Net) -> ExecutionSettings:
    """Set this process up. A resumed run computes as it began, whatever this shell or machine would choose."""
    path = folder / MACHINE_FILE
    if path.exists():
        try:
            recorded = MachineConfig.model_validate(read_json(path))
        except ValidationError:
            raise UserError(f"{path}: is damaged; restore it from a copy") from None
        return set_up_execution(recorded, net.embed_dim)
    client_bytes = estimate_client_bytes(net, config.train, declared_work(config).images_per_step)
    machine = set_up_execution(config.machine, net.embed_dim, client_bytes)
    write_atomically(path, resolve_machine_config(config.machine, machine).model_dump_json(indent=2).encode())
    return machine


def _class_to_task(config: Config, data: DataSet) -> torch.Tensor | None:
    """Return the task of each class; ``None`` if the model is not told an image's task."""
    if config.data.tasks is None or not config.task_known:
        return None
    tasks = assign_classes_to_tasks(config.data.tasks, config.seed, len(data.classes))
    return torch.from_numpy(tasks).to(data.train.labels.device)


def _make_evaluator(images: ClientImages, components: Components, has_local_clients: bool) -> FleetEvaluator:
    config, trainer = images.config, components.trainer
    # The models of remote clients are not accessible: without a global model there is none to evaluate here.
    evaluation = config.eval if has_local_clients else config.eval.model_copy(update={"clients": 0})
    return FleetEvaluator(
        components.net,
        trainer.preprocess,
        images.data.test,
        images.partition.test,
        trainer.machine,
        evaluation,
        config.seed,
        trainer.class_to_task,
        held_out_clients(config),
    )


def _make_head_exchange(
    images: ClientImages, components: Components, virtual: VirtualFleet | None
) -> HeadExchange | None:
    """Return how the head is solved: the devices need less memory for it than for a round."""
    solver = components.head_solver
    if solver is None:
        return None
    assert isinstance(solver, ClosedForm)
    on_host = replace(solver.context, device=torch.device("cpu"))
    train = solver.context.train
    cost_model = CostModel(make_method(solver.params, on_host), components.net, train, images.data.train.image_size)
    if virtual is not None:
        passes = cost_model.dry_run(1, 0, np.concatenate(images.labels_by_task()))
        memory = round_memory(components.net, passes, train, components.trainer.machine.bf16).total
        virtual = replace(virtual, memory_bytes=memory, cost_model=cost_model)
    return HeadExchange(solver, cost_model, virtual)


def _with_last_head(context: RunContext, last: Components, virtual: VirtualFleet | None) -> RunContext:
    """Return the run with the model that it ends with, whose head ``[head.last]`` solves."""
    evaluator = replace(context.evaluator, net=last.net)
    exchange = _make_head_exchange(context.images, last, virtual)
    assert exchange is not None
    return replace(
        context,
        config=last.method.context.config,
        net=last.net,
        method=last.method,
        trainer=last.trainer,
        evaluator=evaluator,
        head=replace(exchange, kind="last-head"),
    )


def _make_virtual_fleet(images: ClientImages, components: Components, cost_model: CostModel) -> VirtualFleet:
    config = images.config
    last_round = cost_model.late_round(images.labels_by_task())
    memory = round_memory(components.net, last_round, config.train, components.trainer.machine.bf16).total
    devices = assign_hardware(config.fleet.devices, config.fleet.clients, config.seed)
    return VirtualFleet(config.fleet, devices, memory, cost_model, images)


def _make_local_fleet(
    images: ClientImages,
    components: Components,
    last: Components | None,
    base: Message,
    evaluator: FleetEvaluator,
    checkpoints: Checkpoints,
    processes: ProcessGroup,
) -> Fleet:
    """Return a fleet whose clients run in this process, or in several processes that share the run."""
    # Each of several processes would cache the states of all clients, not only of those that it trains.
    memory = gpu_memory_bytes(components.trainer.machine.device) if processes.size == 1 else 0
    runtime = make_runtime(components, evaluator.evaluate_clients)
    if last is not None:
        its_runtime = make_runtime(last, replace(evaluator, net=last.net).evaluate_clients)
        runtime = replace(runtime, make_last=lambda: its_runtime)
    fleet = SimulatedFleet(runtime, images.shard, base.tensors, checkpoints.client, memory // STATE_CACHE_SHARE)
    return fleet if processes.size == 1 else DistributedFleet(fleet, processes)
