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
from vitfleet.data.tasks import assign_classes_to_tasks, draw_task_order
from vitfleet.errors import UserError
from vitfleet.fleet.base import EvalReply, EvalResult, Reply
from vitfleet.fleet.build import Components, build_components, build_net
from vitfleet.fleet.inline import diverged
from vitfleet.flower.codec import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message, State, Tensors, to_device
from vitfleet.methods.base import ClientJob
from vitfleet.train.cohort_driver import run_participant
from vitfleet.train.cohort_inputs import RngContext
from vitfleet.train.evaluator import Evaluator
from vitfleet.train.machine import Machine, set_up
from vitfleet.wire import Kind, read, write

Images = Callable[[Config, RunSpec], DataSet]


class ClientStorage:
    """What a device keeps of one run: the base it was given, and its state after some rounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of_run(cls, root: Path, run: str) -> ClientStorage:
        """Return what is kept of a run; its name comes from the server and is never used as a path."""
        return cls(root / sha256(run.encode()).hexdigest()[:16])

    def load_base(self) -> Message | None:
        """Return what was given at the first contact; ``None`` if it is gone."""
        return self._read(Message, self.folder / "base.safetensors")

    def save_base(self, base: Message) -> None:
        """Keep what is given once. It belongs to a newcomer, who has nothing else."""
        for path in self.folder.glob("after-*"):
            path.unlink()
        write(self.folder / "base.safetensors", base)

    def load_state(self, round: int) -> State | None:
        """Return the state after a round; ``None`` if it is gone. One with nothing in it: the client keeps nothing."""
        return self._read(State, self._path(round))

    def save_state(self, round: int, state: State | None, before: int | None) -> None:
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
class FlowerClient:
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
    _last: tuple[RunSpec, int, DataSet, ClientSetup] | None = field(default=None, init=False, repr=False)

    def train(self, order: TrainPayload) -> Reply:
        """Do what an order asks; what the device's owner must mend is a failure that says so."""
        try:
            return self._train(order)
        except UserError as error:
            return Reply(order.client, None, failure=str(error))

    def evaluate(self, payload: EvalPayload) -> EvalReply:
        """Sit an exam: try the device's model out on its own test images of its first tasks."""
        try:
            return self._evaluate(payload)
        except UserError as error:
            return EvalReply(payload.client, failure=str(error))

    def _train(self, order: TrainPayload) -> Reply:
        keep = ClientStorage.of_run(self.root, order.run_spec.run)
        if order.base is not None:
            keep.save_base(order.base)
        base = keep.load_base()
        own = None if order.last_round is None else keep.load_state(order.last_round)
        if base is None or (order.last_round is not None and own is None):
            return Reply(order.client, None, failure=_lost(order.last_round), state_lost=True)
        desk = self._desk(order.run_spec, order.client)
        on = desk.machine.device
        shard = Shard(desk.data.train, desk.of_stage(desk.data.train, order.task_index))
        down = order.message.to(on)
        job = ClientJob(
            order.round, order.client, down, to_device(base.tensors, on), _state_on(on, own), shard, order.task_index
        )
        place = RngContext(desk.config.seed, order.round, order.client)
        answer = run_participant(desk.components.method.client_update(job), desk.components.trainer, shard, place)
        failure = diverged(answer)
        if failure is not None:
            return Reply(order.client, None, failure=failure)
        keep.save_state(order.round, answer.client_state, order.last_round)
        return Reply(
            order.client,
            answer.message,
            desk.evaluation(answer.model_weights, order.task_index) if order.evaluate else None,
        )

    def _evaluate(self, payload: EvalPayload) -> EvalReply:
        keep = ClientStorage.of_run(self.root, payload.run_spec.run)
        base = payload.base if payload.base is not None else keep.load_base()
        own = None if payload.last_round is None else keep.load_state(payload.last_round)
        if base is None or (payload.last_round is not None and own is None):
            return EvalReply(payload.client, failure=_lost(payload.last_round))
        desk = self._desk(payload.run_spec, payload.client)
        on = desk.machine.device
        server = State(to_device(payload.server.tensors, on), payload.server.numbers)
        model = desk.components.method.model_weights(server, to_device(base.tensors, on), _state_on(on, own))
        return EvalReply(
            payload.client, tuple(desk.evaluation(model, task_index) for task_index in range(payload.num_tasks))
        )

    def _desk(self, run_spec: RunSpec, client: int) -> ClientSetup:
        config = validate(json.loads(run_spec.config))
        images = self.images(config, run_spec)
        if self._last is None or self._last[:2] != (run_spec, client) or self._last[2] is not images:
            self._last = None  # before the next one is made
            self._last = run_spec, client, images, self._lay(config, run_spec, client, images)
        return self._last[3]

    def _lay(self, config: Config, run_spec: RunSpec, client: int, images: DataSet) -> ClientSetup:
        classes = len(run_spec.classes)
        net = build_net(config, classes, run_spec.channels, run_spec.side)
        machine = set_up(self.machine, net.embed_dim)
        stream = stream_of(config, classes, client, machine.device)
        known = stream.tasks if stream and config.task_known else None
        components = build_components(config, net, classes, machine, config.num_tasks, known)
        net.drop_weights()
        judge = Evaluator(components.net, components.trainer.preprocess, machine, config.eval.batch_size, known)
        return ClientSetup(config, machine, components, judge, images.to(machine.device), stream)


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
    order = [int(task) for task in draw_task_order(tasks, config.seed, client)]
    return Stream(torch.from_numpy(assign_classes_to_tasks(tasks, config.seed, classes)).to(device), order)


@dataclass(frozen=True)
class ClientSetup:
    """What a device works with on one run."""

    config: Config
    machine: Machine
    components: Components
    judge: Evaluator
    data: DataSet
    stream: Stream | None

    def of_stage(self, images: ImageSet, task_index: int) -> Tensor:
        """Return the positions of the images that belong to a stage: all of them, where there are no tasks."""
        if self.stream is None:
            return torch.arange(len(images), device=self.machine.device)
        return torch.nonzero(self.stream.tasks[images.labels] == self.stream.order[task_index]).flatten()

    def evaluation(self, model: Tensors, task_index: int) -> EvalResult:
        """Try a model out on the device's test images of a stage, of which there may be none."""
        index = self.of_stage(self.data.test, task_index)
        if not len(index):
            return EvalResult(0, 0)
        correct, _ = self.judge.evaluate(model, self.data.test, index)
        return EvalResult(int(correct.sum()), len(index))


def _lost(last_round: int | None) -> str:
    return f"it has lost what it kept of round {last_round}"


def _state_on(device: torch.device, own: State | None) -> State | None:
    """Bring what a device kept to where it computes; a state with nothing in it says that it keeps nothing."""
    return own.to(device) if own and (own.tensors or own.numbers) else None
