"""A client on a machine of its own: its images, what it keeps on disk, and how it answers an order.

What it keeps lies in a folder of its own for every run. A file of what it kept after a round is named by that round.
The server says in every order which round it last took a reply of, and that is the state the device goes on from: a
round whose reply came too late, got lost or was refused never happened, and a server that was killed in the middle of
a round can ask for it again. So a device keeps two states, the one before a round and the one after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from vitfleet.config.load import validate
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet, ImageSet, Shard
from vitfleet.data.tasks import order_of, tasks_of_classes
from vitfleet.errors import UserError
from vitfleet.fleet.base import Marks, Reply, Verdict
from vitfleet.fleet.envelope import Order, Paper, Terms
from vitfleet.fleet.inline import diverged
from vitfleet.fleet.kit import Kit, make_kit, make_net
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import Job
from vitfleet.train.drive import drive
from vitfleet.train.given import Place
from vitfleet.train.judge import Judge
from vitfleet.train.machine import Machine, set_up
from vitfleet.wire import Kind, read, write

Images = Callable[[Config, Terms], DataSet]


class Keep:
    """What a device keeps of one run: the base it was given, and its state after some rounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of_run(cls, root: Path, run: str) -> Keep:
        """Return what is kept of a run; its name comes from the server and is never used as a path."""
        return cls(root / sha256(run.encode()).hexdigest()[:16])

    def base(self) -> Message | None:
        """Return what was given at the first contact; ``None`` if it is gone."""
        return self._read(Message, self.folder / "base.safetensors")

    def keep_base(self, base: Message) -> None:
        """Keep what is given once. It belongs to a newcomer, who has nothing else."""
        for path in self.folder.glob("after-*"):
            path.unlink()
        write(self.folder / "base.safetensors", base)

    def after(self, round: int) -> State | None:
        """Return the state after a round; ``None`` if it is gone. One with nothing in it: the client keeps nothing."""
        return self._read(State, self._path(round))

    def keep(self, round: int, state: State | None, before: int | None) -> None:
        """Keep the state after a round beside the one before it, and let go of all others."""
        write(self._path(round), state or State())
        wanted = {self._path(one) for one in (round, before) if one is not None}
        for path in set(self.folder.glob("after-*")) - wanted:
            path.unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"after-{round:06d}.safetensors"

    def _read(self, kind: type[Kind], path: Path) -> Kind | None:
        try:
            return read(kind, path)
        except (FileNotFoundError, UserError):  # a damaged file is a lost one: the server gives it anew
            return None


@dataclass
class Device:
    """One client, on its own machine. What it works with stays from one order to the next of the same run.

    Attributes
    ----------
    images
        Returns the device's images under a run's terms.
    root
        Where it keeps what it keeps.
    machine
        What it computes on, as its owner says: a run does not decide that.
    """

    images: Images
    root: Path
    machine: MachineConfig
    _last: tuple[Terms, int, DataSet, Desk] | None = field(default=None, init=False, repr=False)

    def answer(self, order: Order) -> Reply:
        """Do what an order asks; what the device's owner must mend is a failure that says so."""
        try:
            return self._answer(order)
        except UserError as error:
            return Reply(order.client, None, failure=str(error))

    def sit(self, paper: Paper) -> Marks:
        """Sit an exam: try the device's model out on its own test images of its first tasks."""
        try:
            return self._sit(paper)
        except UserError as error:
            return Marks(paper.client, failure=str(error))

    def _answer(self, order: Order) -> Reply:
        keep = Keep.of_run(self.root, order.terms.run)
        if order.base is not None:
            keep.keep_base(order.base)
        base = keep.base()
        own = None if order.since is None else keep.after(order.since)
        if base is None or (order.since is not None and own is None):
            return Reply(order.client, None, failure=_lost(order.since), lost=True)
        desk = self._desk(order.terms, order.client)
        on = desk.machine.device
        shard = Shard(desk.data.train, desk.of_stage(desk.data.train, order.stage))
        down = Message(_on(on, order.down.tensors), order.down.numbers)
        job = Job(order.round, order.client, down, _on(on, base.tensors), _state_on(on, own), shard, order.stage)
        place = Place(desk.config.seed, order.round, order.client)
        answer = drive(desk.kit.method.work(job), desk.kit.trainer, shard, place)
        failure = diverged(answer)
        if failure is not None:
            return Reply(order.client, None, failure=failure)
        keep.keep(order.round, answer.own, order.since)
        return Reply(order.client, answer.up, desk.verdict(answer.model, order.stage) if order.evaluate else None)

    def _sit(self, paper: Paper) -> Marks:
        keep = Keep.of_run(self.root, paper.terms.run)
        base = paper.base if paper.base is not None else keep.base()
        own = None if paper.since is None else keep.after(paper.since)
        if base is None or (paper.since is not None and own is None):
            return Marks(paper.client, failure=_lost(paper.since))
        desk = self._desk(paper.terms, paper.client)
        on = desk.machine.device
        server = State(_on(on, paper.server.tensors), paper.server.numbers)
        model = desk.kit.method.model(server, _on(on, base.tensors), _state_on(on, own))
        return Marks(paper.client, tuple(desk.verdict(model, stage) for stage in range(paper.stages)))

    def _desk(self, terms: Terms, client: int) -> Desk:
        config = validate(json.loads(terms.config))
        images = self.images(config, terms)
        if self._last is None or self._last[:2] != (terms, client) or self._last[2] is not images:
            self._last = None  # before the next one is made
            self._last = terms, client, images, self._lay(config, terms, client, images)
        return self._last[3]

    def _lay(self, config: Config, terms: Terms, client: int, images: DataSet) -> Desk:
        classes = len(terms.classes)
        net = make_net(config, classes, terms.channels, terms.side)
        machine = set_up(self.machine, net.width)
        stream = stream_of(config, classes, client, machine.device)
        known = stream.tasks if stream and config.task_known else None
        kit = make_kit(config, net, classes, machine, config.stages, known)
        net.let_go()
        judge = Judge(kit.net, kit.trainer.preprocess, machine, config.eval.batch_size, known)
        return Desk(config, machine, kit, judge, images.to(machine.device), stream)


@dataclass(frozen=True)
class Stream:
    """A device's stream of tasks: the task of each class, and the tasks in the order in which it learns them."""

    tasks: Tensor
    order: list[int]


def stream_of(config: Config, classes: int, client: int, device: torch.device) -> Stream | None:
    """Return a client's stream; ``None`` where there are no tasks. Server and devices draw the same one."""
    tasks = config.data.tasks
    if tasks is None:
        return None
    order = [int(task) for task in order_of(tasks, config.seed, client)]
    return Stream(torch.from_numpy(tasks_of_classes(tasks, config.seed, classes)).to(device), order)


@dataclass(frozen=True)
class Desk:
    """What a device works with on one run."""

    config: Config
    machine: Machine
    kit: Kit
    judge: Judge
    data: DataSet
    stream: Stream | None

    def of_stage(self, images: ImageSet, stage: int) -> Tensor:
        """Return the positions of the images that belong to a stage: all of them, where there are no tasks."""
        if self.stream is None:
            return torch.arange(len(images), device=self.machine.device)
        return torch.nonzero(self.stream.tasks[images.labels] == self.stream.order[stage]).flatten()

    def verdict(self, model: Tensors, stage: int) -> Verdict:
        """Try a model out on the device's test images of a stage, of which there may be none."""
        index = self.of_stage(self.data.test, stage)
        if not len(index):
            return Verdict(0, 0)
        right, _ = self.judge.answer(model, self.data.test, index)
        return Verdict(int(right.sum()), len(index))


def _lost(since: int | None) -> str:
    return f"it has lost what it kept of round {since}"


def _state_on(device: torch.device, own: State | None) -> State | None:
    """Bring what a device kept to where it computes; a state with nothing in it says that it keeps nothing."""
    return State(_on(device, own.tensors), own.numbers) if own and (own.tensors or own.numbers) else None


def _on(device: torch.device, tensors: Tensors) -> dict[str, Tensor]:
    return {name: one.to(device) for name, one in tensors.items()}
