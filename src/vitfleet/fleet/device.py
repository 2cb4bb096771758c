"""A client on a machine of its own: its images, what it keeps on disk, and how it answers an order.

What it keeps lies in a folder of its own for every run. A file of what it kept after a round is named by that round.
The server says in every order which round it last took a reply of, and that is the state the device goes on from: a
round whose reply came too late, got lost or was refused never happened, and a server that was killed in the middle of
a round can ask for it again. So a device keeps two states, the one before a round and the one after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from vitfleet.config.load import validate
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet, ImageSet, Shard
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.fleet.base import Reply, Verdict
from vitfleet.fleet.envelope import Order, Terms
from vitfleet.fleet.inline import diverged
from vitfleet.fleet.kit import make_kit, make_net
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import Job
from vitfleet.train.cohort import Place
from vitfleet.train.drive import drive
from vitfleet.train.judge import Judge
from vitfleet.train.machine import set_up
from vitfleet.wire import Kind, decode, encode

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
        write_atomically(self.folder / "base.safetensors", encode(base))

    def after(self, round: int) -> State | None:
        """Return the state after a round; ``None`` if it is gone. One with nothing in it: the client keeps nothing."""
        return self._read(State, self._path(round))

    def keep(self, round: int, state: State | None, before: int | None) -> None:
        """Keep the state after a round beside the one before it, and let go of all others."""
        write_atomically(self._path(round), encode(state or State()))
        wanted = {self._path(one) for one in (round, before) if one is not None}
        for path in set(self.folder.glob("after-*")) - wanted:
            path.unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"after-{round:06d}.safetensors"

    def _read(self, kind: type[Kind], path: Path) -> Kind | None:
        try:
            return decode(kind, path.read_bytes())
        except (FileNotFoundError, UserError):  # a damaged file is a lost one: the server gives it anew
            return None


@dataclass(frozen=True)
class Device:
    """One client, on its own machine.

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

    def answer(self, order: Order) -> Reply:
        """Do what an order asks; what the device's owner must mend is a failure that says so."""
        try:
            return self._answer(order)
        except UserError as error:
            return Reply(order.client, None, failure=str(error))

    def _answer(self, order: Order) -> Reply:
        keep = Keep.of_run(self.root, order.terms.run)
        if order.base is not None:
            keep.keep_base(order.base)
        base = keep.base()
        own = None if order.since is None else keep.after(order.since)
        if base is None or (order.since is not None and own is None):
            return Reply(order.client, None, failure=f"it has lost what it kept of round {order.since}", lost=True)
        config = validate(json.loads(order.terms.config))
        classes = len(order.terms.classes)
        net = make_net(config, classes, order.terms.channels, order.terms.side)
        machine = set_up(self.machine, net.width)
        kit = make_kit(config, net, classes, machine)
        data = self.images(config, order.terms).to(machine.device)
        shard = Shard(data.train, torch.arange(len(data.train), device=machine.device))
        job = Job(
            order.round,
            order.client,
            Message(_on(machine.device, order.down.tensors), order.down.numbers),
            _on(machine.device, base.tensors),
            # A state with nothing in it says that the client keeps nothing.
            State(_on(machine.device, own.tensors), own.numbers) if own and (own.tensors or own.numbers) else None,
            shard,
        )
        answer = drive(kit.method.work(job), kit.trainer, shard, Place(config.seed, order.round, order.client))
        failure = diverged(answer)
        if failure is not None:
            return Reply(order.client, None, failure=failure)
        keep.keep(order.round, answer.own, order.since)
        judge = Judge(net, kit.trainer.preprocess, machine, config.eval.batch_size)
        return Reply(order.client, answer.up, verdict_of(judge, answer.model, data.test) if order.evaluate else None)


def verdict_of(judge: Judge, model: Tensors, test: ImageSet) -> Verdict:
    """Try a model out on a device's test images, of which there may be none."""
    if not len(test):
        return Verdict(0, 0)
    right, _ = judge.answer(model, test)
    return Verdict(int(right.sum()), len(test))


def _on(device: torch.device, tensors: Tensors) -> dict[str, Tensor]:
    return {name: one.to(device) for name, one in tensors.items()}
