"""From a configuration to everything a run needs, fresh or from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.schema import BufferedSchedule, Config, FilePartition, MachineConfig, TasksConfig
from vitfleet.data.images import DataSet, Shard
from vitfleet.data.manifest import Deal
from vitfleet.data.manifest import save as save_partition
from vitfleet.data.partition import Partition, deal_images
from vitfleet.data.sources import load as load_data
from vitfleet.data.tasks import SUMMARY_FILE, Streams, make_streams, tasks_of_classes
from vitfleet.data.tasks import load as load_streams
from vitfleet.data.tasks import save as save_streams
from vitfleet.errors import ConfigError
from vitfleet.files import write_atomically
from vitfleet.fleet.base import Fleet
from vitfleet.fleet.inline import InlineFleet
from vitfleet.fleet.kit import make_kit, make_net
from vitfleet.fleet.ranks import ALONE, Ranks, SharedFleet
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods import Method, make_method
from vitfleet.methods.knowledge import stored_samples
from vitfleet.models.net import Net
from vitfleet.progress import SILENCE, Progress
from vitfleet.run.checkpoint import Checkpoints
from vitfleet.run.costs import NOTHING, Costing
from vitfleet.run.dispatch import Dispatch, Traffic, Turn, freshen, virtual_fleet
from vitfleet.run.evaluate import Evaluator
from vitfleet.run.folder import identity
from vitfleet.run.memory import round_memory
from vitfleet.run.records import ClientCosts, TaskRecord, clock_after, read_records
from vitfleet.train.drive import SERVER, drive
from vitfleet.train.given import Place
from vitfleet.train.machine import Machine, memory_of, resolved, set_up
from vitfleet.train.room import rough_bytes
from vitfleet.train.trainer import Trainer
from vitfleet.wire import encode

if TYPE_CHECKING:
    from flwr.serverapp import Grid

NEAR = 16  # clients' states may stay on a GPU in this part of its memory


@dataclass
class Session:
    """A run in progress: what does not change, and the state after its last round.

    Attributes
    ----------
    heard, said
        The last round whose reply the server took from a client, and what that said of itself.
    """

    config: Config
    folder: Path
    data: DataSet
    partition: Partition | Streams
    machine: Machine
    net: Net
    method: Method[Any]
    base: Message
    fleet: Fleet
    trainer: Trainer
    evaluator: Evaluator
    checkpoints: Checkpoints
    server: State
    costing: Costing
    dispatch: Dispatch
    round: int = 0
    total_up_bytes: int = 0
    total_down_bytes: int = 0
    heard: dict[int, int] = field(default_factory=dict)
    said: dict[int, Numbers] = field(default_factory=dict)
    learned: list[TaskRecord] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    ranks: Ranks = ALONE

    def up_to_date(self, up: Message, turn: Turn) -> Message:
        """Bring an answer to what the server sent some rounds ago up to date."""
        schedule = self.config.fleet.schedule
        return freshen(up, turn, self.server, schedule) if isinstance(schedule, BufferedSchedule) else up

    def gflops(self, round: int, client: int, numbers: Numbers) -> float | None:
        """Return the operations of a client's training in a round, in billions; ``None`` if it says nothing of it."""
        samples = numbers.get("samples")
        if not isinstance(samples, int):
            return None
        labels, stage = self.labels(client, round), self.config.stage(round)
        rehearsal = self.costing.rehearse(round, client, labels, stage, self.said.get(client))
        return self.costing.round_flops(rehearsal, samples) / 1e9

    def labels(self, client: int, round: int) -> NDArray[np.int64]:
        """Return the labels of what a client trains on in a round."""
        return _labels(self.data, self.partition, client, self.config.stage(round))

    def refine(self, server: State, round: int) -> State:
        """Let the server train, if its method does; it has no images of its own. Of several ranks the first does it."""
        if not self.ranks.first:
            refined = self.ranks.tell_named(State, None, self.machine.device)
            assert refined is not None
            return replace(server, tensors=refined.tensors, numbers=refined.numbers)
        nobody = Shard(self.data.train, torch.empty(0, dtype=torch.long, device=self.machine.device))
        refined = drive(self.method.refine(server, round), self.trainer, nobody, Place(self.config.seed, round, SERVER))
        if self.ranks.size > 1:
            self.ranks.tell(encode(refined))
        return refined

    @property
    def overlaps(self) -> bool:
        """Whether a round may begin while the checkpoint before it is still being written.

        Not where somebody else goes by it: devices remember one round, other ranks read what is written.
        """
        return self.config.fleet.kind == "inline" and self.ranks.size == 1

    @property
    def params(self) -> int:
        """Parameters of the model on a client."""
        return self.net.anatomy.count(self.net.anatomy.whole)

    def costs(self) -> ClientCosts:
        """Return what a client holds and does."""
        flops = self.costing.average(self.costing.rehearse(1, 0, NOTHING))
        # Of all clients, the one that has stored most; devices say no more than that.
        said = max(self.said.values(), key=stored_samples, default=None)
        dearest = self.costing.rehearse(1, 0, NOTHING, self.config.stages - 1, said)
        return ClientCosts(
            params=self.params,
            trainable_params=self.net.anatomy.count(self.method.trains),
            forward_gflops=flops.forward / 1e9,
            train_gflops=flops.training / 1e9,
            peak_memory_bytes=round_memory(self.net, dearest, self.config.train, self.machine.bf16).total,
        )


def open_session(
    config: Config, folder: Path, progress: Progress = SILENCE, grid: Grid | None = None, ranks: Ranks = ALONE
) -> Session:
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
    net = make_net(config, len(data.classes), data.train.channels, data.train.side)
    with ranks.first_ahead():
        machine = _machine(config, folder, net)
        data = data.to(machine.device)
        partition = _deal(config, data, folder) if grid is None else _nobodys(config)
    stages = config.stages
    tasks: torch.Tensor | None = None
    if config.data.tasks and config.task_known:
        tasks = torch.from_numpy(tasks_of_classes(config.data.tasks, config.seed, len(data.classes))).to(machine.device)
    kit = make_kit(config, net, len(data.classes), machine, stages, tasks)
    net, method, trainer = kit.net, kit.method, kit.trainer
    initial = _on(machine.device, net.initial_weights())
    if grid is not None and config.data.tasks is None:  # tasks are compared with what was before them
        net.let_go()
    base = method.base(initial)
    with ranks.first_ahead():
        checkpoints = Checkpoints(folder)
    latest = checkpoints.latest

    def shard(client: int, stage: int) -> Shard:
        return Shard(data.train, torch.from_numpy(partition.train.of(client * stages + stage)).to(machine.device))

    # Nobody looks into a device: where the server has no model, there is none to try out on the common images.
    evaluation = config.eval if grid is None else config.eval.model_copy(update={"clients": 0})
    evaluator = Evaluator(
        net, trainer.preprocess, data.test, partition.test, machine, evaluation, config.seed, stages, tasks
    )
    host = make_method(config.method, replace(method.setting, device=torch.device("cpu")))
    costing = Costing(host, net, config.train, data.train.side)

    def labels(client: int, round: int) -> NDArray[np.int64]:
        return _labels(data, partition, client, config.stage(round))

    def memory_bytes() -> int:
        largest = int(partition.counts.sum(axis=1).argmax())
        dearest = costing.late_round([_labels(data, partition, largest, stage) for stage in range(stages)])
        return round_memory(net, dearest, config.train, machine.bf16).total

    virtual = None
    if grid is None:  # real devices have clocks of their own
        virtual = virtual_fleet(config, memory_bytes, costing, labels)
    if virtual is not None and ranks.first:
        virtual.write(folder)
    fleet: Fleet
    if grid is None:
        stored = checkpoints.client
        # With several ranks each would keep all clients' states, not only those of its own.
        near = memory_of(machine.device) // NEAR if ranks.size == 1 else 0
        inline = InlineFleet(method, trainer, config.seed, shard, evaluator.judge, base.tensors, stored, near)
        fleet = inline if ranks.size == 1 else SharedFleet(inline, ranks)
    else:
        from vitfleet.fleet.flower import FlowerFleet, make_terms

        fleet = FlowerFleet(grid, config.fleet, make_terms(config, data, identity(folder)), base)
    session = Session(
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
        server=method.start(initial),
        costing=costing,
        dispatch=Dispatch(config, method, base, virtual),
        ranks=ranks,
    )
    if latest is not None:
        now = 0.0 if virtual is None else clock_after(folder, latest.round)
        state, traffic = Traffic.unpack(checkpoints.server(), now)
        past = {version: _state_on(machine.device, one) for version, one in traffic.past.items()}
        session.traffic = replace(traffic, past=past)
        # Parts stay on the host: a method that wants them on the device brings them there.
        session.server = replace(_state_on(machine.device, state), parts=state.parts)
        session.round = latest.round
        session.total_up_bytes, session.total_down_bytes = latest.total_up_bytes, latest.total_down_bytes
        session.heard = dict(latest.heard)
        for record in read_records(folder):
            if record.round > latest.round:
                break
            session.learned += [record.learned] if record.learned else []
            session.said |= {one.client: one.numbers for one in record.clients if one.failure is None}
        session.said = {client: numbers for client, numbers in session.said.items() if client in session.heard}
    return session


def _labels(data: DataSet, partition: Partition | Streams, client: int, stage: int) -> NDArray[np.int64]:
    place = partition.place(client, stage) if isinstance(partition, Streams) else client
    index = torch.from_numpy(partition.train.of(place)).to(data.train.labels.device)
    labels: NDArray[np.int64] = data.train.labels[index].cpu().numpy()
    return labels


def _machine(config: Config, folder: Path, net: Net) -> Machine:
    """Set this process up; a run that goes on computes as it began, whatever this shell or machine would choose."""
    path = folder / "machine.json"
    if path.exists():
        return set_up(MachineConfig.model_validate_json(path.read_text()), net.width)
    machine = set_up(config.machine, net.width, rough_bytes(net, config.train))
    write_atomically(path, resolved(config.machine, machine).model_dump_json(indent=2).encode())
    return machine


def _deal(config: Config, data: DataSet, folder: Path) -> Partition | Streams:
    """Deal the images, or the tasks."""
    tasks = config.data.tasks
    return _streams(tasks, config, data, folder) if tasks else _partition(config, data, folder)


def _partition(config: Config, data: DataSet, folder: Path) -> Partition:
    """Deal the images; a run that goes on takes the deal it began with."""
    saved = (folder / "partition.json").exists()
    how = FilePartition(path=str(folder)) if saved else config.data.partition
    partition = deal_images(how, config.fleet.clients, config.seed, data)
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


def _streams(tasks: TasksConfig, config: Config, data: DataSet, folder: Path) -> Streams:
    """Deal the tasks; a run that goes on takes the deal it began with."""
    train_labels, test_labels = (split.labels.cpu().numpy() for split in (data.train, data.test))
    if (folder / SUMMARY_FILE).exists():
        return load_streams(folder, train_labels, test_labels)
    streams = make_streams(tasks, config.fleet.clients, config.seed, train_labels, test_labels, len(data.classes))
    save_streams(streams, tasks, train_labels, test_labels, folder)
    return streams


def _nobodys(config: Config) -> Partition:
    """Return the deal of a server whose devices have images of their own: it deals nothing."""
    nothing = Deal.from_owners(np.zeros(0, dtype=np.int64), config.fleet.clients * config.stages)
    return Partition(nothing, nothing, np.zeros((config.fleet.clients, 0), dtype=np.int64))


def _state_on(device: torch.device, state: State) -> State:
    return State(_on(device, state.tensors), state.numbers)


def _on(device: torch.device, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
