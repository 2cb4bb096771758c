"""From a configuration to everything a run needs, fresh or from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.fleet import BufferedSchedule
from vitfleet.config.schema import Config, MachineConfig, TasksConfig
from vitfleet.costs.flops import NOTHING, CostModel
from vitfleet.costs.memory import round_memory
from vitfleet.data.client_indices import ClientIndices, Partition
from vitfleet.data.images import DataSet, Shard
from vitfleet.data.partition import partition_dataset
from vitfleet.data.partition_io import save_partition
from vitfleet.data.partitioners import FilePartition
from vitfleet.data.sources import load as load_data
from vitfleet.data.tasks import TaskStreams, assign_classes_to_tasks, make_task_streams
from vitfleet.data.tasks_io import SUMMARY_FILE, load_task_streams, save_task_streams
from vitfleet.errors import ConfigError
from vitfleet.files import write_atomically
from vitfleet.fleet.base import Fleet
from vitfleet.fleet.build import build_components, build_net
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.fleet.distributed import SINGLE_PROCESS, DistributedFleet, ProcessGroup
from vitfleet.fleet.inline import InlineFleet
from vitfleet.message import Message, Numbers, State, to_device
from vitfleet.methods import Method, make_method
from vitfleet.methods.episodic_memory import stored_samples
from vitfleet.models.net import Net
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.checkpoint import Checkpoints
from vitfleet.run.evaluation import FleetEvaluator
from vitfleet.run.folder import identity
from vitfleet.run.records import ClientCosts, TaskRecord, clock_after, read_records
from vitfleet.run.round_plan import ClientPlan, InFlight, RoundPlanner, apply_staleness, virtual_fleet
from vitfleet.train.cohort_driver import SERVER_CLIENT, run_participant
from vitfleet.train.cohort_inputs import RngContext
from vitfleet.train.machine import Machine, gpu_memory_bytes, resolve_machine_config, set_up_machine
from vitfleet.train.memory_budget import estimate_client_bytes
from vitfleet.train.trainer import Trainer
from vitfleet.wire import encode

if TYPE_CHECKING:
    from flwr.serverapp import Grid

NEAR = 16  # clients' states may stay on a GPU in this part of its memory


@dataclass
class RunContext:
    """A run in progress: what does not change, and the state after its last round.

    Attributes
    ----------
    heard, said
        The last round whose reply the server took from a client, and what that said of itself.
    """

    config: Config
    folder: Path
    data: DataSet
    partition: Partition | TaskStreams
    machine: Machine
    net: Net
    method: Method[Any]
    base: Message
    fleet: Fleet
    trainer: Trainer
    evaluator: FleetEvaluator
    checkpoints: Checkpoints
    server: State
    cost_model: CostModel
    planner: RoundPlanner
    round: int = 0
    total_up_bytes: int = 0
    total_down_bytes: int = 0
    last_seen: dict[int, int] = field(default_factory=dict)
    client_metrics: dict[int, Numbers] = field(default_factory=dict)
    learned: list[TaskRecord] = field(default_factory=list)
    traffic: InFlight = field(default_factory=InFlight)
    processes: ProcessGroup = SINGLE_PROCESS

    def up_to_date(self, up: Message, turn: ClientPlan) -> Message:
        """Bring an answer to what the server sent some rounds ago up to date."""
        schedule = self.config.fleet.schedule
        return apply_staleness(up, turn, self.server, schedule) if isinstance(schedule, BufferedSchedule) else up

    def gflops(self, round: int, client: int, numbers: Numbers) -> float | None:
        """Return the operations of a client's training in a round, in billions; ``None`` if it says nothing of it."""
        samples = numbers.get("samples")
        if not isinstance(samples, int):
            return None
        labels, task_index = self.labels(client, round), self.config.task_index(round)
        dry_run_result = self.cost_model.dry_run(round, client, labels, task_index, self.client_metrics.get(client))
        return self.cost_model.round_flops(dry_run_result, samples) / 1e9

    def labels(self, client: int, round: int) -> NDArray[np.int64]:
        """Return the labels of what a client trains on in a round."""
        return _labels(self.data, self.partition, client, self.config.task_index(round))

    def server_update(self, server: State, round: int) -> State:
        """Let the server train, if its method does; it has no images of its own. Of several ranks the first does it."""
        if not self.processes.is_first:
            refined = self.processes.broadcast_payload(State, None, self.machine.device)
            assert refined is not None
            return replace(server, tensors=refined.tensors, numbers=refined.numbers)
        nobody = Shard(self.data.train, torch.empty(0, dtype=torch.long, device=self.machine.device))
        refined = run_participant(
            self.method.server_update(server, round),
            self.trainer,
            nobody,
            RngContext(self.config.seed, round, SERVER_CLIENT),
        )
        if self.processes.size > 1:
            self.processes.broadcast(encode(refined))
        return refined

    @property
    def overlaps(self) -> bool:
        """Whether a round may begin while the checkpoint before it is still being written.

        Not where somebody else goes by it: devices remember one round, other ranks read what is written.
        """
        return self.config.fleet.kind == "inline" and self.processes.size == 1

    @property
    def params(self) -> int:
        """Parameters of the model on a client."""
        return self.net.anatomy.count_parameters(self.net.anatomy.whole)

    def costs(self) -> ClientCosts:
        """Return what a client holds and does."""
        flops = self.cost_model.average(self.cost_model.dry_run(1, 0, NOTHING))
        # Of all clients, the one that has stored most; devices say no more than that.
        client_metrics = max(self.client_metrics.values(), key=stored_samples, default=None)
        dearest = self.cost_model.dry_run(1, 0, NOTHING, self.config.num_tasks - 1, client_metrics)
        return ClientCosts(
            params=self.params,
            trainable_params=self.net.anatomy.count_parameters(self.method.trainable),
            forward_gflops=flops.forward / 1e9,
            train_gflops=flops.training / 1e9,
            peak_memory_bytes=round_memory(self.net, dearest, self.config.train, self.machine.bf16).total,
        )


def open_run(
    config: Config,
    folder: Path,
    progress: Progress = NO_PROGRESS,
    grid: Grid | None = None,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> RunContext:
    """Set a run up in its folder, from its last checkpoint if there is one.

    Parameters
    ----------
    grid
        Flower's, for a fleet on machines of its own.
    ranks
        The processes that share the run.
    """
    if (config.fleet.kind == "flower") != (grid is not None):
        remedy = "is started with `vitfleet server`; in one process it is inline"
        raise ConfigError("fleet.kind", config.fleet.kind, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    data = load_data(config.data, progress)
    net = build_net(config, len(data.classes), data.train.channels, data.train.image_size)
    with processes.first_before_others():
        machine = _machine(config, folder, net)
        data = data.to(machine.device)
        partition = _deal(config, data, folder) if grid is None else _nobodys(config)
    num_tasks = config.num_tasks
    tasks: torch.Tensor | None = None
    if config.data.tasks and config.task_known:
        tasks = torch.from_numpy(assign_classes_to_tasks(config.data.tasks, config.seed, len(data.classes))).to(
            machine.device
        )
    components = build_components(config, net, len(data.classes), machine, num_tasks, tasks)
    net, method, trainer = components.net, components.method, components.trainer
    initial = to_device(net.initial_weights(), machine.device)
    if grid is not None and config.data.tasks is None:  # tasks are compared with what was before them
        net.drop_weights()
    base = method.base_message(initial)
    with processes.first_before_others():
        checkpoints = Checkpoints(folder)
    latest = checkpoints.latest

    def shard(client: int, task_index: int) -> Shard:
        return Shard(data.train, torch.from_numpy(partition.train.for_client(client, task_index)).to(machine.device))

    # Nobody looks into a device: where the server has no model, there is none to try out on the common images.
    evaluation = config.eval if grid is None else config.eval.model_copy(update={"clients": 0})
    evaluator = FleetEvaluator(
        net, trainer.preprocess, data.test, partition.test, machine, evaluation, config.seed, tasks
    )
    host = make_method(config.method, replace(method.context, device=torch.device("cpu")))
    cost_model = CostModel(host, net, config.train, data.train.image_size)

    def labels(client: int, round: int) -> NDArray[np.int64]:
        return _labels(data, partition, client, config.task_index(round))

    def memory_bytes() -> int:
        largest = int(partition.class_counts.sum(axis=1).argmax())
        dearest = cost_model.late_round(
            [_labels(data, partition, largest, task_index) for task_index in range(num_tasks)]
        )
        return round_memory(net, dearest, config.train, machine.bf16).total

    virtual = None
    if grid is None:  # real devices have clocks of their own
        virtual = virtual_fleet(config, memory_bytes, cost_model, labels)
    if virtual is not None and processes.is_first:
        virtual.write(folder)
    fleet: Fleet
    if grid is None:
        stored = checkpoints.client
        # With several ranks each would keep all clients' states, not only those of its own.
        near = gpu_memory_bytes(machine.device) // NEAR if processes.size == 1 else 0
        runtime = ClientRuntime(method, trainer, config.seed, evaluator.evaluate_clients)
        inline = InlineFleet(runtime, shard, base.tensors, stored, near)
        fleet = inline if processes.size == 1 else DistributedFleet(inline, processes)
    else:
        from vitfleet.flower.fleet import FlowerFleet, make_run_spec

        fleet = FlowerFleet(grid, config.fleet, make_run_spec(config, data, identity(folder)), base)
    context = RunContext(
        config=config,
        folder=folder,
        data=data,
        partition=partition,
        machine=machine,
        net=net,
        method=method,
        base=base,
        fleet=fleet,
        trainer=trainer,
        evaluator=evaluator,
        checkpoints=checkpoints,
        server=method.initial_state(initial),
        cost_model=cost_model,
        planner=RoundPlanner(config, method, base, virtual),
        processes=processes,
    )
    if latest is not None:
        now = 0.0 if virtual is None else clock_after(folder, latest.round)
        state, traffic = InFlight.unpack(checkpoints.server(), now)
        past = {version: one.to(machine.device) for version, one in traffic.past_states.items()}
        context.traffic = replace(traffic, past_states=past)
        # Parts stay on the host: a method that wants them on the device brings them there.
        context.server = state.to(machine.device)
        context.round = latest.round
        context.total_up_bytes, context.total_down_bytes = latest.total_up_bytes, latest.total_down_bytes
        context.last_seen = dict(latest.last_seen)
        for record in read_records(folder):
            if record.round > latest.round:
                break
            context.learned += [record.task] if record.task else []
            context.client_metrics |= {one.client: one.numbers for one in record.clients if one.failure is None}
        context.client_metrics = {
            client: numbers for client, numbers in context.client_metrics.items() if client in context.last_seen
        }
    return context


def _labels(data: DataSet, partition: Partition | TaskStreams, client: int, task_index: int) -> NDArray[np.int64]:
    index = torch.from_numpy(partition.train.for_client(client, task_index)).to(data.train.labels.device)
    labels: NDArray[np.int64] = data.train.labels[index].cpu().numpy()
    return labels


def _machine(config: Config, folder: Path, net: Net) -> Machine:
    """Set this process up; a run that goes on computes as it began, whatever this shell or machine would choose."""
    path = folder / "machine.json"
    if path.exists():
        return set_up_machine(MachineConfig.model_validate_json(path.read_text()), net.embed_dim)
    machine = set_up_machine(config.machine, net.embed_dim, estimate_client_bytes(net, config.train))
    write_atomically(path, resolve_machine_config(config.machine, machine).model_dump_json(indent=2).encode())
    return machine


def _deal(config: Config, data: DataSet, folder: Path) -> Partition | TaskStreams:
    """Deal the images, or the tasks."""
    tasks = config.data.tasks
    return _streams(tasks, config, data, folder) if tasks else _partition(config, data, folder)


def _partition(config: Config, data: DataSet, folder: Path) -> Partition:
    """Deal the images; a run that goes on takes the deal it began with."""
    saved = (folder / "partition.json").exists()
    how = FilePartition(path=str(folder)) if saved else config.data.partition
    partition = partition_dataset(how, config.fleet.clients, config.seed, data)
    if not saved:
        save_partition(
            partition,
            config.data.partition,
            data.train.labels.cpu().numpy(),
            data.test.labels.cpu().numpy(),
            data.classes,
            folder,
        )
    return partition


def _streams(tasks: TasksConfig, config: Config, data: DataSet, folder: Path) -> TaskStreams:
    """Deal the tasks; a run that goes on takes the deal it began with."""
    train_labels, test_labels = (split.labels.cpu().numpy() for split in (data.train, data.test))
    if (folder / SUMMARY_FILE).exists():
        return load_task_streams(folder, train_labels, test_labels)
    streams = make_task_streams(tasks, config.fleet.clients, config.seed, train_labels, test_labels, len(data.classes))
    save_task_streams(streams, tasks, train_labels, test_labels, folder)
    return streams


def _nobodys(config: Config) -> Partition:
    """Return the deal of a server whose devices have images of their own: it deals nothing."""
    nothing = ClientIndices.empty(config.fleet.clients, config.num_tasks)
    return Partition(nothing, nothing, np.zeros((config.fleet.clients, 0), dtype=np.int64))
