"""One run on several processes, which torchrun starts: each trains a share of a round's clients, all hear all replies.

Every rank plays the same rounds with the same server. Replies are exchanged as they travel on the wire and folded in in
the order of the requests, so the result does not depend on the number of ranks. Only the first rank writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from vitfleet.fleet.base import EvalResult, FleetWrapper, Reply, Request
from vitfleet.fleet.inline import InlineFleet
from vitfleet.message import Message, Payload, State
from vitfleet.wire import Kind, decode, encode

PATIENCE = timedelta(days=1)  # a rank may be at work for long; one that died takes the others with it (torchrun)


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, and which of them this is."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return, on every rank, what one of them says; what the others bring along is not heard."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, source)
        if not int(length):
            return b""
        mine = self.rank == source
        told = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if mine
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(told, source)
        return data if mine else told.numpy().tobytes()

    def broadcast_payload(
        self, kind: type[Kind], named: Payload | None, device: torch.device, source: int = 0
    ) -> Kind | None:
        """Tell a message or a state, or that there is none; it arrives on the device."""
        said = encode(named) if named is not None and self.rank == source else b""
        heard = self.broadcast(said, source)
        if not heard:
            return None
        return decode(kind, heard).to(device)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Let the first rank through, then the others: they find what it has written."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()


SINGLE_PROCESS = ProcessGroup(0, 1)


@contextmanager
def join_process_group() -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, each with a GPU of its own where there are enough."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield SINGLE_PROCESS
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield ProcessGroup(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


@dataclass
class DistributedFleet(FleetWrapper[InlineFleet]):
    """An inline fleet whose clients are trained by several ranks; what they keep, every rank has."""

    processes: ProcessGroup

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train this rank's share, then hear everybody's replies, in the order of the requests."""
        asked = list(requests)
        owners = assign_ranks([len(self.inner.shard(one.client, one.task_index)) for one in asked], self.processes.size)
        mine = [request for request, owner in zip(asked, owners, strict=True) if owner == self.processes.rank]
        replies = {reply.client: reply for reply in self.inner.train(mine)}
        for request, owner in zip(asked, owners, strict=True):
            yield self._hear(request.client, owner, replies.pop(request.client, None))

    def _hear(self, client: int, owner: int, reply: Reply | None) -> Reply:
        """Return a client's reply, whoever has it, and keep the client's state where it was not trained, too."""
        device = self.inner.trainer.machine.device
        about = "" if reply is None else json.dumps({"failure": reply.failure, "verdict": _plain(reply.evaluation)})
        told = json.loads(self.processes.broadcast(about.encode(), owner))
        if told["failure"] is not None:
            return Reply(client, None, failure=told["failure"])
        up = self.processes.broadcast_payload(Message, reply.message if reply else None, device, owner)
        own = self.processes.broadcast_payload(State, self.inner.staged_state(client) if reply else None, device, owner)
        if reply is None:
            self.inner.stage_state(client, own)
        return Reply(client, up, None if told["verdict"] is None else EvalResult(**told["verdict"]))


def _plain(evaluation: EvalResult | None) -> dict[str, int] | None:
    return None if evaluation is None else asdict(evaluation)


def assign_ranks(sizes: Sequence[int], processes: int) -> list[int]:
    """Return the rank of each client: the largest first, each to the rank that has least to do so far."""
    loads = [0] * processes
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owner = loads.index(min(loads))
        owners[place] = owner
        loads[owner] += max(1, sizes[place])
    return owners
