"""From a configuration to everything a run needs, fresh or from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.schema import BufferedSchedule, Config, FilePartition, MachineConfig, TasksConfig
from vitfleet.data.images import DataSet, Shard
from vitfleet.data.manifest import save as save_partition
from vitfleet.data.partition import Partition, make_partition
from vitfleet.data.sources import load as load_data
from vitfleet.data.tasks import SUMMARY_FILE, Streams, make_streams
from vitfleet.data.tasks import load as load_streams
from vitfleet.data.tasks import save as save_streams
from vitfleet.files import write_atomically
from vitfleet.fleet.base import Fleet
from vitfleet.fleet.inline import InlineFleet
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods import Method, Setting, adapt, make_method
from vitfleet.models.net import Net
from vitfleet.models.zoo import build
from vitfleet.progress import SILENCE, Progress
from vitfleet.run.checkpoint import Checkpoints
from vitfleet.run.costs import NOTHING, Costing, Rehearsal
from vitfleet.run.dispatch import Dispatch, Traffic, Turn, freshen, virtual_fleet
from vitfleet.run.evaluate import Evaluator
from vitfleet.run.memory import training_memory
from vitfleet.run.records import ClientCosts, TaskRecord, clock_after, read_records
from vitfleet.train.cohort import Place
from vitfleet.train.drive import SERVER, drive
from vitfleet.train.machine import Machine, resolved, set_up
from vitfleet.train.trainer import Trainer, preprocess_for


@dataclass
class Session:
    """A run in progress: what does not change, and the state after its last round."""

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
    learned: list[TaskRecord] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def up_to_date(self, up: Message, turn: Turn) -> Message:
        """Bring an answer to what the server sent some rounds ago up to date."""
        schedule = self.config.fleet.schedule
        return freshen(up, turn, self.server, schedule) if isinstance(schedule, BufferedSchedule) else up

    def gflops(self, round: int, client: int, numbers: Numbers) -> float | None:
        """Return the operations of a client's training in a round, in billions; ``None`` if it says nothing of it."""
        samples = numbers.get("samples")
        if not isinstance(samples, int):
            return None
        rehearsal = self.costing.rehearse(round, client, self.labels(client, round))
        return self.costing.round_flops(rehearsal, samples) / 1e9

    def labels(self, client: int, round: int) -> NDArray[np.int64]:
        """Return the labels of what a client trains on in a round."""
        return _labels(self.config, self.data, self.partition, client, round)

    def refine(self, server: State, round: int) -> State:
        """Let the server train, if its method does; it has no images of its own."""
        nobody = Shard(self.data.train, torch.empty(0, dtype=torch.long, device=self.machine.device))
        return drive(self.method.refine(server, round), self.trainer, nobody, Place(self.config.seed, round, SERVER))

    @property
    def params(self) -> int:
        """Parameters of the model on a client."""
        return self.net.anatomy.count(self.net.anatomy.whole)

    def costs(self) -> ClientCosts:
        """Return what a client holds and does."""
        rehearsal = self.costing.rehearse(1, 0, NOTHING)
        flops = self.costing.average(rehearsal)
        return ClientCosts(
            params=self.params,
            trainable_params=self.net.anatomy.count(self.method.trains),
            forward_gflops=flops.forward / 1e9,
            train_gflops=flops.training / 1e9,
            peak_memory_bytes=_memory(self.net, rehearsal, self.config, self.machine),
        )


def open_session(config: Config, folder: Path, progress: Progress = SILENCE) -> Session:
    """Set a run up in its folder, from its last checkpoint if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load_data(config.data, progress)
    net = build(
        config.model,
        len(data.classes),
        data.train.channels,
        data.train.side,
        config.seed,
        partial(adapt, config.method),
    )
    machine = _machine(config, folder, net.width)
    data, net = data.to(machine.device), net.to(machine.device)
    partition = (
        _streams(config.data.tasks, config, data, folder) if config.data.tasks else _partition(config, data, folder)
    )
    stages = partition.stages if isinstance(partition, Streams) else 1
    setting = Setting.of(net, config.train, config.rounds, config.seed, len(data.classes), machine.device, stages)
    method = make_method(config.method, setting)
    initial = _on(machine.device, net.initial_weights())
    base = method.base(initial)
    checkpoints = Checkpoints(folder)
    latest = checkpoints.latest
    tasks: torch.Tensor | None = None
    if isinstance(partition, Streams) and config.data.tasks and config.data.tasks.incremental == "task":
        tasks = torch.from_numpy(partition.task_of_class).to(machine.device)
    trainer = Trainer(
        net,
        preprocess_for(net, machine.device),
        config.train,
        config.data.augment,
        config.schedule_rounds,
        machine,
        tasks,
    )

    def shard(client: int, stage: int) -> Shard:
        return Shard(data.train, torch.from_numpy(partition.train.of(client * stages + stage)).to(machine.device))

    evaluator = Evaluator(
        net, trainer.preprocess, data.test, partition.test, machine, config.eval, config.seed, stages, tasks
    )
    host = make_method(config.method, replace(setting, device=torch.device("cpu")))
    costing = Costing(host, net, config.train)

    def memory_bytes() -> int:
        return _memory(net, costing.rehearse(1, 0, NOTHING), config, machine)

    virtual = virtual_fleet(config, memory_bytes, costing, partial(_labels, config, data, partition))
    if virtual is not None:
        virtual.write(folder)
    fleet = InlineFleet(method, trainer, config.seed, shard, evaluator.judge, base.tensors, stored=checkpoints.client)
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
    )
    if latest is not None:
        now = 0.0 if virtual is None else clock_after(folder, latest.round)
        stored, traffic = Traffic.unpack(checkpoints.server(), now)
        past = {version: _state_on(machine.device, state) for version, state in traffic.past.items()}
        session.traffic = replace(traffic, past=past)
        # Parts stay on the host: a method that wants them on the device brings them there.
        session.server = replace(_state_on(machine.device, stored), parts=stored.parts)
        session.round = latest.round
        session.total_up_bytes, session.total_down_bytes = latest.total_up_bytes, latest.total_down_bytes
        session.heard = dict(latest.heard)
        session.learned = [
            record.learned for record in read_records(folder) if record.learned and record.round <= latest.round
        ]
    return session


def _labels(
    config: Config, data: DataSet, partition: Partition | Streams, client: int, round: int
) -> NDArray[np.int64]:
    place = partition.place(client, config.stage(round)) if isinstance(partition, Streams) else client
    index = torch.from_numpy(partition.train.of(place)).to(data.train.labels.device)
    labels: NDArray[np.int64] = data.train.labels[index].cpu().numpy()
    return labels


def _memory(net: Net, rehearsal: Rehearsal, config: Config, machine: Machine) -> int:
    """Return the memory that the largest of a client's trainings needs."""
    return max(training_memory(net, fit, config.train, machine.bf16).total for fit in rehearsal.fits)


def _machine(config: Config, folder: Path, width: int) -> Machine:
    """Set this process up; a run that goes on computes as it began, whatever this shell or machine would choose."""
    path = folder / "machine.json"
    if path.exists():
        return set_up(MachineConfig.model_validate_json(path.read_text()), width)
    machine = set_up(config.machine, width)
    write_atomically(path, resolved(config.machine, machine).model_dump_json(indent=2).encode())
    return machine


def _partition(config: Config, data: DataSet, folder: Path) -> Partition:
    """Deal the images; a run that goes on takes the deal it began with."""
    saved = (folder / "partition.json").exists()
    how = FilePartition(path=str(folder)) if saved else config.data.partition
    train, test = data.train, data.test
    partition = make_partition(
        how,
        config.fleet.clients,
        config.seed,
        train.labels.cpu().numpy(),
        test.labels.cpu().numpy(),
        len(data.classes),
        None if train.sources is None else train.sources.numpy(),
        None if test.sources is None else test.sources.numpy(),
    )
    if not saved:
        save_partition(
            partition,
            config.data.partition,
            train.labels.cpu().numpy(),
            test.labels.cpu().numpy(),
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


def _state_on(device: torch.device, state: State) -> State:
    return State(_on(device, state.tensors), state.numbers)


def _on(device: torch.device, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
